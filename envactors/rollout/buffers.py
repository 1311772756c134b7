"""Buffers for trajectories: which one a new rollout may write to, and which ones belong to results that users keep.

The result of a rollout consists of views of its buffer, so that nothing is copied. A buffer is reused once nothing
refers to these arrays any more.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.backends.base import RowMemory
from envactors.rollout.trajectory import Trajectory, TrajectoryLayout, size_of

# Each result that is not copied keeps a mapping, of which a process may have a limited number; users may keep thousands
# of results.
_MOST_LENT = 2
# How often this process has forked: a child shares the memory of all results that existed then.
_forks = 0


class Views(NamedTuple):
    """What a `Rollout` shows of a trajectory.

    Attributes:
        observations: Arrays of shape (t, n, ...); None for leaves that have no place in the trajectory.
        actions: Arrays of shape (t, n, ...).
        rewards, terminated, truncated, starts: As in `Rollout`.
        extras: As in `Rollout`.
    """

    observations: list[npt.NDArray[Any] | None]
    actions: list[npt.NDArray[Any]]
    rewards: npt.NDArray[Any]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.bool_]
    extras: dict[str, npt.NDArray[Any]]

    def map(self, function: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Views:
        """Return what a function returns for each array."""
        return Views(
            [None if array is None else function(array) for array in self.observations],
            [function(array) for array in self.actions],
            function(self.rewards),
            function(self.terminated),
            function(self.truncated),
            function(self.starts),
            {name: function(array) for name, array in self.extras.items()},
        )


def make_views(trajectory: Trajectory, first: int, stop: int) -> Views:
    """Return views of the columns of some envs."""
    layout = trajectory.layout
    whole = Views(
        trajectory.observations,
        trajectory.actions,
        trajectory.rewards,
        trajectory.terminated,
        trajectory.truncated,
        trajectory.starts,
        {name: array for (name, _), array in zip(layout.extras, trajectory.extras, strict=True)},
    )
    return whole.map(lambda array: array[: layout.steps, first:stop])


class TrajectoryBuffer:
    """A trajectory in the memory of a vector.

    Args:
        layout: Layout of the trajectory.
        memory: Memory of the vector.

    Attributes:
        trajectory: The trajectory.
        place: Its place in the memory, by which workers open it.
    """

    def __init__(self, layout: TrajectoryLayout, memory: RowMemory) -> None:
        place, self._part = memory.extend(size_of(layout))
        self.place: tuple[int, int] = place
        self.trajectory: Trajectory = Trajectory(layout, self._part)
        # Views of all envs, and the place of each in the memory by its `id`, in bytes, as far as they were needed.
        self._views = make_views(self.trajectory, 0, layout.envs)
        self._places: dict[int, int] = {}
        self._loan: weakref.ref[npt.NDArray[np.uint8]] | None = None
        self._forks = 0

    def lend(self) -> tuple[weakref.ref[Any], Views]:
        """Return a reference that is dead once the user has dropped all of the views, and the views."""
        loan = np.frombuffer(self._part, np.uint8)
        places = self._places

        def view_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            place = places.get(id(array))
            if place is None:
                place = places[id(array)] = _address_of(array) - _address_of(loan)
            view: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, loan, place, array.strides)
            return view

        self._loan = weakref.ref(loan)
        self._forks = _forks
        return self._loan, self._views.map(view_of)

    @property
    def is_lent(self) -> bool:
        """Whether a result refers to the memory."""
        return self._loan is not None and self._loan() is not None

    @property
    def is_shared(self) -> bool:
        """Whether a child of a fork may still read a result that has ended here."""
        return self._loan is not None and self._forks != _forks


class TrajectoryBuffers:
    """The trajectories of a vector.

    Args:
        memory: Memory of the vector.
    """

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        # The one that was taken last comes last.
        self._buffers: list[TrajectoryBuffer] = []
        self._loans: list[weakref.ref[Any]] = []

    def take(self, layout: TrajectoryLayout, used: Collection[TrajectoryBuffer]) -> TrajectoryBuffer:
        """Return a buffer for a new rollout.

        Args:
            layout: Layout of its trajectory.
            used: Buffers of the rollouts in flight.

        Raises:
            OSError: There is not enough memory.
        """
        kept = [
            buffer
            for buffer in self._buffers
            if buffer in used or (buffer.trajectory.layout == layout and not buffer.is_shared)
        ]
        # Without copies, a result is valid until the next rollout but one begins: the last buffer has to rest.
        free = [buffer for buffer in kept[:-1] if buffer not in used and not buffer.is_lent]
        buffer = free[0] if free else TrajectoryBuffer(layout, self._memory)
        self._buffers = [other for other in kept if other is not buffer] + [buffer]
        return buffer

    def lend(self, buffer: TrajectoryBuffer) -> Views | None:
        """Return the arrays of a result, views of a buffer that is not reused while the user keeps any of them.

        Returns:
            None if the user keeps as many results as may be lent.
        """
        self._loans = [loan for loan in self._loans if loan() is not None]
        if len(self._loans) >= _MOST_LENT:
            return None
        loan, views = buffer.lend()
        self._loans.append(loan)
        return views


def _address_of(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork)
