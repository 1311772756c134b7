"""Rollouts of a vector whose envs run in-process: a loop of steps in the calling thread, one actor after the other."""

from __future__ import annotations

import dataclasses
import functools
import pickle
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
from envactors.rollout.assembly import Sidecar, assemble, rollout_or_error
from envactors.rollout.base import RolloutEngine, RolloutFutures
from envactors.rollout.context import PolicyContext, generator_of
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.policy_output import actions_at, write_output
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET, OP_STEP, OP_TRUNCATED, Trajectory, TrajectoryLayout
from envactors.vector.inline import InlineEngine
from envactors.vector.results import Batch, failure_in


@dataclasses.dataclass(eq=False)
class _ActorPolicy:
    """The policy of one actor.

    Attributes:
        envs: The actor's envs.
        policy: The policy.
        version: Version of the parameters that it loaded last.
    """

    envs: range
    policy: Any
    version: int = 0


class InlineRolloutEngine(RolloutEngine):
    """Runs rollouts in the calling thread.

    Args:
        engine: Steps the envs.
    """

    _engine: InlineEngine
    next_index: int

    def __init__(self, engine: InlineEngine) -> None:
        super().__init__(engine)
        self._actors = engine.actors
        # The policy of each actor.
        self._policies: list[_ActorPolicy] = []
        # The parameters given last, pickled without the contents of their arrays, and these.
        self._pickled = b""
        self._arrays: list[bytes] = []
        # How often the user has given parameters.
        self._version = 0

    def _make_policies(self, make_policy: bytes, seed: int) -> bool:
        del seed  # `_run` draws the random numbers
        for actor in self._actors:
            if not actor.is_usable:
                raise actor.errors.closed(Activity("set_policy", actor.indices.start))
        self._policies = [_ActorPolicy(actor.indices, pickle.loads(make_policy)()) for actor in self._actors]
        self._version = 0
        return all(hasattr(each.policy, "load") for each in self._policies)

    def _set_parameters(self, pickled: bytes, arrays: Sequence[memoryview]) -> None:
        self._pickled = pickled
        self._arrays = [bytes(array) for array in arrays]  # which policies view, read-only
        self._version += 1

    def start(self, steps: int, parameters: Any, *, each: bool = False, copy: bool | None = None) -> RolloutFutures:
        """Run a rollout; see `RolloutEngine.start`."""
        del copy
        self.check_free()
        self._engine.episodes.check_steppable(self._engine.all.ids)
        self.set_parameters(parameters)
        run = InlineTrajectory(self._engine, steps)
        for actor_policy in self._policies:
            try:
                self._load(actor_policy)
                self._run(run, actor_policy, steps)
            except Exception as error:
                run.policy_errors[actor_policy.envs.start] = error
        self.next_index += 1
        ranges = [actor.indices for actor in self._actors] if each else [range(len(self._engine.all.ids))]
        return [self._future_of(run, envs) for envs in ranges]

    def _load(self, actor_policy: _ActorPolicy) -> None:
        """Have a policy load the parameters given last, unless it has them.

        Raises:
            Exception: Raised by the policy, or by unpickling.
        """
        if actor_policy.version != self._version:
            actor_policy.policy.load(pickle.loads(self._pickled, buffers=self._arrays))
            actor_policy.version = self._version

    def _run(self, run: InlineTrajectory, actor_policy: _ActorPolicy, steps: int) -> None:
        """Run the envs of one actor.

        Raises:
            Exception: Raised by the policy.
        """
        engine, envs = self._engine, actor_policy.envs
        ids = np.arange(envs.start, envs.stop)
        assert self._seed is not None, "the caller has checked it"
        make_rng = functools.partial(generator_of, self._seed, rollout_index=self.next_index, first_env=envs.start)
        for step in range(steps):
            obs, starts = run.write_observations(step, envs)
            run.write_output(step, envs, actor_policy.policy(obs, PolicyContext(ids, starts, step, make_rng)))
            due = run.write_ops(step, envs)
            selection = engine.select(due)
            actions = actions_at(run.trajectory, step)
            engine.start_steps(selection, [actions[index] for index in due], streams=True)
            try:
                run.write_results(step, engine.wait_for_results(selection, None, None, "rollout"))
            except VectorStepError as error:
                run.write_results(step, error.batch)
                run.errors_by_env.update(error.failures)
                run.sidecar.errors_by_step.update({(step, index): each for index, each in error.failures.items()})
                return
        run.write_observations(steps, envs)

    def _future_of(self, run: InlineTrajectory, envs: range) -> ActorFuture[Rollout]:
        """Return the future, which is done, of the rollout of some actors."""
        actors = [actor for actor in self._actors if actor.indices.start in envs]
        rollout = assemble(run.trajectory, envs, run.sidecar, np.full(len(actors), self._version), copies=False)
        errors_by_env = {index: error for index, error in run.errors_by_env.items() if index in envs}
        policy_error = next((error for first, error in run.policy_errors.items() if first in envs), None)
        future: ActorFuture[Rollout] = ActorFuture(actors[0], None)
        future.set_outcome(ReadyOutcome(*rollout_or_error(rollout, errors_by_env, policy_error)))
        return future


class InlineTrajectory:
    """The trajectory of one rollout of in-process envs, and everything else that it has returned or raised.

    Args:
        engine: Steps the envs.
        steps: Number of steps.

    Attributes:
        sidecar: Everything that has no array in the trajectory.
        errors_by_env: Errors to raise, by env.
        policy_errors: The exceptions of policies, by the first env of each.
    """

    def __init__(self, engine: InlineEngine, steps: int) -> None:
        observation, reward = engine.observation_spec, engine.reward_spec
        assert observation is not None, "`VectorEnv` has checked it"
        plain_reward = reward if isinstance(reward, ArraySpec) and reward.batchable else None
        layout = TrajectoryLayout(observation, engine.action_spec, plain_reward, (), len(engine.all.ids), steps)
        self.sidecar: Sidecar = Sidecar()
        self.errors_by_env: dict[int, BaseException] = {}
        self.policy_errors: dict[int, BaseException] = {}
        self._engine = engine
        self._buffer = TrajectoryBuffer(layout, ThreadMemory())

    @property
    def trajectory(self) -> Trajectory:
        """The memory that the steps are written into."""
        return self._buffer.trajectory

    def write_observations(self, step: int, envs: range) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Write the observations before a step; return them, read-only, and whether each begins its episode."""
        trajectory = self.trajectory
        mine = slice_of(envs)
        spec = trajectory.layout.observation
        obs = self._engine.last_observations(envs)
        objects = []
        for array, leaf in zip(trajectory.observations, flatten(spec, obs), strict=True):
            if array is None:
                objects.append(leaf)
            else:
                array[step, mine] = leaf
                leaf.flags.writeable = False
        if objects:
            for index, *leaves in zip(envs, *objects, strict=True):
                self.sidecar.objects[step, index] = leaves
        starts = np.array([self._engine.last_obs_is_first(index) for index in envs], np.bool_)
        trajectory.starts[step, mine] = starts
        return obs, starts

    def write_output(self, step: int, envs: range, output: Any) -> None:
        """Write the actions and extras that the policy has returned, with new memory if there is no room for them."""
        layout = write_output(self.trajectory, envs, step, output)
        if layout is not None:
            self._buffer.add_room(layout)
            write_output(self.trajectory, envs, step, output)
        self.trajectory.steps_chosen[envs.start] = step + 1

    def write_ops(self, step: int, envs: range) -> list[int]:
        """Write what each env does in a step; return the envs whose episode is not over."""
        episodes, trajectory = self._engine.episodes, self.trajectory
        due = [index for index in envs if not episodes.needs_reset(index)]
        trajectory.ops[step, slice_of(envs)] = OP_REPEAT
        trajectory.ops[step, due] = [OP_RESET if episodes.resets_next[index] else OP_STEP for index in due]
        return due

    def write_results(self, step: int, batch: Batch) -> None:
        """Write the results of a step."""
        ids, trajectory = batch.env_ids, self.trajectory
        trajectory.rewards[step, ids] = batch.rewards
        trajectory.terminated[step, ids] = batch.terminated
        trajectory.truncated[step, ids] = batch.truncated
        trajectory.steps_done[ids] = step + 1
        for index, info in zip(ids.tolist(), batch.infos, strict=True):
            if not isinstance(info, dict) or info:
                self.sidecar.infos[step, index] = info
            failure = failure_in(info)
            if failure is not None:
                self.sidecar.errors_by_step[step, index] = failure
                trajectory.ops[step, index] = OP_TRUNCATED
