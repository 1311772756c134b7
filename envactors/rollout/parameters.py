"""Parameters of a policy on their way to the workers, written once into memory that all workers map."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle

from envactors.backends.base import RowMemory
from envactors.rollout.orders import Parameters

# Alignment of arrays in bytes: a pair of cache lines.
_ALIGNMENT = 128


class ParameterStore:
    """Keeps the parameters that the user gave last.

    Parameters alternate between two parts of the memory, since workers may still be reading the previous ones.

    Args:
        memory: Shared memory of the vector.

    Attributes:
        last: Parameters given last; None before the first.
    """

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        self._parts: list[tuple[tuple[int, int], Any] | None] = [None, None]
        self.last: Parameters | None = None

    def give(self, parameters: Any) -> None:
        """Write arrays into the shared memory, and pickle the rest.

        Raises:
            OSError: There is not enough memory.
            Exception: The parameters cannot be pickled.
        """
        version = 1 if self.last is None else self.last.version + 1
        buffers: list[pickle.PickleBuffer] = []
        pickled = cloudpickle.dumps(parameters, 5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        spans: list[tuple[int, int]] = []
        end = 0
        for view in raw:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + view.nbytes
            spans.append((start, end))
        place = None
        if end:
            place, part = self._part(version % 2, end)
            for view, (start, stop) in zip(raw, spans, strict=True):
                part[start:stop] = view
            self._memory.publish(place)
        self.last = Parameters(version, pickled, place, spans)

    def _part(self, number: int, size: int) -> tuple[tuple[int, int], Any]:
        found = self._parts[number]
        if found is None or found[0][1] < size:
            found = self._parts[number] = self._memory.extend(size)
        return found
