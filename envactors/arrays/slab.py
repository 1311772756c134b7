"""The memory that a vector env shares with its workers: observations, actions and flags, a row an env.

Every array has one writer a row: the parent for what is asked, the env's worker for what has come of it. An env's
observations are written into two rows in turn, so that the last complete one outlives a writer that is killed in the
middle of the next.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.arrays.specs import ArraySpec, Spec, leaves

# What is asked of an env, and what comes with its result.
STEP: Final = 0
RESET: Final = 1
PLAIN: Final = 0
RECORDED: Final = 1
NOTED: Final = 2
WITH_MAIL: Final = 3
FAILED: Final = 4

# What an env may note beside its result, in bytes: most infos are a fraction of it.
NOTE_ROOM: Final = 4096

# Processors fetch pairs of cache lines.
_ALIGNMENT = 128


class Layout(NamedTuple):
    """What a slab holds; the same on both sides.

    Attributes:
        observation: One env's observation; leaves that cannot be batched are not in the slab.
        action: One env's action, all of whose leaves can be batched.
        reward: One env's reward.
        envs: How many there are.
    """

    observation: Spec
    action: Spec
    reward: ArraySpec
    envs: int

    @property
    def size(self) -> int:
        """In bytes."""
        *_, (start, shape, dtype) = _places(self)
        return start + _bytes(shape, dtype)


class Slab:
    """The arrays of a layout over shared memory.

    Args:
        layout: The layout.
        memory: At least ``layout.size`` bytes, zeros at first.

    Attributes:
        asked: int64, shape (n,): the number of the last transition that was asked for. Its last bit says into which of
            an env's two rows the observation goes.
        done: int64, shape (n,): the number of the last one that is complete.
        when: float64, shape (n,): when it was (`time.monotonic`), where results are wanted one by one.
        what: uint8, shape (n,): `STEP` or `RESET`.
        extras: uint8, shape (n,): `PLAIN`, `RECORDED` for an info that stands in the notes as a record, `NOTED` for
            what stands there pickled, `WITH_MAIL` for what follows through the channel, or `FAILED`.
        notes: uint8, shape (n, `NOTE_ROOM`): what comes with a result besides arrays.
        note_rooms: The rows of ``notes``.
        noted: uint32, shape (n,): how many bytes of it there are.
        checks: uint32, shape (2, n): the checksum over an env's observations, where it is kept, in two rows as these.
        terminated: bool, shape (n,).
        truncated: bool, shape (n,).
        rewards: float64, shape (n,) and the reward's.
        actions: An array of shape (n, ...) for each leaf of the action spec.
        observations: An array of shape (2, n, ...) for each leaf of the observation spec, None for those that are
            not in the slab.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap) -> None:
        self.layout = layout
        arrays: Iterator[npt.NDArray[Any]] = (
            np.ndarray(shape, dtype, memory, start) for start, shape, dtype in _places(layout)
        )
        self.asked: npt.NDArray[np.int64] = next(arrays)
        self.done: npt.NDArray[np.int64] = next(arrays)
        self.when: npt.NDArray[np.float64] = next(arrays)
        self.what: npt.NDArray[np.uint8] = next(arrays)
        self.extras: npt.NDArray[np.uint8] = next(arrays)
        self.notes: npt.NDArray[np.uint8] = next(arrays)
        self.noted: npt.NDArray[np.uint32] = next(arrays)
        self.checks: npt.NDArray[np.uint32] = next(arrays)
        self.terminated: npt.NDArray[np.bool_] = next(arrays)
        self.truncated: npt.NDArray[np.bool_] = next(arrays)
        self.rewards: npt.NDArray[np.float64] = next(arrays)
        self.actions: list[npt.NDArray[Any]] = [next(arrays) for _ in leaves(layout.action)]
        self.observations: list[npt.NDArray[Any] | None] = [
            next(arrays) if leaf.batchable else None for leaf in leaves(layout.observation)
        ]
        # A row of an array takes four times as long to come by as one of these.
        self.note_rooms: list[memoryview] = [row.data for row in self.notes]
        self._noted = self.noted.data

    def note(self, env: int) -> memoryview:
        """What an env has noted beside its result."""
        return self.note_rooms[env][: self._noted[env]]


def _fields(layout: Layout) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
    n = layout.envs
    yield (n,), np.dtype(np.int64)
    yield (n,), np.dtype(np.int64)
    yield (n,), np.dtype(np.float64)
    yield (n,), np.dtype(np.uint8)
    yield (n,), np.dtype(np.uint8)
    yield (n, NOTE_ROOM), np.dtype(np.uint8)
    yield (n,), np.dtype(np.uint32)
    yield (2, n), np.dtype(np.uint32)
    yield (n,), np.dtype(np.bool_)
    yield (n,), np.dtype(np.bool_)
    yield (n, *layout.reward.shape), layout.reward.dtype
    for leaf in leaves(layout.action):
        yield (n, *leaf.shape), leaf.dtype
    for leaf in leaves(layout.observation):
        if leaf.batchable:
            yield (2, n, *leaf.shape), leaf.dtype


def _places(layout: Layout) -> Iterator[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Where each array begins."""
    start = 0
    for shape, dtype in _fields(layout):
        start = _aligned(start)
        yield start, shape, dtype
        start += _bytes(shape, dtype)


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
