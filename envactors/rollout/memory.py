"""The memory that rollouts add to a vector: buffers for trajectories, and parameters of policies."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from envactors.actor.change import ChangeLock
from envactors.backends.base import MEMORY_ERRORS, RowMemory
from envactors.errors import VectorEnvError
from envactors.rollout.messages import Parameters
from envactors.rollout.trajectory import REGIONS, RegionPlaces, Trajectory, TrajectoryLayout

# Alignment of arrays in bytes: a pair of cache lines.
_ALIGNMENT = 128


class Region(NamedTuple):
    """A region of the memory of a vector, and its place there, by which workers open it."""

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
        get_hold: Returns the hold of the rollout that has taken the buffer last. None if there was none, or if it was
            freed: then no rollout writes to the buffer, and nobody reads results from it.
    """

    def __init__(self, layout: TrajectoryLayout, memory: RowMemory) -> None:
        self._memory = memory
        # None for regions that the layout does not need.
        self._regions: list[Region | None] = [None for _ in REGIONS]
        self.get_hold: Callable[[], object] = lambda: None
        self._set_layout(layout)

    def add_room(self, layout: TrajectoryLayout) -> None:
        """Make room for actions and extras that only another layout has. Everything that was written stays.

        Raises:
            VectorEnvError: There is too little memory.
        """
        own, actions = self.trajectory.layout, self.trajectory.actions
        self._set_layout(own._replace(action=own.action or layout.action, extras=own.extras or layout.extras))
        self.trajectory.actions = actions or self.trajectory.actions  # those without an array have no region

    def _set_layout(self, layout: TrajectoryLayout) -> None:
        regions = self._regions.copy()  # if there is room for some of them only, none is kept
        try:
            for index, size in enumerate(Trajectory(layout).sizes):  # without memory, it only computes them
                if size and regions[index] is None:
                    regions[index] = Region(*self._memory.extend(size))
        except MEMORY_ERRORS as error:
            text = f"there is too little memory for {layout.steps} steps of a rollout ({error}): use fewer steps"
            raise VectorEnvError(text) from error
        self._regions = regions
        self.places: RegionPlaces = tuple(region and region.place for region in regions)
        self.trajectory: Trajectory = Trajectory(layout, [region and region.content for region in regions])
        self.pickled_layout: bytes = pickle.dumps(layout, 5)


class BufferHold:
    """While this object is alive, its buffer is not reused: `TrajectoryBuffer.get_hold` is a weak reference to it."""


class TrajectoryBuffers:
    """The buffers of a vector, which its rollouts use in turns. Call the methods under the lock of the vector.

        free     nobody uses it
          │ take
        taken    a start writes nothing to it yet; if the start fails, the hold is freed, and so is the buffer
          │ begin
        last     begun with; its rollout writes to it, or has ended
          │ begin, of another buffer
        held     until the hold was freed; then it is free

    `begin` drops unused buffers of other layouts.

    Args:
        memory: Memory of the vector.
    """

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        self._buffers: list[TrajectoryBuffer] = []
        # The one that a rollout has begun with last; None before the first.
        self._last: TrajectoryBuffer | None = None

    def take(self, layout: TrajectoryLayout) -> tuple[TrajectoryBuffer, BufferHold]:
        """Return a free buffer, and the hold that keeps it for a rollout.

        Without copies, a result is valid until the next rollout but one begins, also after it was read. So the last
        buffer that a rollout has begun with is not free, even if nobody holds it.

        Raises:
            VectorEnvError: There is too little memory.
        """
        unused = [each for each in self._buffers if each is not self._last and each.get_hold() is None]
        buffer = next((each for each in unused if each.trajectory.layout == layout), None)
        if buffer is None:
            buffer = TrajectoryBuffer(layout, self._memory)
            self._buffers.append(buffer)
        hold = BufferHold()
        buffer.get_hold = weakref.ref(hold)
        return buffer, hold

    def begin(self, buffer: TrajectoryBuffer) -> None:
        """Have a rollout begin with a buffer that it has taken; drop those of other layouts that nobody holds."""
        layout = buffer.trajectory.layout
        buffer.trajectory.counts[:] = 0
        self._buffers = [each for each in self._buffers if each.get_hold() or each.trajectory.layout == layout]
        self._last = buffer


def pickle_parameters(parameters: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle parameters; return the bytes without the contents of arrays, and these contents.

    Raises:
        Exception: They cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(parameters, 5, buffer_callback=buffers.append)
    return pickled, [buffer.raw() for buffer in buffers]


class ParameterStore:
    """Keeps the parameters that the user gave last.

    Policies read arrays where they are in the shared memory. So nothing is written over the last parameters, nor over
    those of a rollout in flight. `write` takes a region out of the store, and `record` puts it back: meanwhile nobody
    else gets it, and if it is never recorded, it is freed.

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
        """Write arrays to a region of the shared memory.

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
        """Take a region that no policy reads out of the store, or make one; forget those that are too small."""
        places = [each.place for each in (self.last, *self._in_flight()) if each is not None]
        used = [region for region in self._regions if region.place in places]
        free = [region for region in self._regions if region.place not in places and region.place[1] >= size]
        try:
            region = free.pop() if free else Region(*self._memory.extend(size))
        except MEMORY_ERRORS as error:
            text = f"there is too little memory for {size} bytes of parameters ({error}): use smaller ones"
            raise VectorEnvError(text) from error
        self._regions = [*used, *free]
        return region
