"""Rollouts of a vector whose envs run in-process: a loop of steps in the calling thread, one actor after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.future import ActorFuture, LazyOutcome
from envactors.actor.job import Activity
from envactors.backends.thread import ThreadMemory
from envactors.errors import VectorEnvError, VectorStepError
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import ArraySpec, flatten
from envactors.rollout.assembly import ResultsWithoutArrays, assemble
from envactors.rollout.base import RolloutEngine, RolloutFutures
from envactors.rollout.env_plan import KIND_REPEAT, KIND_TRUNCATED, next_kind
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.policy import ActorPolicy, actions_at, write_output
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import TrajectoryLayout
from envactors.vector.inline import InlineEngine
from envactors.vector.results import Batch, batch_of, failure_in


class InlineRolloutEngine(RolloutEngine):
    """Runs rollouts in the calling thread.

    Args:
        engine: Steps the envs.
    """

    _engine: InlineEngine

    def __init__(self, engine: InlineEngine) -> None:
        super().__init__(engine)
        # The policy of each actor.
        self._policies: list[ActorPolicy] = []
        # The parameters given last, pickled without the contents of their arrays, and these.
        self._pickled = b""
        self._arrays: list[bytes] = []
        # How often the user has given parameters since the policy was set.
        self._version = 0

    def _make_policies(self, make_policy: bytes, seed: int) -> bool:
        engine = self._engine
        for actor in engine.actors:
            actor.make_missing(Activity("set_policy", actor.indices.start))
        self._policies = [ActorPolicy(make_policy, seed, actor.indices) for actor in engine.actors]
        self._version = 0
        observation, reward = engine.observation_spec, engine.reward_spec
        assert observation is not None, "`RolloutEngine.set_policy` has checked it"
        plain_reward = reward if isinstance(reward, ArraySpec) and reward.batchable else None
        self._layout = TrajectoryLayout(observation, engine.action_spec, plain_reward, (), len(engine.all_envs.ids), 0)
        return all(policy.can_load for policy in self._policies)

    def start(self, steps: int, parameters: Any, *, each: bool = False) -> RolloutFutures:
        """Run a rollout; see `RolloutEngine.start`."""
        self.check_free()
        self._engine.episodes.check_steppable(self._engine.all_envs.ids)
        self._engine.check_open(self._engine.all_envs, "rollout")
        pickled = self._pickle_parameters(parameters)
        buffer = TrajectoryBuffer(self._layout._replace(steps=steps), ThreadMemory())
        if pickled is not None:
            self._pickled, self._arrays = pickled[0], [bytes(array) for array in pickled[1]]  # views are read-only
            self._version += 1
        shares = [[policy] for policy in self._policies] if each else [self._policies]
        futures = [self._run(buffer, policies) for policies in shares]
        self._layout = buffer.trajectory.layout
        self._next_index += 1
        return futures

    def _run(self, buffer: TrajectoryBuffer, policies: list[ActorPolicy]) -> ActorFuture[Rollout]:
        """Run the parts of some actors; return their future, which is done.

        Its result is made when somebody asks for it, since the policies of other actors may still add extras.
        """
        results = ResultsWithoutArrays()
        for policy in policies:
            try:
                if policy.version != self._version:
                    policy.load(self._version, self._pickled, self._arrays)
                policy.rollout_index = self._next_index
                InlinePart(self._engine, buffer, policy, results).run()
            except Exception as error:
                if results.policy_error is None:
                    results.policy_error = error
        results.accepted_steps.update(enumerate(buffer.trajectory.steps_complete.tolist()))
        indices = range(policies[0].indices.start, policies[-1].indices.stop)
        versions = np.full(len(policies), self._version)
        is_failure = results.policy_error is not None or bool(results.errors_to_raise)

        def read() -> tuple[Rollout | None, BaseException | None]:
            return assemble(buffer.trajectory, indices, results, versions, copies=False)

        future: ActorFuture[Rollout] = ActorFuture(self._engine.actors[0], None)
        future.set_outcome(LazyOutcome(read, is_failure=is_failure))
        return future


@dataclasses.dataclass(eq=False)
class InlinePart:
    """One actor's part of a rollout.

    Attributes:
        engine: Steps the envs.
        buffer: The memory that the steps are written into.
        policy: The policy of the actor.
        results: Gets the results that have no array in the trajectory.
    """

    engine: InlineEngine
    buffer: TrajectoryBuffer
    policy: ActorPolicy
    results: ResultsWithoutArrays

    def run(self) -> None:
        """Run the envs of the actor, until one raises, or there is too little memory for the policy's output.

        Raises:
            Exception: Raised by the policy, or because of its output.
        """
        obs, starts = self._write_observations(0, self.policy.indices)
        for step in range(self.buffer.trajectory.layout.steps):
            output = self.policy.choose(step, obs, starts)
            failures = self._write_output(step, output) or self._run_envs(step, self._write_kinds(step))
            if failures:
                self._end_with(step, failures)
                return
            obs, starts = self._write_observations(step + 1, self.policy.indices)

    def _end_with(self, step: int, failures: dict[int, BaseException]) -> None:
        """End with the errors of some envs in a step, which the others have taken."""
        self.results.errors_to_raise.update(failures)
        self.results.errors_by_step.update({(step, index): error for index, error in failures.items()})
        for index in set(self.policy.indices).difference(failures):
            self._write_observations(step + 1, range(index, index + 1))

    def _write_output(self, step: int, output: Any) -> dict[int, BaseException]:
        """Write the output of the policy; return an error for each env if there is too little memory for it."""
        indices = self.policy.indices
        needed_layout = write_output(self.buffer.trajectory, indices, step, output)
        if needed_layout is None:
            return {}
        try:
            self.buffer.add_room(needed_layout)
        except VectorEnvError as error:
            (actor,) = (each for each in self.engine.actors if each.indices == indices)
            return dict.fromkeys(indices, actor.errors.no_memory_for_results(Activity("rollout", indices.start), error))
        write_output(self.buffer.trajectory, indices, step, output)
        return {}

    def _write_observations(self, step: int, indices: range) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Write the observations before a step; return them, read-only, and whether each begins its episode."""
        trajectory, mine = self.buffer.trajectory, slice_of(indices)
        obs = self.engine.last_observations(indices)
        objects = []
        for array, leaf in zip(trajectory.observations, flatten(trajectory.layout.observation, obs), strict=True):
            if array is None:
                objects.append(leaf)
            else:
                array[step, mine] = leaf
                leaf.flags.writeable = False
        if objects:
            for index, *leaves in zip(indices, *objects, strict=True):
                self.results.objects[step, index] = leaves
        starts = np.array([self.engine.last_obs_is_first(index) for index in indices], np.bool_)
        trajectory.starts[step, mine] = starts
        return obs, starts

    def _write_kinds(self, step: int) -> list[int]:
        """Write the kind of each env's step; return the envs that do not repeat their last observation.

        A repeat is complete with that: the observation is written as that of any env, and the rest are zeros.
        """
        trajectory, indices, mine = self.buffer.trajectory, self.policy.indices, slice_of(self.policy.indices)
        kinds = np.array([next_kind(self.engine.episodes, index) for index in indices], np.uint8)
        trajectory.kinds[step, mine] = kinds
        trajectory.steps_complete[mine] += kinds == KIND_REPEAT
        return [index for index, kind in zip(indices, kinds.tolist(), strict=True) if kind != KIND_REPEAT]

    def _run_envs(self, step: int, acting: list[int]) -> dict[int, BaseException]:
        """Run a step of the envs that do not repeat; return the errors of those that failed."""
        engine, actions = self.engine, actions_at(self.buffer.trajectory, step, self.policy.indices)
        selection = engine.select(acting)
        try:
            engine.start_steps(selection, [actions[index] for index in acting], streams=True)
            batch = batch_of(acting, engine.wait_for_results(selection, None, None, "rollout"))
        except VectorStepError as error:
            return {**error.failures, **self._write_results(step, error.batch)}
        except Exception as error:  # a request was refused, as by a closed actor
            return dict.fromkeys(acting, error)
        return self._write_results(step, batch)

    def _write_results(self, step: int, batch: Batch) -> dict[int, BaseException]:
        """Write the results of a step; return the errors of envs whose rewards do not fit into the trajectory."""
        trajectory = self.buffer.trajectory
        failures: dict[int, BaseException] = {}
        ends = zip(batch.terminated.tolist(), batch.truncated.tolist(), strict=True)
        columns = zip(batch.env_ids.tolist(), batch.rewards, ends, batch.infos, strict=True)
        for index, reward, (terminated, truncated), info in columns:
            try:
                trajectory.rewards[step, index] = reward
            except Exception as error:
                failures[index] = error
                continue
            trajectory.terminated[step, index] = terminated
            trajectory.truncated[step, index] = truncated
            trajectory.steps_complete[index] = step + 1
            if not isinstance(info, dict) or info:
                self.results.infos[step, index] = info
            if (failure := failure_in(info)) is not None:
                self.results.errors_by_step[step, index] = failure
                trajectory.kinds[step, index] = KIND_TRUNCATED
        return failures
