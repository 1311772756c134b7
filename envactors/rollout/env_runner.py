"""The envs of a worker in a rollout: run their steps, and write the results to the trajectory.

`EnvRunner.run` is the loop over steps, a generator. Before each step it yields the input of the policy, and its
`PolicyRunner` writes the policy's output with `EnvRunner.write_output`. Then the envs are stepped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.control_page import ENV_INDEX, METHOD, METHOD_RESET, METHOD_STEP, SINCE
from envactors.mailbox.info_codec import Infos, decode
from envactors.mailbox.pickling import copy_value, dumps
from envactors.mailbox.slab import PLAIN_REWARD, slice_of
from envactors.mailbox.specs import ArraySpec, conform, flattener, stack, unflatten
from envactors.rollout.env_plan import KIND_REPEAT, KIND_RESET, KIND_STEP, EnvPlan
from envactors.rollout.messages import RAISED, Order
from envactors.rollout.policy import actions_at, write_output
from envactors.rollout.trajectory import Trajectory, TrajectoryLayout
from envactors.worker import context
from envactors.worker.env_rows import as_failure, unfit_result
from envactors.worker.host import Fields, HostedEnv
from envactors.worker.main import Server


class EnvRunner:
    """Runs the envs of a worker in the steps of a rollout.

    Args:
        trajectory: Trajectory to write to.
        server: The worker's server.
        indices: Indices of the worker's envs.

    Attributes:
        trajectory: As above.
    """

    def __init__(self, trajectory: Trajectory, server: Server, indices: range) -> None:
        layout = trajectory.layout
        self.trajectory = trajectory
        self._indices = indices
        self._server = server
        self._page = server.page
        self._infos = Infos(trajectory)
        self._flatten = flattener(layout.observation)
        # Leaves of each env's last observation that have no array in the trajectory.
        self._objects: list[list[Any]] = [[] for _ in indices]
        # A memoryview reads or writes one number in a third of the time of an array.
        self._steps_complete = trajectory.steps_complete.data

        # The policy gets read-only views, since they also are the observations of the result.
        mine = slice_of(indices)
        self._views: list[Any] = [None if array is None else array[:, mine] for array in trajectory.observations]
        self._starts: npt.NDArray[np.bool_] = trajectory.starts[:, mine]
        for view in (*self._views, self._starts):
            if view is not None:
                view.flags.writeable = False
        # The observations of all envs, by step; None if they are dicts, tuples, or objects.
        self._only_leaf = trajectory.observations[0] if isinstance(layout.observation, ArraySpec) else None

        # The actions of all envs, by step; None if they are dicts or tuples, or not known yet.
        self._all_actions = trajectory.actions[0] if isinstance(layout.action, ArraySpec) else None
        # Where `write_output` writes fast outputs of the policy: all actions, flat, the shape of an output, and the
        # size of one action. It has None if no output can be fast.
        self._fast_output: tuple[Any, Any, int] = None, None, 0
        array = self._all_actions
        if array is not None and array.dtype.kind in "biuf" and not layout.extras:
            self._fast_output = array.reshape(-1).data, (len(indices), *array.shape[2:]), array[0, 0].size

        # Where `run` writes fast results: all observations, flat, the length of one of them, and all rewards, flat. It
        # has None for the memory if no result can be fast. Assigning to a memoryview checks the dtype and the shape, in
        # half of NumPy's time.
        self._fast_results: tuple[Any, int, Any] = None, 0, None
        array, is_plain = self._only_leaf, layout.reward == PLAIN_REWARD and not server.host.hosted_envs[0].journal
        if is_plain and array is not None and array.ndim == 3 and array.dtype.kind in "biuf":  # a vector per env
            self._fast_results = array.reshape(-1).data, array.shape[2], trajectory.rewards.reshape(-1).data

    # The policy ------------------------------------------------------------------------------------------

    def _observations(self, step: int) -> Any:
        """Return the observations before a step, as the policy gets them."""
        layout = self.trajectory.layout
        if layout.inferred is not None:
            return stack(layout.inferred, [obs for (obs,) in self._objects])
        objects = zip(*self._objects, strict=True)
        leaves = (list(next(objects)) if view is None else view[step] for view in self._views)
        return unflatten(layout.observation, leaves)

    def write_output(self, step: int, output: Any) -> TrajectoryLayout | None:
        """Write the output of the policy; see `envactors.rollout.policy.write_output`.

        A *fast* output, an array with the dtype and the shape of the actions, is written in a twentieth of the time.
        """
        numbers, shape, width = self._fast_output
        if type(output) is np.ndarray and output.shape == shape:
            offset = (step * self.trajectory.layout.num_envs + self._indices.start) * width
            try:
                numbers[offset : offset + output.size] = output if output.ndim == 1 else output.reshape(-1)
            except ValueError:  # another dtype
                return write_output(self.trajectory, self._indices, step, output)
            return None
        return write_output(self.trajectory, self._indices, step, output)

    # The envs --------------------------------------------------------------------------------------------

    def run(self, order: Order) -> Iterator[tuple[int, Any, npt.NDArray[np.bool_]]]:
        """Carry out an order, until all steps are complete or an env raises; the other envs still take that step.

        Most results are *fast*: the observation is one vector of numbers, the reward a float, the info a dict, and the
        step has no reset within it. This loop writes them itself, since one call more per step makes rollouts of light
        envs 7 % slower.

        `_write_result` writes all other results. It also takes over if writing a fast one raises, as for an observation
        that must be converted: it writes everything again, or raises. The plan must not pass a boundary twice, so
        `_write_boundary` comes after everything else that may raise.

        Only `_write_result` writes checksums, object leaves, and spans: envs that need them have no fast results.

        Yields:
            Each step that has no actions yet, the observations before it, and whether each begins its episode. Write
            the actions with `write_output` before the next iteration.
        """
        trajectory, page, forks, has_raised = self.trajectory, self._page, context.forks, False
        counters, times, now = page.counters, page.times, time.monotonic
        num_envs, first_env, own_starts = trajectory.layout.num_envs, self._indices.start, self._starts
        steps_complete, steps_chosen = self._steps_complete, trajectory.steps_chosen.data
        own_views = None if self._only_leaf is None else self._views[0]
        all_actions = self._all_actions
        copies_actions = all_actions is not None and all_actions.ndim > 2  # envs may modify arrays
        numbers, width, rewards = self._fast_results
        may_be_fast = numbers is not None and not page.is_timing
        planned = self._prepare(order)
        resets_within_step = planned[0][1].resets_within_step  # all plans agree
        first_steps = [plan.first_step for _, plan in planned]
        all_due_from, chosen_before = max(first_steps), steps_chosen[first_env]
        for step in range(min(first_steps), trajectory.layout.steps):
            if step >= chosen_before:
                yield step, self._observations(step) if own_views is None else own_views[step], own_starts[step]
                steps_chosen[first_env] = step + 1
            actions = actions_at(trajectory, step, self._indices) if all_actions is None else all_actions[step]
            due = planned if step >= all_due_from else [pair for pair in planned if pair[1].first_step <= step]
            for hosted, plan in due:
                # Inlined from `ControlPage.record_env`, in its order.
                times[SINCE] = now()
                counters[METHOD] = METHOD_STEP
                counters[ENV_INDEX] = hosted.position
                try:
                    if plan.kind != KIND_STEP:
                        self._reset_or_repeat(step, hosted, plan)
                        continue
                    index = hosted.index
                    result = hosted.env.step(actions[index].copy() if copies_actions else actions[index])
                    if may_be_fast and type(result) is tuple:
                        try:
                            obs, reward, terminated, truncated, info = result
                            ends = terminated or truncated
                            if isinstance(reward, float) and type(info) is dict and not (ends and resets_within_step):
                                cell = step * num_envs + index
                                offset = (cell + num_envs) * width
                                numbers[offset : offset + width] = obs
                                rewards[cell] = reward
                                if info:
                                    self._write_info(cell, info, [])
                                if ends:
                                    self._write_boundary(step, index, plan, terminated, truncated)
                                steps_complete[index] = step + 1
                                continue
                        except Exception:  # noqa: S110
                            pass  # `take` and `_write_result` convert it, or raise again
                    self._write_result(step, hosted, plan, hosted.take(result, resets_within_step, plan.seed))
                except BaseException as error:  # also `SystemExit` of env code: the caller decides
                    has_raised = True
                    self._server.send_piece(RAISED, dumps((hosted.position, step, *as_failure(error, page))))
            if context.forks != forks:
                os._exit(1)  # env code or the policy forked, and the child returned to this loop
            if has_raised:
                return

    def _prepare(self, order: Order) -> list[tuple[HostedEnv, EnvPlan]]:
        """Return the envs with their plans, and prepare the trajectory and object leaves for the steps of an order.

        An earlier rollout in this buffer, or an ended process, may have left flags in the steps to come. They are
        cleared, since most steps write none.
        """
        plans = [EnvPlan(*fields) for fields in order.plans]
        planned = list(zip(self._server.host.hosted_envs, plans, strict=True))
        for hosted, plan in planned:
            self.trajectory.flags[:, plan.first_step + 1 :, hosted.index] = 0
        for position, encoded in enumerate(order.last_contents):
            self._objects[position] = [] if encoded is None else decode(encoded)[1]
        return planned

    def _reset_or_repeat(self, step: int, hosted: HostedEnv, plan: EnvPlan) -> None:
        """Reset an env in place of a step, or write its last observation again, as its plan says."""
        if plan.kind == KIND_RESET:
            self._page.counters[METHOD] = METHOD_RESET
            self._write_result(step, hosted, plan, hosted.reset(plan.seed, None))
            return
        trajectory, index, objects = self.trajectory, hosted.index, self._objects[hosted.position]
        trajectory.repeat_observation(step, index)
        if objects:
            self._write_info(trajectory.cell(step, index), {}, objects)
        trajectory.kinds[step, index] = KIND_REPEAT
        trajectory.checksums[step, index] = hosted.checksum
        self._steps_complete[index] = step + 1

    # Writing results -------------------------------------------------------------------------------------

    def _write_result(self, step: int, hosted: HostedEnv, plan: EnvPlan, fields: Fields) -> None:
        """Write any result of a step or a reset. The step counts once everything is written.

        Raises:
            PayloadError: It cannot be written.
            Exception: Raised by the truth value of ``terminated`` or ``truncated``.
        """
        page, trajectory, index = self._page, self.trajectory, hosted.index
        obs, reward, terminated, truncated, info = fields
        is_boundary = plan.kind == KIND_RESET or terminated or truncated
        if page.is_timing:
            method = page.counters[METHOD]
            page.spans.add(page.times[SINCE], time.monotonic(), self._server.call_id, hosted.position, method)
        try:
            objects = self._write_observation(step, index, obs)
            self._objects[hosted.position] = objects
            trajectory.rewards[step, index] = reward
            if hosted.journal:
                trajectory.checksums[step, index] = hosted.checksum
            if type(info) is not dict or info or objects:
                self._write_info(trajectory.cell(step, index), info, objects)
            if is_boundary:
                self._write_boundary(step, index, plan, terminated, truncated)
        except BaseException as error:
            raise unfit_result(error, fields) from error
        self._steps_complete[index] = step + 1

    def _write_observation(self, step: int, index: int, obs: Any) -> list[Any]:
        """Write the observation after a step; return copies of its leaves that have no array."""
        if self._only_leaf is not None:
            self._only_leaf[step + 1, index] = obs
            return []
        if (inferred := self.trajectory.layout.inferred) is not None:
            obs = conform(inferred, obs, f"the observation of env {index}")
        objects: list[Any] = []
        for array, leaf in zip(self.trajectory.observations, self._flatten(obs), strict=True):
            if array is None:
                objects.append(copy_value(leaf))  # the env may change it later
            else:
                array[step + 1, index] = leaf
        return objects

    def _write_boundary(self, step: int, index: int, plan: EnvPlan, terminated: Any, truncated: Any) -> None:
        """Write that an episode has ended, or that a reset has begun one.

        Call this after everything that may raise, so that the plan passes each boundary once. `pass_boundary` is last
        here for the same reason: the truth value of a flag may raise. It also gives the plan its next kind.
        """
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
