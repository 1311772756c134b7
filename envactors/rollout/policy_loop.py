"""The worker's half of rollouts: call the policy and step the envs until an order is complete."""

from __future__ import annotations

import functools
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.control_page import (
    ENV_INDEX,
    METHOD,
    METHOD_CALL,
    METHOD_POLICY,
    METHOD_RESET,
    METHOD_STEP,
    SINCE,
    TIMED,
)
from envactors.mailbox.info_codec import Infos, decode
from envactors.mailbox.messages import Fault, episode_seed
from envactors.mailbox.pickling import copy_value, pack_failure
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import ArraySpec, flatten, unflatten
from envactors.rollout.context import PolicyContext, StepGenerators
from envactors.rollout.messages import (
    COMPLETE,
    ENV_RAISED,
    NO_POLICY,
    NO_ROOM,
    EnvPlan,
    Order,
    Parameters,
    Policy,
    Stop,
)
from envactors.rollout.policy_output import actions_at, write_output
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET, OP_STEP, RegionPlaces, Trajectory, TrajectoryLayout
from envactors.worker import context
from envactors.worker.env_rows import PayloadError, as_failure
from envactors.worker.host import Fields, HostedEnv
from envactors.worker.main import Server

# How much memory stays open: two rollouts may be in flight while the user keeps two results; parameters alternate
# between two regions.
_MOST_TRAJECTORIES = 4
_MOST_PARAMETERS = 2


def set_policy(server: Server, policy: Policy) -> bool:
    """Make the policy in this worker; return whether it can load parameters."""
    server.page.record_env(METHOD_CALL, 0)
    made = pickle.loads(policy.pickled)()
    server.extension = PolicyLoop(server, policy.policy_id, made, policy.seed)
    return hasattr(made, "load")


def run_rollout(server: Server, order: Order) -> Stop:
    """Carry out an order."""
    if order.policy is not None:
        set_policy(server, order.policy)
    loop: PolicyLoop | None = server.extension
    if loop is None or loop.policy_id != order.policy_id:
        return Stop(NO_POLICY)
    return loop.run(order)


class EnvCursor:
    """One env in a rollout.

    Args:
        hosted: Env to step.
        plan: What it does first.

    Attributes:
        hosted: Env to step.
        start, op, seed, root_seed, episode: The attributes of its plan, as of its next step.
        position, index, env_step: Attributes of the env that each step reads.
    """

    def __init__(self, hosted: HostedEnv, plan: EnvPlan) -> None:
        self.hosted = hosted
        self.start, self.op, self.seed, self.root_seed, self.episode = plan
        self.position: int = hosted.position
        self.index: int = hosted.index
        self.env_step: Callable[[Any], Any] = hosted.env.step

    def begin_episode(self) -> None:
        """Choose the next operation, and the seed of the next reset, after a reset."""
        self.op, self.seed = OP_STEP, None
        if self.root_seed is not None:
            self.episode += 1
            self.seed = episode_seed(self.root_seed, self.episode)


class PolicyLoop:
    """Runs the policy and the envs of one worker.

    Args:
        server: The worker's server.
        policy_id: Id of the policy.
        policy: The policy.
        seed: Seed of the policy.
    """

    def __init__(self, server: Server, policy_id: int, policy: Any, seed: int) -> None:
        self.policy_id = policy_id
        self._server = server
        self._policy = policy
        first, count = server.host.hosted_envs[0].index, len(server.host.hosted_envs)
        self._env_ids = np.arange(first, first + count)
        self._generators = StepGenerators(seed, first)
        self._writer_at = functools.lru_cache(_MOST_TRAJECTORIES)(self._open_trajectory)
        self._parameters_at = functools.lru_cache(_MOST_PARAMETERS)(functools.partial(self._open, writable=False))
        # Version of the parameters that the policy loaded last.
        self._version = 0
        # The rollout, step, and return value of a policy call whose result had no place in the trajectory.
        self._kept: tuple[tuple[int, int], Any] | None = None

    def run(self, order: Order) -> Stop:
        """Carry out an order.

        Raises:
            BaseException: Raised by the policy.
        """
        server = self._server
        if order.parameters is not None:
            self._load(order.parameters)
        self._generators.rollout = order.rollout
        writer = self._writer_at(order.places, order.layout)
        hosted_envs = server.host.hosted_envs
        cursors = [EnvCursor(hosted, plan) for hosted, plan in zip(hosted_envs, order.plans, strict=True)]
        writer.begin(order, cursors)
        server.page.is_timing = server.page.counters[TIMED] != 0
        try:
            return self._run(writer, order, cursors)
        finally:
            server.page.is_timing = False

    def _run(self, writer: TrajectoryWriter, order: Order, cursors: list[EnvCursor]) -> Stop:
        """Alternate between the policy and the envs. Loops of light envs spend most of their time in this function."""
        page, policy, env_ids, generators = self._server.page, self._policy, self._env_ids, self._generators
        counters, times, now, forks = page.counters, page.times, time.monotonic, context.forks
        observed, starts, chosen, first = writer.observed, writer.starts, writer.chosen, writer.envs.start
        done, rewards, numbers, copies = writer.done, writer.rewards, writer.numbers, writer.copies_action
        trajectory, count, is_within = writer.trajectory, writer.count, order.autoreset == "same_step"
        due: list[EnvCursor] = []
        size = 0 if page.is_timing else writer.size  # of a plain observation; 0 if results are not plain
        for step in range(order.start, order.stop):
            if context.forks != forks:
                os._exit(1)  # env code forked, and its child returned to this loop
            if chosen[first] <= step:  # else they were chosen in a process that has ended
                if self._kept is not None and self._kept[0] == (order.rollout, step):
                    output, self._kept = self._kept[1], None
                else:
                    times[SINCE] = now()
                    counters[METHOD] = METHOD_POLICY
                    output = policy(observed[step], PolicyContext(env_ids, starts[step], step, generators))
                if (layout := writer.write_output(step, output)) is not None:
                    self._kept = (order.rollout, step), output
                    return Stop(NO_ROOM, layout=layout)
                chosen[first] = step + 1
            if len(due) < len(cursors):
                due = [cursor for cursor in cursors if cursor.start <= step]
            first_cell = step * count
            actions = actions_at(trajectory, step)
            for cursor in due:
                index, op = cursor.index, cursor.op
                times[SINCE] = now()
                counters[METHOD] = METHOD_STEP
                counters[ENV_INDEX] = cursor.position
                try:
                    if op == OP_STEP:
                        result = cursor.env_step(actions[index].copy() if copies else actions[index])
                    elif op == OP_RESET:
                        counters[METHOD] = METHOD_RESET
                        result = cursor.hosted.reset(cursor.seed, None)
                    else:
                        writer.repeat(cursor.hosted, step)
                        continue
                    if size and type(result) is tuple and len(result) == 5:
                        # Plain results are written here: the same as `TrajectoryWriter.finish`, without its calls.
                        obs, reward, terminated, truncated, info = result
                        is_boundary = terminated or truncated or op == OP_RESET
                        if isinstance(reward, float) and type(info) is dict and not (is_boundary and is_within):
                            cell = first_cell + index
                            at = (cell + count) * size
                            try:
                                numbers[at : at + size] = obs
                                rewards[cell] = reward
                                if info:
                                    writer.write_info(cell, info, [])
                                if is_boundary:
                                    writer.write_boundary(cursor, step, terminated, truncated, order.autoreset)
                                done[index] = step + 1
                                continue
                            except Exception:  # noqa: S110 # `finish` converts the observation, or raises the error
                                pass
                    writer.finish(cursor, step, result, order.autoreset)
                except BaseException as error:
                    return Stop(ENV_RAISED, cursor.position, as_failure(error, page))
        return Stop(COMPLETE)

    def _open_trajectory(self, places: RegionPlaces, layout: bytes) -> TrajectoryWriter:
        regions = [None if place is None else self._open(place, writable=True) for place in places]
        return TrajectoryWriter(Trajectory(pickle.loads(layout), regions), self._server)

    def _open(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        assert self._server.memory is not None, "envs of a vector have memory"
        return self._server.memory.open_part(place, writable=writable)

    # The policy ------------------------------------------------------------------------------------------

    def _load(self, parameters: Parameters) -> None:
        """Have the policy load parameters that it has not, whose arrays are read-only views of the shared memory."""
        if parameters.version == self._version:
            return
        buffers: list[memoryview] = []
        if parameters.place is not None:
            region = self._parameters_at(parameters.place)
            buffers = [region[start:stop] for start, stop in parameters.spans]
        self._server.page.record_env(METHOD_POLICY, 0)
        self._policy.load(pickle.loads(parameters.pickled, buffers=buffers))
        self._version = parameters.version


class _ObservationBatches:
    """Observations of several leaves, or of leaves without a place in the trajectory, by step.

    Args:
        writer: Has the leaves without a place.
        seen: Read-only array per leaf; None for leaves without a place.
    """

    def __init__(self, writer: TrajectoryWriter, seen: list[Any]) -> None:
        self._writer = writer
        self._seen = seen

    def __getitem__(self, step: int) -> Any:
        objects = zip(*self._writer.objects, strict=True)
        leaves = (list(next(objects)) if array is None else array[step] for array in self._seen)
        return unflatten(self._writer.trajectory.layout.observation, leaves)


class TrajectoryWriter:
    """Writes the results of a worker's envs.

    Args:
        trajectory: Trajectory to write to.
        server: The worker's server.

    Attributes:
        trajectory: Trajectory to write to.
        envs: Indices of the worker's envs.
        count: Number of envs of the trajectory.
        objects: Leaves of each env's last observation that have no place in the trajectory.
        observed, starts: Read-only batches by step: the observations before it, and whether each is the first of its
            episode; starts is bool, shape (t + 1, n).
        copies_action: Whether an env gets a copy of its action, since it may modify it.
        chosen, done, rewards: Memory of the trajectory; single numbers are written to it in a third of the time.
        numbers: All observations as one sequence of numbers, if they are arrays of one axis and may be written without
            `finish`. Assigning a slice of a memoryview checks the dtype and the shape, and takes half of the time that
            NumPy takes.
        size: How many numbers one observation has in it; 0 if results have to be written by `finish`.
    """

    def __init__(self, trajectory: Trajectory, server: Server) -> None:
        layout, hosted = trajectory.layout, server.host.hosted_envs
        self.trajectory = trajectory
        self._server = server
        self._infos = Infos(trajectory)
        self._spec = layout.observation
        self.count: int = layout.envs
        self.envs: range = range(hosted[0].index, hosted[0].index + len(hosted))
        mine = slice(self.envs.start, self.envs.stop)
        self.objects: list[list[Any]] = [[] for _ in hosted]
        single = trajectory.actions[0] if isinstance(layout.action, ArraySpec) else None
        self.copies_action: bool = single is not None and single.ndim > 2
        self._actions: Any = None if single is None else single[:, mine]
        self._action_shape = () if single is None else (len(hosted), *single.shape[2:])
        # NumPy's own object, as policies return it: one that was unpickled is another.
        self._action_dtype = None if single is None or layout.extras else np.dtype(single.dtype.type)
        # The policy gets read-only views, since they also are the observations of the result.
        seen = [None if array is None else array[:, mine] for array in trajectory.observations]
        self.starts: npt.NDArray[np.bool_] = trajectory.starts[:, mine]
        for view in (*seen, self.starts):
            if view is not None:
                view.flags.writeable = False
        is_single = isinstance(self._spec, ArraySpec) and trajectory.is_whole
        self.observed: Any = seen[0] if is_single else _ObservationBatches(self, seen)
        self._only: Any = trajectory.observations[0] if is_single else None
        self.chosen: memoryview[int] = trajectory.chosen.data
        self.done: memoryview[int] = trajectory.done.data
        self.rewards: Any = trajectory.rewards.reshape(-1).data if layout.reward == PLAIN_REWARD else None
        only: Any = self._only
        is_flat = only is not None and only.ndim == 3 and only.dtype.kind in "biuf"
        is_plain = is_flat and self.rewards is not None and not hosted[0].journal
        self.size: int = only.shape[2] if is_plain else 0
        self.numbers: Any = only.reshape(-1).data if is_plain else None

    def begin(self, order: Order, cursors: list[EnvCursor]) -> None:
        """Read the object leaves of the observations before the first step, and clear the flags of the steps to come.

        Results then only write what differs.
        """
        for position, content in enumerate(order.last_leaves):
            self.objects[position] = [] if content is None else decode(content)[1]
        last = max(cursor.start for cursor in cursors)
        for cursor in cursors:
            if cursor.start < last:
                self.trajectory.flags[:, cursor.start + 1 : last + 1, cursor.index] = 0
        self.trajectory.flags[:, last + 1 :, self.envs.start : self.envs.stop] = 0

    def write_output(self, step: int, output: Any) -> TrajectoryLayout | None:
        """Write what the policy has returned; see `envactors.rollout.policy_output.write_output`."""
        # Most actions are written here, in a tenth of the time.
        if type(output) is np.ndarray and output.dtype is self._action_dtype and output.shape == self._action_shape:
            self._actions[step] = output
            return None
        return write_output(self.trajectory, self.envs, step, output)

    def write_boundary(self, cursor: EnvCursor, step: int, terminated: Any, truncated: Any, autoreset: str) -> None:
        """Write that an episode has ended, or that a reset has begun one, and choose the env's next operation."""
        trajectory, index = self.trajectory, cursor.index
        is_reset = cursor.op == OP_RESET or autoreset == "same_step"
        trajectory.terminated[step, index], trajectory.truncated[step, index] = bool(terminated), bool(truncated)
        trajectory.ops[step, index] = cursor.op
        trajectory.seeds[step, index] = -1 if cursor.seed is None else cursor.seed
        trajectory.starts[step + 1, index] = is_reset
        if is_reset:
            cursor.begin_episode()
        else:
            cursor.op = OP_RESET if autoreset == "next_step" else OP_REPEAT

    def finish(self, cursor: EnvCursor, step: int, result: Any, autoreset: str) -> None:
        """Write the result of a step or a reset.

        Raises:
            PayloadError: It cannot be written.
            BaseException: A reset within the step raises.
        """
        hosted, page, index = cursor.hosted, self._server.page, cursor.index
        fields: Fields = result if cursor.op == OP_RESET else hosted.take(result, autoreset == "same_step", cursor.seed)
        if page.is_timing:
            method = page.counters[METHOD]
            page.spans.add(page.times[SINCE], time.monotonic(), self._server.call_id, cursor.position, method)
        obs, reward, terminated, truncated, info = fields
        try:
            objects: list[Any] = []
            if self._only is not None:
                self._only[step + 1, index] = obs
            else:
                leaves = flatten(self._spec, obs)
                for array, leaf in zip(self.trajectory.observations, leaves, strict=True):
                    if array is not None:
                        array[step + 1, index] = leaf
                objects = self._objects_in(leaves)
            self.trajectory.rewards[step, index] = reward
            if hosted.journal:
                self.trajectory.checks[step, index] = hosted.check
            if type(info) is not dict or info or objects:
                self.write_info(step * self.count + index, info, objects)
            self.objects[cursor.position] = objects
            if cursor.op == OP_RESET or terminated or truncated:
                self.write_boundary(cursor, step, terminated, truncated, autoreset)
        except BaseException as error:
            raise PayloadError(pack_failure(error, Fault.RESULT)) from error
        self.done[index] = step + 1

    def write_info(self, cell: int, info: Any, objects: list[Any]) -> None:
        """Write an info and the leaves that have no place.

        Raises:
            Exception: They do not pickle.
        """
        part = self._infos.put(cell, self._infos.pack(info, objects))
        if part is not None:
            self._server.send_part(cell, part)

    def repeat(self, hosted: HostedEnv, step: int) -> None:
        """Write the last observation of an env again."""
        trajectory, index = self.trajectory, hosted.index
        trajectory.repeat_observation(step, index)
        if self.objects[hosted.position]:
            self.write_info(step * self.count + index, {}, self.objects[hosted.position])
        trajectory.ops[step, index] = OP_REPEAT
        trajectory.checks[step, index] = hosted.check
        self.done[index] = step + 1

    def _objects_in(self, leaves: list[Any]) -> list[Any]:
        """Return copies of the leaves without a place in the trajectory, since the env may change them later."""
        pairs = zip(self.trajectory.observations, leaves, strict=True)
        return [copy_value(leaf) for array, leaf in pairs if array is None]
