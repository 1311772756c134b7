"""Rollouts of a vector whose envs run in-process: a loop of steps in the calling thread, one actor after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.backends.thread import ThreadMemory
from envactors.errors import VectorStepError
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import ArraySpec, flatten
from envactors.rollout.assembly import ResultsWithoutArrays, assemble
from envactors.rollout.base import RolloutEngine, RolloutFutures
from envactors.rollout.env_plan import KIND_REPEAT, KIND_TRUNCATED, next_kind
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.policy import ActorPolicy
from envactors.rollout.policy_output import actions_at, write_output
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
        self._actors = engine.actors
        # The policy of each actor.
        self._policies: list[ActorPolicy] = []
        # The parameters given last, pickled without the contents of their arrays, and these.
        self._pickled = b""
        self._arrays: list[bytes] = []
        # How often the user has given parameters since the policy was set.
        self._version = 0

    def _make_policies(self, make_policy: bytes, seed: int) -> bool:
        for actor in self._actors:
            actor.make_missing(Activity("set_policy", actor.indices.start))
        self._policies = [ActorPolicy(make_policy, seed, actor.indices) for actor in self._actors]
        self._version = 0
        engine = self._engine
        observation, reward = engine.observation_spec, engine.reward_spec
        assert observation is not None, "`RolloutEngine.set_policy` has checked it"
        plain_reward = reward if isinstance(reward, ArraySpec) and reward.batchable else None
        self._layout = TrajectoryLayout(observation, engine.action_spec, plain_reward, (), len(engine.all_envs.ids), 0)
        return all(policy.can_load for policy in self._policies)

    def _set_parameters(self, pickled: bytes, arrays: Sequence[memoryview]) -> None:
        self._pickled = pickled
        self._arrays = [bytes(array) for array in arrays]  # which policies view, read-only
        self._version += 1

    def start(self, steps: int, parameters: Any, *, each: bool = False, copy: bool | None = None) -> RolloutFutures:
        """Run a rollout; see `RolloutEngine.start`."""
        del copy
        self.check_free()
        self._engine.episodes.check_steppable(self._engine.all_envs.ids)
        self._engine.check_open(self._engine.all_envs, "rollout")
        self.set_parameters(parameters)
        rollout = InlineRollout(self._engine, self._layout._replace(steps=steps))
        for policy in self._policies:
            try:
                if policy.version != self._version:
                    policy.load(self._version, self._pickled, self._arrays)
                policy.rollout_index = self._next_index
                rollout.run(policy)
            except Exception as error:
                rollout.results.policy_errors[policy.envs.start] = error
        self._layout = rollout.buffer.trajectory.layout
        self._next_index += 1
        ranges = [actor.indices for actor in self._actors] if each else [range(len(self._engine.all_envs.ids))]
        return [self._future_of(rollout, envs) for envs in ranges]

    def _future_of(self, rollout: InlineRollout, envs: range) -> ActorFuture[Rollout]:
        """Return the future, which is done, of the rollout of some actors."""
        actors = [actor for actor in self._actors if actor.indices.start in envs]
        versions = np.full(len(actors), self._version)
        future: ActorFuture[Rollout] = ActorFuture(actors[0], None)
        outcome = assemble(rollout.buffer.trajectory, envs, rollout.results, versions, copies=False)
        future.set_outcome(ReadyOutcome(*outcome))
        return future


class InlineRollout:
    """One rollout of in-process envs.

    Args:
        engine: Steps the envs.
        layout: Layout of the trajectory.

    Attributes:
        buffer: The memory that the steps are written into.
        results: The results that have no array in the trajectory.
    """

    def __init__(self, engine: InlineEngine, layout: TrajectoryLayout) -> None:
        self.results: ResultsWithoutArrays = ResultsWithoutArrays()
        self._engine = engine
        self.buffer: TrajectoryBuffer = TrajectoryBuffer(layout, ThreadMemory())

    def run(self, policy: ActorPolicy) -> None:
        """Run the envs of one actor, until an env raises.

        Raises:
            Exception: Raised by the policy.
        """
        envs, steps, results = policy.envs, self.buffer.trajectory.layout.steps, self.results
        obs, starts = self._write_observations(0, envs)
        for step in range(steps):
            self._write_output(step, envs, policy.choose(step, obs, starts))
            failures = self._run_envs(step, self._write_kinds(step, envs))
            if failures:
                results.errors_to_raise.update(failures)
                results.errors_by_step.update({(step, index): each for index, each in failures.items()})
                for index in set(envs).difference(failures):
                    self._write_observations(step + 1, range(index, index + 1))
                return
            obs, starts = self._write_observations(step + 1, envs)

    def _run_envs(self, step: int, due: list[int]) -> dict[int, BaseException]:
        """Run a step of the envs that are due; return the errors of those that failed."""
        engine, actions = self._engine, actions_at(self.buffer.trajectory, step)
        selection = engine.select(due)
        try:
            engine.start_steps(selection, [actions[index] for index in due], streams=True)
            self._write_results(step, engine.wait_for_results(selection, None, None, "rollout"))
        except VectorStepError as error:
            self._write_results(step, error.batch)
            return error.failures
        except Exception as error:  # an actor is closed, or results do not fit into the trajectory
            return dict.fromkeys(due, error)
        return {}

    def _write_observations(self, step: int, envs: range) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Write the observations before a step; return them, read-only, and whether each begins its episode."""
        trajectory, mine = self.buffer.trajectory, slice_of(envs)
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
                self.results.objects[step, index] = leaves
        starts = np.array([self._engine.last_obs_is_first(index) for index in envs], np.bool_)
        trajectory.starts[step, mine] = starts
        return obs, starts

    def _write_output(self, step: int, envs: range, output: Any) -> None:
        """Write the actions and extras that the policy has returned, with new memory if there is no room for them."""
        layout = write_output(self.buffer.trajectory, envs, step, output)
        if layout is not None:
            self.buffer.add_room(layout)
            write_output(self.buffer.trajectory, envs, step, output)
        self.buffer.trajectory.set_steps_chosen(envs, step + 1)

    def _write_kinds(self, step: int, envs: range) -> list[int]:
        """Write the kind of each env's step; return the envs that do not repeat their last observation.

        A repeat is complete with that: the observation is written as that of any env, and the rest are zeros.
        """
        kinds = {index: next_kind(self._engine.episodes, index) for index in envs}
        self.buffer.trajectory.kinds[step, slice_of(envs)] = list(kinds.values())
        self.buffer.trajectory.steps_written[[index for index, kind in kinds.items() if kind == KIND_REPEAT]] = step + 1
        return [index for index, kind in kinds.items() if kind != KIND_REPEAT]

    def _write_results(self, step: int, batch: Batch) -> None:
        """Write the results of a step."""
        ids, trajectory = batch.env_ids, self.buffer.trajectory
        trajectory.rewards[step, ids] = batch.rewards
        trajectory.terminated[step, ids] = batch.terminated
        trajectory.truncated[step, ids] = batch.truncated
        trajectory.steps_written[ids] = step + 1
        for index, info in zip(ids.tolist(), batch.infos, strict=True):
            if not isinstance(info, dict) or info:
                self.results.infos[step, index] = info
            failure = failure_in(info)
            if failure is not None:
                self.results.errors_by_step[step, index] = failure
                trajectory.kinds[step, index] = KIND_TRUNCATED
