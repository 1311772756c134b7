"""The worker's half of rollouts: call the policy and step the envs until an order is complete.

`envactors.rollout.columns` steps the envs and writes the trajectory.
"""

from __future__ import annotations

import functools
import os
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.mailbox.control_page import METHOD, METHOD_POLICY, SINCE, TIMED
from envactors.mailbox.specs import ArraySpec
from envactors.rollout.columns import Column, Columns, EnvFailedError
from envactors.rollout.context import PolicyContext, StepGenerators
from envactors.rollout.orders import DONE, LEARNT, NEEDS_POLICY, RAISED, Order, Parameters, Stop
from envactors.rollout.trajectory import Trajectory
from envactors.worker import context
from envactors.worker.main import Server

# How much memory stays open: two rollouts may be in flight while the user keeps two results; parameters alternate
# between two parts.
_MOST_TRAJECTORIES = 4
_MOST_PARAMETERS = 2


def set_policy(server: Server, number: int, pickled: bytes, seed: int) -> bool:
    """Make the policy in this worker; return whether it can load parameters.

    Args:
        server: The worker's server.
        number: Id of the policy.
        pickled: Pickled function that makes the policy.
        seed: Seed of the policy.
    """
    server.page.record_env(METHOD_POLICY, 0)
    policy = pickle.loads(pickled)()
    server.extension = RolloutRunner(server, number, policy, seed)
    return hasattr(policy, "load")


def run_rollout(server: Server, *fields: Any) -> tuple[Any, ...]:
    """Carry out an order, given as the fields of `Order`; return the fields of a `Stop`.

    The caller reads a plain tuple in the thread that waits for the rollout, since no code of users can run in that.
    """
    order = Order(*fields)
    runner: RolloutRunner | None = server.extension
    if runner is None or runner.number != order.policy:
        return tuple(Stop(NEEDS_POLICY))
    return tuple(runner.run(order))


class RolloutRunner:
    """Runs the policy and the envs of one worker.

    Args:
        server: The worker's server.
        number: Id of the policy.
        policy: The policy.
        seed: Seed of the policy.

    Attributes:
        number: Id of the policy.
    """

    def __init__(self, server: Server, number: int, policy: Any, seed: int) -> None:
        self.number = number
        self._server = server
        self._page = server.page
        self._counters, self._times = server.page.counters, server.page.times
        self._policy = policy
        self._forks = context.forks
        hosted_envs = server.host.hosted_envs
        self._first = hosted_envs[0].index
        self._count = len(hosted_envs)
        self._generators = StepGenerators(seed, self._first)
        self._env_ids = np.arange(self._first, self._first + self._count)
        self._columns_at = functools.lru_cache(_MOST_TRAJECTORIES)(self._open_columns)
        self._parameters_at = functools.lru_cache(_MOST_PARAMETERS)(functools.partial(self._open_part, writable=False))
        # Version of the parameters that the policy loaded last.
        self._version = 0
        # The rollout, step, and return value of a policy call whose result had no place in the trajectory.
        self._chosen: tuple[tuple[int, int], Any] | None = None

    def run(self, order: Order) -> Stop:
        """Carry out an order.

        Raises:
            BaseException: Raised by the policy.
        """
        if order.parameters is not None:
            parameters = Parameters(*order.parameters)
            if parameters.version != self._version:
                self._load(parameters)
        self._generators.rollout = order.rollout
        written = self._columns_at(order.place, order.layout)
        written.objects = order.objects
        hosted_envs = self._server.host.hosted_envs
        columns = [Column(hosted, *plan) for hosted, plan in zip(hosted_envs, order.plans, strict=True)]
        due = [columns[position] for position in order.due]
        written.clear(order.start, [column.hosted.index for column in due])
        self._page.is_timing = self._counters[TIMED] != 0
        steps = written.run(range(order.start, order.stop), due, columns, order.autoreset)
        try:
            stop = self._choose_actions(written, steps, order.rollout, order.start)
        except EnvFailedError as error:
            return Stop(RAISED, error.position, tuple(error.failure))
        self._page.is_timing = False
        return stop

    def _choose_actions(self, written: Columns, steps: Iterator[int], rollout: int, start: int) -> Stop:
        """Have the policy choose the actions of each step before the envs take it.

        Args:
            written: Steps the envs.
            steps: Takes one step per iteration.
            rollout: Index of the rollout.
            start: First step.
        """
        times, counters, chosen, first = self._times, self._counters, written.chosen, self._first
        policy, env_ids, generators, now, array = (
            self._policy,
            self._env_ids,
            self._generators,
            time.monotonic,
            np.ndarray,
        )
        observed, starts, mine = written.observed, written.starts, written.my_action
        dtype, shape = written.action_dtype, written.action_shape
        is_kept = self._chosen is not None and self._chosen[0] == (rollout, start)
        if chosen[first] > start:
            next(steps)  # the actions of the first step were chosen in a process that has ended
        for step in steps:
            if self._forks != context.forks:
                os._exit(1)  # env code forked, and its child returned to this loop
            if is_kept and self._chosen is not None:
                returned, is_kept = self._chosen[1], False
            else:
                times[SINCE] = now()
                counters[METHOD] = METHOD_POLICY
                returned = policy(observed[step], PolicyContext(env_ids, starts[step], step, generators))
            # Most actions are written here: the same as `_write`, without its calls.
            if type(returned) is array and returned.dtype is dtype and returned.shape == shape:
                mine[step] = returned
            elif (learnt := self._write(written, rollout, step, returned)) is not None:
                return learnt
            chosen[first] = step + 1
        return Stop(DONE)

    def _open_columns(self, place: tuple[int, int], layout: bytes) -> Columns:
        trajectory = Trajectory(pickle.loads(layout), self._open_part(place, writable=True))
        return Columns(trajectory, self._server, self._first, self._count)

    def _open_part(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        assert self._server.memory is not None, "envs of a vector have memory"
        return self._server.memory.open_part(place, writable=writable)

    # The policy ------------------------------------------------------------------------------------------

    def _load(self, parameters: Parameters) -> None:
        """Have the policy load parameters, whose arrays are read-only views of the shared memory."""
        buffers: list[memoryview] = []
        if parameters.place is not None:
            part = self._parameters_at(parameters.place)
            buffers = [part[start:stop] for start, stop in parameters.spans]
        self._page.record_env(METHOD_POLICY, 0)
        self._policy.load(pickle.loads(parameters.pickled, buffers=buffers))
        self._version = parameters.version

    def _write(self, written: Columns, rollout: int, step: int, returned: Any) -> Stop | None:
        """Write what the policy has returned; return a `Stop` if the trajectory has no place for it."""
        layout = written.trajectory.layout
        actions, extras = self._split(written, returned)
        learnt = self._write_extras(written.trajectory, step, extras)
        action = self._learn_action(actions) if layout.action is None else None
        if learnt or action is not None:
            self._chosen = (rollout, step), returned
            return Stop(LEARNT, learnt=learnt or layout.extras, action=action)
        written.write_actions(step, actions)
        return None

    def _learn_action(self, actions: Any) -> ArraySpec:
        """Return the spec of one action.

        Raises:
            SpaceMismatchError: The actions are not numbers or arrays of one shape, one per env.
        """
        try:
            array = np.asarray(actions)
        except ValueError:  # ragged
            array = np.empty(0, object)
        spec = ArraySpec(array.shape[1:], array.dtype)
        if not spec.batchable or array.shape[:1] != (self._count,):
            raise SpaceMismatchError(
                f"the policy returned the actions {actions!r}: expected numbers or arrays of one shape, one per env "
                f"({self._count}), because the envs have no action space"
            )
        return spec

    def _split(self, written: Columns, returned: Any) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
        """Split what the policy returned into actions and extras.

        Raises:
            ValueError: An extra does not have one row per env.
        """
        if type(returned) is not tuple or len(returned) != 2 or not isinstance(returned[1], dict):
            return returned, {}
        spec = written.trajectory.layout.action
        if isinstance(spec, tuple) and not isinstance(returned[0], (tuple, list)):
            return returned, {}  # the actions themselves are a pair
        extras = {name: np.asarray(values) for name, values in returned[1].items()}
        for name, values in extras.items():
            if values.shape[:1] != (self._count,):
                raise ValueError(
                    f"the policy returned the extra {name!r} of shape {values.shape}: expected {self._count} along the "
                    "first axis, one per env"
                )
        return returned[0], extras

    def _write_extras(
        self, trajectory: Trajectory, step: int, extras: dict[str, npt.NDArray[Any]]
    ) -> tuple[tuple[str, ArraySpec], ...]:
        """Write the extras of a step; return their specs if the trajectory has no place for them.

        Raises:
            TypeError: The extras differ from those of earlier steps, or are not numbers.
        """
        expected = trajectory.layout.extras
        if not expected and extras and trajectory.chosen[self._first] == 0:
            learnt = tuple((name, ArraySpec(array.shape[1:], array.dtype)) for name, array in extras.items())
            if not all(spec.batchable for _, spec in learnt):
                raise TypeError(f"the policy returned the extras {extras}: expected arrays of numbers")
            return learnt
        first, stop = self._first, self._first + self._count
        for (name, spec), array in zip(expected, trajectory.extras, strict=True):
            values = extras.get(name)
            if values is None or values.shape[1:] != spec.shape or values.dtype != spec.dtype:
                raise TypeError(f"the policy returned {values!r} as the extra {name!r}: expected one {spec} per env")
            array[step, first:stop] = values
        if len(extras) != len(expected):
            raise TypeError(f"the policy returned the extras {list(extras)}: expected {[name for name, _ in expected]}")
        return ()
