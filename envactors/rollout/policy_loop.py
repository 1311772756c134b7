"""The worker's half of rollouts: call the policy and step the envs until an order is complete."""

from __future__ import annotations

import functools
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

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
from envactors.rollout.context import PolicyContext, generator_of
from envactors.rollout.messages import EnvPlan, Order, OrderReply, Parameters, PolicyRecipe
from envactors.rollout.policy_output import actions_at
from envactors.rollout.trajectory import OP_RESET, OP_STEP, RegionPlaces, Trajectory, TrajectoryLayout
from envactors.rollout.trajectory_writer import EnvCursor, TrajectoryWriter
from envactors.worker import context
from envactors.worker.env_rows import as_failure
from envactors.worker.main import Server

# How much memory stays open: two rollouts may be in flight while the user keeps two results, and each may have its
# parameters.
_MOST_TRAJECTORIES = 4
_MOST_PARAMETERS = 2


def set_policy(server: Server, recipe: PolicyRecipe) -> bool:
    """Make the policy in this worker; return whether it can load parameters."""
    server.page.record_env(METHOD_CALL, 0)
    made = pickle.loads(recipe.pickled)()
    server.extension = PolicyLoop(server, recipe.policy_id, made, recipe.seed)
    return hasattr(made, "load")


def run_rollout(server: Server, *fields: Any) -> tuple[Any, ...]:
    """Carry out an order, given as the fields of `Order`; return the fields of an `OrderReply`."""
    order = Order(*fields)
    if order.recipe is not None:
        set_policy(server, order.recipe)
    loop: PolicyLoop | None = server.extension
    if loop is None or loop.policy_id != order.policy_id:
        return tuple(OrderReply(lacks_policy=True))
    return tuple(loop.run(order))


class PolicyLoop:
    """Runs the policy and the envs of one worker.

    Args:
        server: The worker's server.
        policy_id: Id of the policy.
        policy: The policy.
        seed: Seed of the policy.

    Attributes:
        policy_id: As above.
    """

    def __init__(self, server: Server, policy_id: int, policy: Any, seed: int) -> None:
        self.policy_id = policy_id
        self._server = server
        self._policy = policy
        self._seed = seed
        self._env_ids = np.array([hosted.index for hosted in server.host.hosted_envs], np.int64)
        self._writer_at = functools.lru_cache(_MOST_TRAJECTORIES)(self._open_trajectory)
        self._parameters_at = functools.lru_cache(_MOST_PARAMETERS)(functools.partial(self._open, writable=False))
        # Version of the parameters that the policy loaded last.
        self._version = 0
        # The index of the rollout, the step, and the output of a policy call that had no room in the trajectory.
        self._kept: tuple[int, int, Any] | None = None

    def run(self, order: Order) -> OrderReply:
        """Carry out an order.

        Raises:
            BaseException: Raised by the policy.
        """
        host, page = self._server.host, self._server.page
        if order.parameters is not None:
            self._load(order.parameters)
        writer = self._writer_at(order.places, order.layout)
        cursors = [
            EnvCursor(hosted, EnvPlan(*plan)) for hosted, plan in zip(host.hosted_envs, order.plans, strict=True)
        ]
        writer.begin(order, cursors)
        page.is_timing = page.counters[TIMED] != 0
        try:
            return self._alternate(writer, order, cursors)
        finally:
            page.is_timing = False

    def _alternate(self, writer: TrajectoryWriter, order: Order, cursors: list[EnvCursor]) -> OrderReply:
        """Alternate between the policy and the envs. Loops of light envs spend most of their time in this function."""
        page, forks, now = self._server.page, context.forks, time.monotonic
        counters, times = page.counters, page.times
        steps_done, rewards, numbers, copies = writer.steps_done, writer.rewards, writer.numbers, writer.copies_action
        trajectory, count = writer.trajectory, writer.count
        resets_within, rollout_index = order.resets_within_step, order.rollout_index
        size = 0 if page.is_timing else writer.size  # of a plain observation; 0 to leave all results to `finish`
        make_rng = functools.partial(generator_of, self._seed, rollout_index=rollout_index, first_env=writer.envs.start)
        due: list[EnvCursor] = []
        for step in range(order.first_step, order.end_step):
            if context.forks != forks:
                os._exit(1)  # env code forked, and its child returned to this loop
            layout = self._choose(writer, rollout_index, step, make_rng)
            if layout is not None:
                return OrderReply(layout=layout)
            if len(due) < len(cursors):
                due = [cursor for cursor in cursors if cursor.first_step <= step]
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
                        # Plain results are written here: the same as `TrajectoryWriter.finish`, without its calls. It
                        # overwrites what this has written of a result that turns out not to be plain.
                        obs, reward, terminated, truncated, info = result
                        is_boundary = terminated or truncated or op == OP_RESET
                        if isinstance(reward, float) and type(info) is dict and not (is_boundary and resets_within):
                            cell = first_cell + index
                            at = (cell + count) * size
                            try:
                                numbers[at : at + size] = obs
                                rewards[cell] = reward
                                if info:
                                    writer.write_info(cell, info, [])
                                if is_boundary:
                                    writer.write_boundary(cursor, step, terminated, truncated)
                                steps_done[index] = step + 1
                                continue
                            except Exception:  # noqa: S110 # `finish` converts the observation, or raises the error
                                pass
                    writer.finish(cursor, step, result)
                except BaseException as error:
                    return OrderReply(position=cursor.position, failure=as_failure(error, page))
        return OrderReply()

    def _choose(
        self, writer: TrajectoryWriter, rollout_index: int, step: int, make_rng: Callable[[int], np.random.Generator]
    ) -> TrajectoryLayout | None:
        """Have the policy choose the actions of a step, unless an earlier process has chosen them.

        Returns:
            None, or the layout that has room for the policy's output, if the trajectory has none.

        Raises:
            BaseException: Raised by the policy.
        """
        first = writer.envs.start
        if writer.steps_chosen[first] > step:
            return None
        if self._kept is not None and self._kept[:2] == (rollout_index, step):
            output = self._kept[2]
        else:
            self._server.page.record_env(METHOD_POLICY, 0)
            about = PolicyContext(self._env_ids, writer.starts[step], step, make_rng)
            output = self._policy(writer.observed[step], about)
        layout = writer.write_output(step, output)
        if layout is not None:
            self._kept = rollout_index, step, output
            return layout
        self._kept = None
        writer.steps_chosen[first] = step + 1
        return None

    def _load(self, parameters: Parameters) -> None:
        """Have the policy load parameters unless it has them. Their arrays are read-only views of the shared memory."""
        if parameters.version == self._version:
            return
        region = b"" if parameters.place is None else self._parameters_at(parameters.place)
        buffers = [region[start:stop] for start, stop in parameters.spans]
        self._server.page.record_env(METHOD_POLICY, 0)
        self._policy.load(pickle.loads(parameters.pickled, buffers=buffers))
        self._version = parameters.version

    # The shared memory -----------------------------------------------------------------------------------

    def _open_trajectory(self, places: RegionPlaces, layout: bytes) -> TrajectoryWriter:
        regions = [None if place is None else self._open(place, writable=True) for place in places]
        return TrajectoryWriter(Trajectory(pickle.loads(layout), regions), self._server)

    def _open(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        assert self._server.memory is not None, "envs of a vector have memory"
        return self._server.memory.open_part(place, writable=writable)
