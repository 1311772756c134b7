"""Write the results of a worker's envs to a trajectory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.control_page import METHOD, SINCE
from envactors.mailbox.info_codec import Infos, decode
from envactors.mailbox.messages import episode_seed
from envactors.mailbox.pickling import copy_value
from envactors.mailbox.slab import PLAIN_REWARD, slice_of
from envactors.mailbox.specs import ArraySpec, conform, flatten, stack, unflatten
from envactors.rollout.messages import EnvPlan, Order
from envactors.rollout.policy_output import write_output
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET, OP_STEP, Trajectory, TrajectoryLayout
from envactors.worker.env_rows import unfit_result
from envactors.worker.host import Fields, HostedEnv
from envactors.worker.main import Server


class EnvCursor:
    """One env in a rollout.

    Args:
        hosted: Env to step.
        plan: What it does first.

    Attributes:
        hosted: Env to step.
        first_step: That of its plan.
        op, seed, root_seed, episode: The attributes of its plan, as of its next step.
        position, index, env_step: Attributes of the env that each step reads.
    """

    first_step: int
    op: int
    seed: int | None
    root_seed: int | None
    episode: int

    def __init__(self, hosted: HostedEnv, plan: EnvPlan) -> None:
        self.hosted = hosted
        self.first_step, self.op, self.seed, self.root_seed, self.episode = plan
        self.position: int = hosted.position
        self.index: int = hosted.index
        self.env_step: Callable[[Any], Any] = hosted.env.step

    def begin_episode(self) -> None:
        """Choose the next operation, and the seed of the next reset, after a reset."""
        self.op = OP_STEP
        self.seed = None
        if self.root_seed is not None:
            self.episode += 1
            self.seed = episode_seed(self.root_seed, self.episode)


class _ObservationBatches:
    """Observations of several leaves, or of leaves without an array in the trajectory, by step.

    Args:
        writer: Has the leaves without an array.
        seen: Read-only array per leaf; None for leaves without an array.
    """

    def __init__(self, writer: TrajectoryWriter, seen: list[Any]) -> None:
        self._writer = writer
        self._seen = seen

    def __getitem__(self, step: int) -> Any:
        learned = self._writer.trajectory.layout.learned
        if learned is not None:
            return stack(learned, [obs for (obs,) in self._writer.objects])
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
        objects: Leaves of each env's last observation that have no array in the trajectory.
        observed, starts: Read-only batches by step: the observations before it, and whether each is the first of its
            episode; starts is bool, shape (t + 1, n).
        copies_action: Whether an env gets a copy of its action, since it may modify it.
        steps_chosen, steps_done, rewards: Memory of the trajectory, to which single numbers are written in a third of
            the time.
        numbers: All observations as one sequence of numbers, if they are arrays of one axis and may be written without
            `finish`. Assigning a slice of a memoryview checks the dtype and the shape, and takes half of the time that
            NumPy takes.
        size: How many numbers one observation has in it; 0 if results have to be written by `finish`.
    """

    def __init__(self, trajectory: Trajectory, server: Server) -> None:
        layout, hosted = trajectory.layout, server.host.hosted_envs
        self.trajectory = trajectory
        self.envs: range = range(hosted[0].index, hosted[0].index + len(hosted))
        self.count: int = layout.envs
        self.objects: list[list[Any]] = [[] for _ in hosted]
        self._server = server
        self._infos = Infos(trajectory)
        self._spec, self._learned = layout.observation, layout.learned
        self._resets_within_step, self._op_after_end = False, OP_REPEAT
        mine = slice_of(self.envs)

        self.steps_chosen: memoryview[int] = trajectory.steps_chosen.data
        self.steps_done: memoryview[int] = trajectory.steps_done.data
        self.rewards: Any = trajectory.rewards.reshape(-1).data if layout.reward == PLAIN_REWARD else None

        self.copies_action: bool = False
        self._actions: Any = None
        self._action_shape: tuple[int, ...] = ()
        self._action_dtype: np.dtype[Any] | None = None
        if isinstance(layout.action, ArraySpec):
            self._actions = trajectory.actions[0][:, mine]
            self._action_shape = self._actions.shape[1:]
            self.copies_action = self._actions.ndim > 2
            if not layout.extras:
                # NumPy's own object, as policies return it: one that was unpickled is another.
                self._action_dtype = np.dtype(self._actions.dtype.type)

        # The policy gets read-only views, since they also are the observations of the result.
        seen = [None if array is None else array[:, mine] for array in trajectory.observations]
        self.starts: npt.NDArray[np.bool_] = trajectory.starts[:, mine]
        for view in (*seen, self.starts):
            if view is not None:
                view.flags.writeable = False
        self.observed: Any = _ObservationBatches(self, seen)
        self.size: int = 0
        self.numbers: Any = None
        # The only leaf of the observation; None if there are others, or if it has no array.
        self._only: Any = None
        if isinstance(self._spec, ArraySpec) and trajectory.is_whole:
            self._only = trajectory.observations[0]
            self.observed = seen[0]
            is_flat = self._only.ndim == 3 and self._only.dtype.kind in "biuf"
            if is_flat and self.rewards is not None and not hosted[0].journal:
                self.size = self._only.shape[2]
                self.numbers = self._only.reshape(-1).data

    def begin(self, order: Order, cursors: list[EnvCursor]) -> None:
        """Read the object leaves of the observations before the first step, and clear the flags of the steps to come.

        Results then only write what differs.
        """
        self._resets_within_step, self._op_after_end = order.resets_within_step, order.op_after_end
        for position, encoded in enumerate(order.last_leaves):
            self.objects[position] = [] if encoded is None else decode(encoded)[1]
        trajectory = self.trajectory
        last = max(cursor.first_step for cursor in cursors)
        for cursor in cursors:
            if cursor.first_step < last:
                trajectory.flags[:, cursor.first_step + 1 : last + 1, cursor.index] = 0
        trajectory.flags[:, last + 1 :, slice_of(self.envs)] = 0

    def write_output(self, step: int, output: Any) -> TrajectoryLayout | None:
        """Write what the policy has returned; see `envactors.rollout.policy_output.write_output`."""
        # Most actions are written here, in a tenth of the time.
        if type(output) is np.ndarray and output.dtype is self._action_dtype and output.shape == self._action_shape:
            self._actions[step] = output
            return None
        return write_output(self.trajectory, self.envs, step, output)

    def write_boundary(self, cursor: EnvCursor, step: int, terminated: Any, truncated: Any) -> None:
        """Write that an episode has ended, or that a reset has begun one, and choose the env's next operation."""
        trajectory, index = self.trajectory, cursor.index
        is_reset = cursor.op == OP_RESET or self._resets_within_step
        trajectory.terminated[step, index] = bool(terminated)
        trajectory.truncated[step, index] = bool(truncated)
        trajectory.ops[step, index] = cursor.op
        trajectory.seeds[step, index] = -1 if cursor.seed is None else cursor.seed
        trajectory.starts[step + 1, index] = is_reset
        if is_reset:
            cursor.begin_episode()
        else:
            cursor.op = self._op_after_end

    def finish(self, cursor: EnvCursor, step: int, result: Any) -> None:
        """Write the result of a step or a reset.

        Raises:
            PayloadError: It cannot be written.
            BaseException: A reset within the step raises.
        """
        hosted, page, index = cursor.hosted, self._server.page, cursor.index
        fields: Fields = result
        if cursor.op != OP_RESET:
            fields = hosted.take(result, self._resets_within_step, cursor.seed)
        if page.is_timing:
            method = page.counters[METHOD]
            page.spans.add(page.times[SINCE], time.monotonic(), self._server.call_id, cursor.position, method)
        obs, reward, terminated, truncated, info = fields
        try:
            objects: list[Any] = []
            if self._only is not None:
                self._only[step + 1, index] = obs
            else:
                if self._learned is not None:
                    obs = conform(self._learned, obs, f"the observation of env {index}")
                for array, leaf in zip(self.trajectory.observations, flatten(self._spec, obs), strict=True):
                    if array is None:
                        objects.append(copy_value(leaf))  # the env may change it later
                    else:
                        array[step + 1, index] = leaf
            self.trajectory.rewards[step, index] = reward
            if hosted.journal:
                self.trajectory.checks[step, index] = hosted.check
            if type(info) is not dict or info or objects:
                self.write_info(step * self.count + index, info, objects)
            self.objects[cursor.position] = objects
            if cursor.op == OP_RESET or terminated or truncated:
                self.write_boundary(cursor, step, terminated, truncated)
        except BaseException as error:
            raise unfit_result(error, fields) from error
        self.steps_done[index] = step + 1

    def write_info(self, cell: int, info: Any, objects: list[Any]) -> None:
        """Write an info and the leaves that have no array.

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
        self.steps_done[index] = step + 1
