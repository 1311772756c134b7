"""The memory that a vector env shares with its workers: observations, actions and flags, one row per env.

Each row of an array has one writer: the parent writes requests, the env's worker writes results. An env's observations
are written into two rows in turn, so that the last complete one survives a writer that is killed in the middle of the
next.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.arrays.specs import ArraySpec, Spec, leaves

# The operations of `Slab.ops`.
STEP: Final = 0
RESET: Final = 1

# Room per env for its info and object leaves, in bytes: most infos take a fraction of it.
INLINE_INFO_ROOM: Final = 4096

# In bytes. Processors fetch cache lines in pairs: arrays with different writers must not share one.
_ALIGNMENT = 128


class Layout(NamedTuple):
    """The contents of a slab, the same in the parent and the workers.

    Attributes:
        observation: One env's observation; leaves that cannot be batched are not in the slab.
        action: One env's action, all of whose leaves can be batched.
        reward: One env's reward.
        envs: The number of envs.
    """

    observation: Spec
    action: Spec
    reward: ArraySpec
    envs: int

    @property
    def size(self) -> int:
        """The slab's size in bytes."""
        *_, (start, shape, dtype) = _rows_of_envs(self)
        return start + _bytes(shape, dtype)


class Slab:
    """The arrays of a layout over shared memory.

    Args:
        layout: The layout.
        memory: At least ``layout.size`` bytes, zeros at first.

    Attributes:
        requested: int64, shape (n,): the number of the last requested transition. Its last bit selects the one of the
            env's two rows that the observation is written to.
        completed: int64, shape (n,): the number of the last complete transition.
        when: float64, shape (n,): when that was completed (`time.monotonic`); written only if results are streamed.
        ops: uint8, shape (n,): `STEP` or `RESET`.
        info_encoding: uint8, shape (n,): how a result's info and object leaves are encoded, and where they are; 0 for
            an empty info. The codes are those of `envactors.wire.info_codec`.
        inline_infos: uint8, shape (n, `INLINE_INFO_ROOM`): room for an encoded info.
        inline_info_rooms: The rows of ``inline_infos``.
        inline_info_sizes: uint32, shape (n,): how many bytes of that room are used.
        checks: uint32, shape (2, n): the checksums over the envs' observations, in two rows as the observations. Used
            only if the envs have a journal.
        terminated: bool, shape (n,).
        truncated: bool, shape (n,).
        rewards: float64, shape (n,) and the reward's.
        actions: An array of shape (n, ...) for each leaf of the action spec.
        observations: An array of shape (2, n, ...) for each leaf of the observation spec, None for a leaf that cannot
            be batched.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap | bytearray) -> None:
        self.layout = layout
        arrays: Iterator[npt.NDArray[Any]] = (
            np.ndarray(shape, dtype, memory, start) for start, shape, dtype in _rows_of_envs(layout)
        )
        self.requested: npt.NDArray[np.int64] = next(arrays)
        self.completed: npt.NDArray[np.int64] = next(arrays)
        self.when: npt.NDArray[np.float64] = next(arrays)
        self.ops: npt.NDArray[np.uint8] = next(arrays)
        self.info_encoding: npt.NDArray[np.uint8] = next(arrays)
        self.inline_infos: npt.NDArray[np.uint8] = next(arrays)
        self.inline_info_sizes: npt.NDArray[np.uint32] = next(arrays)
        self.checks: npt.NDArray[np.uint32] = next(arrays)
        self.terminated: npt.NDArray[np.bool_] = next(arrays)
        self.truncated: npt.NDArray[np.bool_] = next(arrays)
        self.rewards: npt.NDArray[np.float64] = next(arrays)
        self.actions: list[npt.NDArray[Any]] = [next(arrays) for _ in leaves(layout.action)]
        self.observations: list[npt.NDArray[Any] | None] = [
            next(arrays) if leaf.batchable else None for leaf in leaves(layout.observation)
        ]
        # Indexing an array takes four times as long as indexing this list.
        self.inline_info_rooms: list[memoryview] = [row.data for row in self.inline_infos]
        self._inline_info_sizes = self.inline_info_sizes.data

    def inline_info(self, env: int) -> memoryview:
        """Return the used part of an env's room."""
        return self.inline_info_rooms[env][: self._inline_info_sizes[env]]


def _fields(layout: Layout) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
    # In the order in which `Slab` declares them.
    n = layout.envs
    yield (n,), np.dtype(np.int64)
    yield (n,), np.dtype(np.int64)
    yield (n,), np.dtype(np.float64)
    yield (n,), np.dtype(np.uint8)
    yield (n,), np.dtype(np.uint8)
    yield (n, INLINE_INFO_ROOM), np.dtype(np.uint8)
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


def _rows_of_envs(layout: Layout) -> Iterator[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Yield the offset, the shape and the dtype of each array."""
    start = 0
    for shape, dtype in _fields(layout):
        start = _aligned(start)
        yield start, shape, dtype
        start += _bytes(shape, dtype)


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
