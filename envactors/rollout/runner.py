"""The worker's half of rollouts: the policy chooses, the envs step, until the order is carried out.

What is written into the trajectory is `envactors.rollout.columns`.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.mailbox.control_page import METHOD, METHOD_POLICY, SINCE, TIMED
from envactors.mailbox.specs import ArraySpec
from envactors.rollout.columns import Column, Columns
from envactors.rollout.context import PolicyContext, StepGenerators
from envactors.rollout.orders import DONE, LEARNT, NEEDS_POLICY, RAISED, Order, Parameters, Stop
from envactors.rollout.trajectory import Trajectory
from envactors.worker import context
from envactors.worker.main import Server

# How many trajectories stay open: two rollouts may be in flight, and two results in the user's hands. Parameters, which
# alternate between two parts, need no more.
_MOST_OPEN = 4


def set_policy(server: Server, number: int, pickled: bytes, seed: int) -> bool:
    """Make the policy of this worker; return whether it can load parameters.

    Args:
        server: The worker's server.
        number: The number of the policy.
        pickled: A function that makes it.
        seed: Its seed.
    """
    server.page.record_env(METHOD_POLICY, 0)
    policy = pickle.loads(pickled)()
    server.extension = RolloutRunner(server, number, policy, seed)
    return hasattr(policy, "load")


def run_rollout(server: Server, *fields: Any) -> Stop:
    """Carry out an order, given its fields."""
    order = Order(*fields)
    runner: RolloutRunner | None = server.extension
    if runner is None or runner.number != order.policy:
        return Stop(NEEDS_POLICY)
    return runner.run(order)


class RolloutRunner:
    """Runs the policy and the envs of one worker.

    Args:
        server: The worker's server.
        number: The number of the policy.
        policy: The policy.
        seed: Its seed.

    Attributes:
        number: As above.
    """

    def __init__(self, server: Server, number: int, policy: Any, seed: int) -> None:
        self.number = number
        self._server = server
        self._page = server.page
        self._policy = policy
        self._forks = context.forks
        hosted_envs = server.host.hosted_envs
        self._first = hosted_envs[0].index
        self._count = len(hosted_envs)
        self._generators = StepGenerators(seed, self._first)
        self._env_ids = np.arange(self._first, self._first + self._count)
        self._open: dict[tuple[int, int], Columns] = {}
        self._parts: dict[tuple[int, int], memoryview] = {}
        # The version that was loaded last.
        self._version = 0
        # What the policy has returned in a step for which the trajectory has no place.
        self._chosen: tuple[tuple[int, int], Any] | None = None

    def run(self, order: Order) -> Stop:
        """Carry out an order.

        Raises:
            BaseException: What the policy has raised.
        """
        if order.parameters is not None:
            parameters = Parameters(*order.parameters)
            if parameters.version != self._version:
                self._load(parameters)
        self._generators.rollout = order.rollout
        written = self._opened(order)
        written.objects = order.objects
        page, counters, chosen, first = self._page, self._page.counters, written.chosen, self._first
        hosted_envs = self._server.host.hosted_envs
        columns = [Column(hosted, *plan) for hosted, plan in zip(hosted_envs, order.plans, strict=True)]
        due = [columns[position] for position in order.due]
        written.clear(order.start, [column.hosted.index for column in due])
        page.is_timing = counters[TIMED] != 0
        for step in range(order.start, order.stop):
            if chosen[first] <= step:
                learnt = self._choose(written, order.rollout, step)
                if learnt is not None:
                    return learnt
            raised = written.step(step, due, order.autoreset)
            if raised is not None:
                assert written.failure is not None, "it has raised"
                return Stop(RAISED, raised, tuple(written.failure))
            if self._forks != context.forks:
                os._exit(1)  # env code forked, and its child came back here
            due = columns
        page.is_timing = False
        return Stop(DONE)

    def _opened(self, order: Order) -> Columns:
        """Return the trajectory of an order; no place has two in its time."""
        found = self._open.get(order.place)
        if found is None:
            assert self._server.memory is not None, "envs of a vector have memory"
            memory = self._server.memory.open_part(order.place, writable=True)
            trajectory = Trajectory(pickle.loads(order.layout), memory)
            found = Columns(trajectory, self._server, self._first, self._count)
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[order.place] = found
        return found

    # The policy ------------------------------------------------------------------------------------------

    def _load(self, parameters: Parameters) -> None:
        """Have the policy load parameters: read-only views of shared memory."""
        buffers: list[memoryview] = []
        if parameters.place is not None:
            part = self._part(parameters.place)
            buffers = [part[start:stop] for start, stop in parameters.spans]
        self._page.record_env(METHOD_POLICY, 0)
        self._policy.load(pickle.loads(parameters.pickled, buffers=buffers))
        self._version = parameters.version

    def _part(self, place: tuple[int, int]) -> memoryview:
        found = self._parts.get(place)
        if found is None:
            assert self._server.memory is not None, "envs of a vector have memory"
            found = self._server.memory.open_part(place, writable=False)
            while len(self._parts) >= _MOST_OPEN:
                self._parts.pop(next(iter(self._parts)))
            self._parts[place] = found
        return found

    def _choose(self, written: Columns, rollout: int, step: int) -> Stop | None:
        """Have the policy choose the actions of a step; return what it returns, if that has no place."""
        if self._chosen is not None and self._chosen[0] == (rollout, step):
            returned = self._chosen[1]
        else:
            page = self._page
            page.times[SINCE] = time.monotonic()
            page.counters[METHOD] = METHOD_POLICY
            obs, starts = written.observed(step)
            returned = self._policy(obs, PolicyContext(self._env_ids, starts, step, self._generators))
        self._chosen = None
        layout = written.trajectory.layout
        if type(returned) is tuple or layout.extras or layout.action is None:
            actions, extras = self._split(written, returned)
            learnt = self._write_extras(written.trajectory, step, extras)
            action = self._learn_action(actions) if layout.action is None else None
            if learnt or action is not None:
                self._chosen = (rollout, step), returned
                return Stop(LEARNT, learnt=learnt or layout.extras, action=action)
        else:
            actions = returned
        written.write_actions(step, actions)
        written.chosen[self._first] = step + 1
        return None

    def _learn_action(self, actions: Any) -> ArraySpec:
        """Return what one action looks like.

        Raises:
            SpaceMismatchError: They are no numbers, or not one per env.
        """
        try:
            array = np.asarray(actions)
        except ValueError:  # ragged
            array = np.empty(0, object)
        spec = ArraySpec(array.shape[1:], array.dtype)
        if not spec.batchable or array.shape[:1] != (self._count,):
            raise SpaceMismatchError(
                f"the policy returned the actions {actions!r}: expected numbers or arrays of one shape, one per env "
                f"({self._count}), as the envs have no action space"
            )
        return spec

    def _split(self, written: Columns, returned: Any) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
        """Return the actions that a policy has returned, and what it has returned beside them.

        Raises:
            ValueError: That is not one per env.
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
        """Write what the policy has returned beside the actions; if the trajectory has no place for that, say what.

        Raises:
            TypeError: It is something else than in the step before, or no numbers.
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
