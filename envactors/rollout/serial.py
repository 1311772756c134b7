"""Rollouts of a vector whose envs run in-process: a loop of steps in the calling thread, one actor after the other."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from envactors.actor.activity import Activity
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.backends.thread import ThreadMemory
from envactors.errors import VectorStepError
from envactors.mailbox.pickling import dumps_by_value
from envactors.mailbox.specs import ArraySpec, flatten, stack
from envactors.rollout.assembly import Sidecar, assemble, result_of
from envactors.rollout.base import Rollouts
from envactors.rollout.context import PolicyContext, generator_of
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.policy_output import actions_at, write_output
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET, OP_STEP, OP_TRUNCATED, Trajectory, TrajectoryLayout
from envactors.vector.episodes import NEEDS_RESET
from envactors.vector.results import Batch, failure_in
from envactors.vector.serial import SerialEngine


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


class SerialRollouts(Rollouts):
    """Runs rollouts in the calling thread.

    Args:
        engine: Steps the envs.
    """

    _engine: SerialEngine

    next_index: int

    def __init__(self, engine: SerialEngine) -> None:
        super().__init__(engine)
        self._actors = engine.actors
        # The policy of each actor.
        self._policies: list[_ActorPolicy] = []
        # The parameters given last, pickled without the contents of their arrays, and these.
        self._pickled = b""
        self._arrays: list[bytes] = []
        # How often the user has given parameters.
        self._version = 0

    def set_policy(self, make_policy: Any, seed: int) -> None:
        """Make the policy of each actor; see `VectorEnv.set_policy`."""
        self.check_idle()
        for actor in self._actors:
            if not actor.is_usable:
                raise actor.errors.closed(Activity("set_policy", actor.range.start), actor.incarnation.index)
        pickled = dumps_by_value(make_policy)
        self._policies = [_ActorPolicy(actor.range, pickle.loads(pickled)()) for actor in self._actors]
        self._loads = all(hasattr(each.policy, "load") for each in self._policies)
        self._seed = seed
        self.next_index = 0
        self._version = 0

    def _set_parameters(self, parameters: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._pickled = cloudpickle.dumps(parameters, 5, buffer_callback=buffers.append)
        self._arrays = [bytes(buffer.raw()) for buffer in buffers]  # which policies view, read-only
        self._version += 1

    def end_episodes(self) -> None:
        """Require a reset of every env before its next step."""
        self._engine.end_episodes()

    def start(
        self, steps: int, parameters: Any, *, each: bool = False, copy: bool | None = None
    ) -> list[ActorFuture[Rollout]]:
        """Run a rollout; see `Rollouts.start`."""
        del copy
        self.check_idle()
        self._engine.check_steppable(self._engine.all)
        self.set_parameters(parameters)
        serial = SerialTrajectory(self._engine, steps)
        policy_errors: dict[int, BaseException] = {}
        for policy in self._policies:
            try:
                self._load(policy)
                self._run(serial, policy, steps)
            except Exception as error:  # raised by the policy
                policy_errors[policy.envs.start] = error
        self.next_index += 1
        futures: list[ActorFuture[Rollout]] = []
        for envs in [actor.range for actor in self._actors] if each else [range(len(self._engine.all.ids))]:
            versions = np.full(1 if each else len(self._actors), self._version)
            rollout = assemble(serial.trajectory, envs, serial.sidecar, versions, copies=False)
            failures = {index: error for index, error in serial.errors.items() if index in envs}
            policy_error = next((error for first, error in policy_errors.items() if first in envs), None)
            future: ActorFuture[Rollout] = ActorFuture(self._actors[0], None)
            future.set_outcome(ReadyOutcome(*result_of(rollout, failures, policy_error)))
            futures.append(future)
        return futures

    def _load(self, policy: _ActorPolicy) -> None:
        """Have a policy load the parameters given last, unless it has them.

        Raises:
            Exception: Raised by the policy, or by unpickling.
        """
        if policy.version != self._version:
            policy.policy.load(pickle.loads(self._pickled, buffers=self._arrays))
            policy.version = self._version

    def _run(self, serial: SerialTrajectory, policy: _ActorPolicy, steps: int) -> None:
        """Run the envs of one actor.

        Raises:
            Exception: Raised by the policy.
        """
        engine, seed, envs = self._engine, self._seed, policy.envs
        ids = np.arange(envs.start, envs.stop)
        assert seed is not None, "the caller has checked it"
        for step in range(steps):
            obs, starts = serial.write_observations(step, envs)
            rng = generator_of(seed, step, self.next_index, envs.start)
            serial.write_output(step, envs, policy.policy(obs, PolicyContext(ids, starts, step, rng)))
            due = serial.write_ops(step, envs)
            selection, actions = engine.select(due), actions_at(serial.trajectory, step)
            engine.start_steps(selection, [actions[index] for index in due], rings_each=True)
            try:
                serial.write_results(step, engine.finish(selection, None, None, "rollout"))
            except VectorStepError as error:
                serial.write_results(step, error.batch)
                for index, failure in error.failures.items():
                    serial.errors[index] = serial.sidecar.failures[step, index] = failure
                return
        serial.write_observations(steps, envs)


class SerialTrajectory:
    """One rollout of in-process envs.

    Args:
        engine: Steps the envs.
        steps: Number of steps.

    Attributes:
        sidecar: Everything that has no place in the trajectory.
        errors: Errors to raise, by env.
    """

    def __init__(self, engine: SerialEngine, steps: int) -> None:
        observation, reward, count = engine.observation_spec, engine.reward_spec, len(engine.all.ids)
        assert observation is not None, "the envs have been reset"
        plain_reward = reward if isinstance(reward, ArraySpec) and reward.batchable else None
        layout = TrajectoryLayout(observation, engine.action_spec, plain_reward, (), count, steps)
        self.sidecar: Sidecar = Sidecar()
        self.errors: dict[int, BaseException] = {}
        self._engine = engine
        self._buffer = TrajectoryBuffer(layout, ThreadMemory())

    @property
    def trajectory(self) -> Trajectory:
        """The memory that the steps are written into."""
        return self._buffer.trajectory

    def write_observations(self, step: int, envs: range) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Write the observations before a step; return them, read-only, and whether each begins its episode."""
        spec, trajectory, mine = self.trajectory.layout.observation, self.trajectory, slice(envs.start, envs.stop)
        obs = stack(spec, [self._engine.last_obs(index) for index in envs])
        objects = []
        for array, leaf in zip(trajectory.observations, flatten(spec, obs), strict=True):
            if array is None:
                objects.append(leaf)
            else:
                array[step, mine] = leaf
                leaf.flags.writeable = False
        for index, *leaves in zip(envs, *objects, strict=True) if objects else ():
            self.sidecar.objects[step, index] = leaves
        starts = np.array([self._engine.episodes.starts[index] for index in envs], np.bool_)
        trajectory.starts[step, mine] = starts
        return obs, starts

    def write_output(self, step: int, envs: range, output: Any) -> None:
        """Write the actions and extras that the policy has returned, with new memory if there is no place for them."""
        if (layout := write_output(self.trajectory, envs, step, output)) is not None:
            self._buffer.add_columns(layout)
            write_output(self.trajectory, envs, step, output)
        self.trajectory.chosen[envs.start] = step + 1

    def write_ops(self, step: int, envs: range) -> list[int]:
        """Write what each env does in a step; return the envs whose episode is not over."""
        episodes = self._engine.episodes
        due = [index for index in envs if not episodes.flags[index] & NEEDS_RESET]
        self.trajectory.ops[step, envs.start : envs.stop] = OP_REPEAT
        self.trajectory.ops[step, due] = np.where(episodes.resets_next[due], OP_RESET, OP_STEP)
        return due

    def write_results(self, step: int, batch: Batch) -> None:
        """Write the results of a step."""
        ids, trajectory = batch.env_ids, self.trajectory
        trajectory.rewards[step, ids], trajectory.terminated[step, ids] = batch.rewards, batch.terminated
        trajectory.truncated[step, ids], trajectory.done[ids] = batch.truncated, step + 1
        for index, info in zip(ids.tolist(), batch.infos, strict=True):
            if not isinstance(info, dict) or info:
                self.sidecar.infos[step, index] = info
            if (failure := failure_in(info)) is not None:
                self.sidecar.failures[step, index] = failure
                trajectory.ops[step, index] = OP_TRUNCATED
