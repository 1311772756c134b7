"""The memory that rollouts add to a vector: buffers for trajectories, and parameters of policies."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from envactors.actor.change import ChangeLock
from envactors.backends.base import RowMemory
from envactors.errors import VectorEnvError
from envactors.rollout.messages import Parameters
from envactors.rollout.trajectory import RegionPlaces, Trajectory, TrajectoryLayout

# Alignment of arrays in bytes: a pair of cache lines.
_ALIGNMENT = 128


class Region(NamedTuple):
    """A part of the memory of a vector, and its place there, by which workers open it."""

    place: tuple[int, int]
    content: Any


class TrajectoryBuffer:
    """A trajectory in the memory of a vector.

    Args:
        layout: Layout of the trajectory.
        memory: Memory of the vector.

    Attributes:
        trajectory: The trajectory.
        pickled_layout: Its pickled layout.
        places: Places of its regions in the memory, by which workers open them.
        user: The rollout that uses the buffer, whose attribute ``is_read`` tells whether its results were read; None
            before the first.
    """

    def __init__(self, layout: TrajectoryLayout, memory: RowMemory) -> None:
        self._memory = memory
        # None for regions that the layout does not need.
        self._regions: list[Region | None] = [None] * 3
        self.user: weakref.ref[Any] | None = None
        self._set_layout(layout)

    def add_room(self, layout: TrajectoryLayout) -> None:
        """Make room for actions and extras that only another layout has. Everything that was written stays.

        Raises:
            VectorEnvError: There is too little memory.
        """
        own = self.trajectory.layout
        self._set_layout(own._replace(action=own.action or layout.action, extras=own.extras or layout.extras))

    def _set_layout(self, layout: TrajectoryLayout) -> None:
        try:
            for index, size in enumerate(Trajectory(layout).sizes):
                if size and self._regions[index] is None:
                    self._regions[index] = Region(*self._memory.extend(size))
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            text = f"there is too little memory for {layout.steps} steps of a rollout ({error}): use fewer steps"
            raise VectorEnvError(text) from error
        self.places: RegionPlaces = tuple(region and region.place for region in self._regions)
        self.trajectory: Trajectory = Trajectory(layout, [region and region.content for region in self._regions])
        self.pickled_layout: bytes = pickle.dumps(layout, 5)

    @property
    def is_held(self) -> bool:
        """Whether the results of the rollout were not read, and somebody can still read them."""
        user = None if self.user is None else self.user()
        return user is not None and not user.is_read


class TrajectoryBuffers:
    """The trajectories of a vector.

    Args:
        memory: Memory of the vector.
    """

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        # The one that is used last comes last.
        self._buffers: list[TrajectoryBuffer] = []

    def take(self, layout: TrajectoryLayout) -> TrajectoryBuffer:
        """Return a buffer that no rollout uses, and that nobody else gets before it is used.

        Raises:
            VectorEnvError: There is too little memory.
        """
        # Without copies, a result is valid until the next rollout but one begins: the last buffer has to rest.
        for position, buffer in enumerate(self._buffers[:-1]):
            if buffer.trajectory.layout == layout and not buffer.is_held:
                return self._buffers.pop(position)
        return TrajectoryBuffer(layout, self._memory)

    def use(self, buffer: TrajectoryBuffer, user: Any) -> None:
        """Have a rollout begin with a buffer without steps; forget those of other layouts that nobody uses."""
        buffer.user = weakref.ref(user)
        buffer.trajectory.steps_done[:] = buffer.trajectory.steps_chosen[:] = 0
        layout = buffer.trajectory.layout
        kept = [other for other in self._buffers if other.is_held or other.trajectory.layout == layout]
        self._buffers = [*kept, buffer]


def pickle_parameters(parameters: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle parameters; return them without the contents of their arrays, and these.

    Raises:
        Exception: They cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(parameters, 5, buffer_callback=buffers.append)
    return pickled, [buffer.raw() for buffer in buffers]


class ParameterStore:
    """Keeps the parameters that the user gave last.

    Policies read arrays where they are in the shared memory. So parameters are never written over the last ones, nor
    over those of a rollout in flight.

    Args:
        memory: Shared memory of the vector.
        lock: The lock of the vector.
        in_flight: Returns the parameters of the rollouts in flight.

    Attributes:
        last: Parameters given last; None before the first.
    """

    def __init__(self, memory: RowMemory, lock: ChangeLock, in_flight: Callable[[], list[Parameters | None]]) -> None:
        self._memory = memory
        self._lock = lock
        self._in_flight = in_flight
        self._regions: list[Region] = []
        self.last: Parameters | None = None

    def write(self, pickled: bytes, arrays: Sequence[memoryview]) -> tuple[Parameters, Region | None]:
        """Write arrays into a region of the shared memory that nobody else gets before `record`.

        Args:
            pickled: The parameters, pickled without the contents of their arrays.
            arrays: These contents.

        Returns:
            The parameters, without a version, and the region; None without arrays.

        Raises:
            VectorEnvError: There is too little memory.
        """
        spans: list[tuple[int, int]] = []
        end = 0
        for array in arrays:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + array.nbytes
            spans.append((start, end))
        if not end:
            return Parameters(0, pickled, None, spans), None
        with self._lock:  # the loop may extend the memory, too
            region = self._take_region(end)
        for array, (start, stop) in zip(arrays, spans, strict=True):
            region.content[start:stop] = array
        self._memory.publish(region.place)
        return Parameters(0, pickled, region.place, spans), region

    def record(self, written: Parameters, region: Region | None) -> None:
        """Make parameters that `write` has returned the last ones. Call this under the lock."""
        if region is not None:
            self._regions.append(region)
        self.last = written._replace(version=1 if self.last is None else self.last.version + 1)

    def _take_region(self, size: int) -> Region:
        """Return a region that no policy reads."""
        places = [each.place for each in (self.last, *self._in_flight()) if each is not None]
        free = [region for region in self._regions if region.place not in places and region.place[1] >= size]
        self._regions = [region for region in self._regions if region.place in places]
        try:
            return free[0] if free else Region(*self._memory.extend(size))
        except (OSError, MemoryError) as error:
            text = f"there is too little memory for {size} bytes of parameters ({error}): use smaller ones"
            raise VectorEnvError(text) from error
