"""Rollouts of a vector whose envs run in-process: a loop of steps in the calling thread, one actor after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.future import ActorFuture, LazyOutcome
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
from envactors.vector.results import Batch, failure_in


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
                results.policy_error = results.policy_error or error
        results.complete_steps.update(enumerate(buffer.trajectory.steps_written.tolist()))
        envs, versions = range(policies[0].envs.start, policies[-1].envs.stop), np.full(len(policies), self._version)
        is_failure = results.policy_error is not None or bool(results.errors_to_raise)

        def read() -> tuple[Rollout | None, BaseException | None]:
            return assemble(buffer.trajectory, envs, results, versions, copies=False)

        future: ActorFuture[Rollout] = ActorFuture(self._engine.actors[0], None)
        future.set_outcome(LazyOutcome(read, is_failure=is_failure))
        return future


class InlinePart:
    """One actor's part of a rollout.

    Args:
        engine: Steps the envs.
        buffer: The memory that the steps are written into.
        policy: The policy of the actor.
        results: Gets the results that have no array in the trajectory.
    """

    def __init__(
        self, engine: InlineEngine, buffer: TrajectoryBuffer, policy: ActorPolicy, results: ResultsWithoutArrays
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self._policy = policy
        self._results = results

    def run(self) -> None:
        """Run the envs of the actor, until one raises, or there is too little memory for the policy's output.

        Raises:
            Exception: Raised by the policy, or because of its output.
        """
        buffer, envs, results = self._buffer, self._policy.envs, self._results
        obs, starts = self._write_observations(0, envs)
        for step in range(buffer.trajectory.layout.steps):
            failures: dict[int, BaseException] = {}
            output = self._policy.choose(step, obs, starts)
            layout = write_output(buffer.trajectory, envs, step, output)
            if layout is not None:
                try:
                    buffer.add_room(layout)
                except VectorEnvError as error:
                    (actor,) = (each for each in self._engine.actors if each.indices == envs)
                    activity = Activity("rollout", envs.start)
                    failures = dict.fromkeys(envs, actor.errors.no_memory_for_results(activity, error))
                else:
                    write_output(buffer.trajectory, envs, step, output)
            failures = failures or self._run_envs(step, self._write_kinds(step))
            if failures:
                results.errors_to_raise.update(failures)
                results.errors_by_step.update({(step, index): each for index, each in failures.items()})
                for index in set(envs).difference(failures):
                    self._write_observations(step + 1, range(index, index + 1))
                return
            obs, starts = self._write_observations(step + 1, envs)

    def _write_observations(self, step: int, envs: range) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Write the observations before a step; return them, read-only, and whether each begins its episode."""
        trajectory, mine = self._buffer.trajectory, slice_of(envs)
        obs = self._engine.last_observations(envs)
        objects = []
        for array, leaf in zip(trajectory.observations, flatten(trajectory.layout.observation, obs), strict=True):
            if array is None:
                objects.append(leaf)
            else:
                array[step, mine] = leaf
                leaf.flags.writeable = False
        if objects:
            for index, *leaves in zip(envs, *objects, strict=True):
                self._results.objects[step, index] = leaves
        starts = np.array([self._engine.last_obs_is_first(index) for index in envs], np.bool_)
        trajectory.starts[step, mine] = starts
        return obs, starts

    def _write_kinds(self, step: int) -> list[int]:
        """Write the kind of each env's step; return the envs that do not repeat their last observation.

        A repeat is complete with that: the observation is written as that of any env, and the rest are zeros.
        """
        trajectory, envs, mine = self._buffer.trajectory, self._policy.envs, slice_of(self._policy.envs)
        kinds = np.array([next_kind(self._engine.episodes, index) for index in envs], np.uint8)
        trajectory.kinds[step, mine] = kinds
        trajectory.steps_written[mine] += kinds == KIND_REPEAT
        return [index for index, kind in zip(envs, kinds.tolist(), strict=True) if kind != KIND_REPEAT]

    def _run_envs(self, step: int, due: list[int]) -> dict[int, BaseException]:
        """Run a step of the envs that are due; return the errors of those that failed."""
        engine, actions = self._engine, actions_at(self._buffer.trajectory, step, self._policy.envs)
        selection = engine.select(due)
        try:
            engine.start_steps(selection, [actions[index] for index in due], streams=True)
            batch, failures = engine.wait_for_results(selection, None, None, "rollout"), {}
        except VectorStepError as error:
            batch, failures = error.batch, error.failures
        except Exception as error:  # an actor is closed
            return dict.fromkeys(due, error)
        return {**failures, **self._write_results(step, batch)}

    def _write_results(self, step: int, batch: Batch) -> dict[int, BaseException]:
        """Write the results of a step; return the errors of envs whose rewards do not fit into the trajectory."""
        trajectory = self._buffer.trajectory
        failures: dict[int, BaseException] = {}
        columns = zip(*(column.tolist() for column in (batch.env_ids, batch.terminated, batch.truncated)), strict=True)
        for (index, terminated, truncated), reward, info in zip(columns, batch.rewards, batch.infos, strict=True):
            try:
                trajectory.rewards[step, index] = reward
            except Exception as error:
                failures[index] = error
                continue
            trajectory.terminated[step, index] = terminated
            trajectory.truncated[step, index] = truncated
            trajectory.steps_written[index] = step + 1
            if not isinstance(info, dict) or info:
                self._results.infos[step, index] = info
            if (failure := failure_in(info)) is not None:
                self._results.errors_by_step[step, index] = failure
                trajectory.kinds[step, index] = KIND_TRUNCATED
        return failures
