"""The envs of a worker in a rollout: run their steps, and write the results to the trajectory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.control_page import ENV_INDEX, METHOD, METHOD_RESET, METHOD_STEP, SINCE
from envactors.mailbox.info_codec import Infos, decode
from envactors.mailbox.pickling import copy_value, dumps
from envactors.mailbox.slab import PLAIN_REWARD, slice_of
from envactors.mailbox.specs import ArraySpec, conform, flatten, stack, unflatten
from envactors.rollout.env_plan import KIND_REPEAT, KIND_RESET, KIND_STEP, EnvPlan
from envactors.rollout.messages import RAISED, Order
from envactors.rollout.policy import actions_at, write_output
from envactors.rollout.trajectory import Trajectory, TrajectoryLayout
from envactors.worker import context
from envactors.worker.env_rows import as_failure, unfit_result
from envactors.worker.host import HostedEnv
from envactors.worker.main import Server


class EnvRunner:
    """Runs the envs of a worker in the steps of a rollout.

    Args:
        trajectory: Trajectory to write to.
        server: The worker's server.
        envs: Indices of the worker's envs.

    Attributes:
        trajectory, envs: As above.
        observed: Read-only array of all observations, by step, if they have only one leaf; else None.
        starts: Whether each observation is the first of its episode, by step; read-only.
    """

    def __init__(self, trajectory: Trajectory, server: Server, envs: range) -> None:
        layout = trajectory.layout
        self.trajectory = trajectory
        self.envs = envs
        self._server = server
        self._page = server.page
        self._infos = Infos(trajectory)
        # Leaves of each env's last observation that have no array in the trajectory.
        self._objects: list[list[Any]] = [[] for _ in envs]
        mine = slice_of(envs)
        # A memoryview writes one number in a third of the time of an array.
        self._steps_written = trajectory.steps_written.data

        # The policy gets read-only views, since they also are the observations of the result.
        self._views: list[Any] = [None if array is None else array[:, mine] for array in trajectory.observations]
        self.starts: npt.NDArray[np.bool_] = trajectory.starts[:, mine]
        for view in (*self._views, self.starts):
            if view is not None:
                view.flags.writeable = False
        is_one_array = isinstance(layout.observation, ArraySpec) and trajectory.has_all_leaves
        self.observed: npt.NDArray[Any] | None = self._views[0] if is_one_array else None
        # The array that ``observed`` is a view of.
        self._array = array = trajectory.observations[0] if is_one_array else None
        # The memory of fast results, if there may be some: all observations as one sequence of numbers, how many
        # numbers one has, and all rewards. Assigning to a memoryview checks the dtype and the shape, in half of NumPy's
        # time.
        self._fast_results: tuple[memoryview[Any], int, memoryview[Any]] | None = None
        may_be_fast = layout.reward == PLAIN_REWARD and not server.host.hosted_envs[0].journal
        if may_be_fast and array is not None and array.ndim == 3 and array.dtype.kind in "biuf":
            numbers, rewards = array.reshape(-1).data, trajectory.rewards.reshape(-1).data
            self._fast_results = numbers, array.shape[2], rewards
        # The actions of all steps if they are one array and come without extras; else None.
        self._fast_actions: npt.NDArray[Any] | None = None
        if isinstance(layout.action, ArraySpec) and not layout.extras:
            self._fast_actions = trajectory.actions[0][:, mine]

    # The policy ------------------------------------------------------------------------------------------

    def batch_observations(self, step: int) -> Any:
        """Return the last observations, those before a step, if they are not one array."""
        layout = self.trajectory.layout
        if layout.inferred is not None:
            return stack(layout.inferred, [obs for (obs,) in self._objects])
        objects = zip(*self._objects, strict=True)
        leaves = (list(next(objects)) if view is None else view[step] for view in self._views)
        return unflatten(layout.observation, leaves)

    def write_output(self, step: int, output: Any) -> TrajectoryLayout | None:
        """Write what the policy has returned; see `envactors.rollout.policy.write_output`."""
        fast = self._fast_actions
        if fast is None or type(output) is not np.ndarray:
            return write_output(self.trajectory, self.envs, step, output)
        if output.dtype == fast.dtype and output.shape == fast.shape[1:]:
            fast[step] = output  # in a tenth of the time
            return None
        return write_output(self.trajectory, self.envs, step, output)

    # The envs --------------------------------------------------------------------------------------------

    def run(self, order: Order, choose: Callable[[int], TrajectoryLayout | None]) -> TrajectoryLayout | None:
        """Carry out an order, until all steps are complete or an env raises.

        If an env raises, the others still take this step, as in `envactors.worker.env_rows`.

        `_repeat` writes repeats. Other results are written at two places. Most of them are *fast*: an array of
        numbers, a float, and a dict, without a reset within the step. This loop writes them, since one call more per
        step makes rollouts of light envs 7 % slower. `_write_result` writes all others. The loop may fail to write a
        fast result, since the observation must be converted or does not fit. By then, the observation, reward, and
        info may be written, but the plan has not passed the boundary. `_write_result` then writes all of them again, or
        raises. Both keep to these rules:

        - A step counts as done after its observation, reward, info, and boundary are written.
        - The plan passes a boundary after everything that may raise. So it passes each one once.
        - Checksums, object leaves, and times are left to `_write_result`. Envs that need them have no fast results.

        Args:
            order: The order.
            choose: Writes the actions of a step, or returns the layout to make room for, which ends the order.

        Returns:
            That layout, or None.
        """
        planned = self._begin(order)
        page, forks, now, trajectory = self._page, context.forks, time.monotonic, self.trajectory
        counters, times, count = page.counters, page.times, trajectory.layout.envs
        steps_written = self._steps_written
        fast = None if page.is_timing else self._fast_results
        if fast is not None:
            numbers, width, rewards = fast
        action = trajectory.layout.action
        copies_action = isinstance(action, ArraySpec) and bool(action.shape)
        due: list[tuple[HostedEnv, EnvPlan]] = []
        has_raised = False
        for step in range(min(plan.first_step for _, plan in planned), trajectory.layout.steps):
            layout = choose(step)
            if layout is not None:
                return layout
            if len(due) < len(planned):
                due = [(hosted, plan) for hosted, plan in planned if plan.first_step <= step]
            actions = actions_at(trajectory, step, self.envs)
            for hosted, plan in due:
                index, kind = hosted.index, plan.kind
                times[SINCE] = now()
                counters[METHOD] = METHOD_STEP
                counters[ENV_INDEX] = hosted.position
                try:
                    if kind == KIND_STEP:
                        result = hosted.env.step(actions[index].copy() if copies_action else actions[index])
                    elif kind == KIND_RESET:
                        counters[METHOD] = METHOD_RESET
                        result = hosted.reset(plan.seed, None)
                    else:
                        self._repeat(hosted, step)
                        continue
                    # The fast path.
                    if fast is not None and type(result) is tuple and len(result) == 5:
                        obs, reward, terminated, truncated, info = result
                        is_boundary = terminated or truncated or kind == KIND_RESET
                        is_fast = isinstance(reward, float) and type(info) is dict
                        if is_fast and not (is_boundary and plan.resets_within_step):
                            cell = step * count + index
                            offset = (cell + count) * width
                            try:
                                numbers[offset : offset + width] = obs
                                rewards[cell] = reward
                                if info:
                                    self._write_info(cell, info, [])
                                if is_boundary:
                                    self._write_boundary(index, plan, step, terminated, truncated)
                                steps_written[index] = step + 1
                            except Exception:  # noqa: S110
                                pass  # `_write_result` does all of it again, and raises if that fails
                            else:
                                continue
                    # All other results, and fast ones that could not be written.
                    self._write_result(hosted, plan, step, result)
                except BaseException as error:  # also `SystemExit` of env code: the caller decides
                    has_raised = True
                    self._server.send_piece(RAISED, dumps((hosted.position, step, *as_failure(error, page))))
            if context.forks != forks:
                os._exit(1)  # env code or the policy forked, and the child returned to this loop
            if has_raised:
                break
        return None

    def _begin(self, order: Order) -> list[tuple[HostedEnv, EnvPlan]]:
        """Return the envs with their plans, and prepare the trajectory and object leaves for the steps of an order.

        An ended process may have left flags of the steps to come. They are cleared, since fast results write none.
        """
        plans = [EnvPlan(*fields) for fields in order.plans]
        planned = list(zip(self._server.host.hosted_envs, plans, strict=True))
        latest_start = max(plan.first_step for plan in plans)
        flags = self.trajectory.flags
        for hosted, plan in planned:
            flags[:, plan.first_step + 1 : latest_start + 1, hosted.index] = 0
        flags[:, latest_start + 1 :, slice_of(self.envs)] = 0
        for position, encoded in enumerate(order.last_contents):
            self._objects[position] = [] if encoded is None else decode(encoded)[1]
        return planned

    def _write_result(self, hosted: HostedEnv, plan: EnvPlan, step: int, result: Any) -> None:
        """Write any result of a step or a reset.

        Raises:
            PayloadError: It cannot be written.
            BaseException: A reset within the step raises.
        """
        page, trajectory, layout, index = self._page, self.trajectory, self.trajectory.layout, hosted.index
        is_reset = plan.kind == KIND_RESET
        fields = result if is_reset else hosted.take(result, plan.resets_within_step, plan.seed)
        if page.is_timing:
            method = page.counters[METHOD]
            page.spans.add(page.times[SINCE], time.monotonic(), self._server.call_id, hosted.position, method)
        obs, reward, terminated, truncated, info = fields
        try:
            objects: list[Any] = []
            if self._array is not None:
                self._array[step + 1, index] = obs
            else:
                if layout.inferred is not None:
                    obs = conform(layout.inferred, obs, f"the observation of env {index}")
                for array, leaf in zip(trajectory.observations, flatten(layout.observation, obs), strict=True):
                    if array is None:
                        objects.append(copy_value(leaf))  # the env may change it later
                    else:
                        array[step + 1, index] = leaf
            trajectory.rewards[step, index] = reward
            if hosted.journal:
                trajectory.checksums[step, index] = hosted.checksum
            if type(info) is not dict or info or objects:
                self._write_info(trajectory.cell(step, index), info, objects)
            self._objects[hosted.position] = objects
            if is_reset or terminated or truncated:
                self._write_boundary(index, plan, step, terminated, truncated)
        except BaseException as error:
            raise unfit_result(error, fields) from error
        self._steps_written[index] = step + 1

    def _write_boundary(self, index: int, plan: EnvPlan, step: int, terminated: Any, truncated: Any) -> None:
        """Write that an episode has ended, or that a reset has begun one."""
        trajectory = self.trajectory
        trajectory.terminated[step, index] = bool(terminated)
        trajectory.truncated[step, index] = bool(truncated)
        trajectory.kinds[step, index] = plan.kind
        trajectory.starts[step + 1, index] = plan.pass_boundary()

    def _write_info(self, cell: int, info: Any, objects: list[Any]) -> None:
        """Write an info and the leaves that have no array.

        Raises:
            Exception: They do not pickle.
        """
        piece = self._infos.put(cell, self._infos.pack(info, objects))
        if piece is not None:
            self._server.send_piece(cell, piece)

    def _repeat(self, hosted: HostedEnv, step: int) -> None:
        """Write the last observation of an env again."""
        trajectory, index = self.trajectory, hosted.index
        trajectory.repeat_observation(step, index)
        if self._objects[hosted.position]:
            self._write_info(trajectory.cell(step, index), {}, self._objects[hosted.position])
        trajectory.kinds[step, index] = KIND_REPEAT
        trajectory.checksums[step, index] = hosted.checksum
        self._steps_written[index] = step + 1
