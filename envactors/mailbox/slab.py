"""The memory that a vector env shares with its workers: observations, actions, and flags, one row per env.

Each row of an array has one writer: the parent writes requests, the env's worker writes results. Observations, their
checksums, rewards, and flags have two buffers. The parent chooses the one that a request writes to, so the last
complete result survives a worker that is killed while it writes the next one, and a result that comes too late. Who
allocates the memory, and what is sent in frames, is decided elsewhere.
"""

from __future__ import annotations

import math
import mmap
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.mailbox.specs import ArraySpec, Spec, leaves

# The bits of `Slab.ops`.
BUFFER: Final = 1  # which buffer the result is written to
RESET: Final = 2  # a reset; without this bit, a step
SEED: Final = 4  # the seed in the row is that of the reset, or of a reset within the step
PAYLOAD: Final = 8  # the action of the step, or the options of the reset, are in a payload
NO_AUTORESET: Final = 16  # an episode that ends is not reset within the step
RING: Final = 32  # the worker rings for the result, whatever else the caller waits for
STREAMED: Final = 64  # the request streams, so the worker records the time of the result in `Slab.when`

# No operation in the slab has the highest bit. It has a meaning in each of two arrays of the parent. These never mix:
# `LastRows` takes only operations that were posted, and a new operation keeps only `BUFFER` of the last one.
NOT_POSTED: Final = 128  # in `Rows.ops`, instead of an operation: the env has a new request, which is not posted yet
TRUNCATED: Final = 128  # in `LastRows.ops`: the last result is the answer to a failed step

# The spec of float rewards.
PLAIN_REWARD: Final = ArraySpec((), np.dtype(np.float64))
# Room per env for its info and object leaves, in bytes. Most infos take a fraction of it.
INLINE_INFO_ROOM: Final = 4096

# In bytes. Processors fetch cache lines in pairs: arrays with different writers must not share one.
_ALIGNMENT = 128


def slice_of(envs: range) -> slice:
    """Return the index of consecutive envs in arrays with one entry per env."""
    return slice(envs.start, envs.stop)


class Places:
    """Places arrays one after the other in memory.

    Args:
        memory: The memory, zeros at first; None only to compute the size.

    Attributes:
        size: The size of all arrays so far, in bytes.
    """

    def __init__(self, memory: mmap.mmap | bytearray | memoryview | None) -> None:
        self.size: int = 0
        self._memory = memory

    def __call__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size = start + math.prod(shape) * np.dtype(dtype).itemsize
        one = bytes(np.dtype(dtype).itemsize), 0, (0,) * len(shape)  # the same zeros for all elements
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, *(one if self._memory is None else (self._memory, start)))
        return array


class Layout(NamedTuple):
    """The contents of a slab, the same in the parent and the workers.

    Attributes:
        observation: One env's observation; leaves that cannot be batched are not in the slab.
        action: One env's action, all of whose leaves can be batched; None if actions are sent as payload.
        reward: One env's reward; None if rewards are objects.
        envs: The number of envs.
    """

    observation: Spec
    action: Spec | None
    reward: ArraySpec | None
    envs: int

    @property
    def size(self) -> int:
        """The slab's size in bytes."""
        return Slab(self, None).size


class Slab:
    """The arrays of a layout over shared memory.

    Args:
        layout: The layout.
        memory: At least ``layout.size`` bytes, zeros at first; None only to compute that size.

    Attributes:
        size: The size of all arrays, in bytes.
        posted_ids: int64, shape (n,): the call id of the last step or reset that the env was posted.
        written_ids: int64, shape (n,): the call id of the last one whose result is written.
        when: float64, shape (n,): when that was written (`time.monotonic`); written only with the bit `STREAMED`.
        ops: uint8, shape (n,): the posted operation, in the bits above.
        seeds: uint64, shape (n,): the seed of a reset.
        info_encoding: uint8, shape (n,): how a result's info and object leaves are encoded, and where they are; 0 for
            an empty info. `envactors.mailbox.info_codec` defines the values.
        inline_infos: uint8, shape (n, `INLINE_INFO_ROOM`): room for an encoded info.
        inline_info_rooms: The rows of ``inline_infos``.
        inline_info_sizes: uint32, shape (n,): how many bytes of that room are used.
        checksums: uint32, shape (2, n): those over the envs' observations. Used only if the envs have a journal.
        terminated: bool, shape (2, n).
        truncated: bool, shape (2, n).
        rewards: float64, shape (2, n) and the reward's; unused if rewards are objects.
        actions: An array of shape (n, ...) for each leaf of the action spec.
        observations: An array of shape (2, n, ...) for each leaf of the observation spec, None for a leaf that cannot
            be batched.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap | bytearray | memoryview | None) -> None:
        self.layout = layout
        n = layout.envs
        place = Places(memory)
        self.posted_ids: npt.NDArray[np.int64] = place((n,), np.int64)
        self.written_ids: npt.NDArray[np.int64] = place((n,), np.int64)
        self.when: npt.NDArray[np.float64] = place((n,), np.float64)
        self.ops: npt.NDArray[np.uint8] = place((n,), np.uint8)
        self.seeds: npt.NDArray[np.uint64] = place((n,), np.uint64)
        self.info_encoding: npt.NDArray[np.uint8] = place((n,), np.uint8)
        self.inline_infos: npt.NDArray[np.uint8] = place((n, INLINE_INFO_ROOM), np.uint8)
        self.inline_info_sizes: npt.NDArray[np.uint32] = place((n,), np.uint32)
        self.checksums: npt.NDArray[np.uint32] = place((2, n), np.uint32)
        self.terminated: npt.NDArray[np.bool_] = place((2, n), np.bool_)
        self.truncated: npt.NDArray[np.bool_] = place((2, n), np.bool_)
        reward = layout.reward or PLAIN_REWARD
        self.rewards: npt.NDArray[np.float64] = place((2, n, *reward.shape), reward.dtype)
        actions = [] if layout.action is None else leaves(layout.action)
        self.actions: list[npt.NDArray[Any]] = [place((n, *leaf.shape), leaf.dtype) for leaf in actions]
        self.observations: list[npt.NDArray[Any] | None] = [
            place((2, n, *leaf.shape), leaf.dtype) if leaf.batchable else None for leaf in leaves(layout.observation)
        ]
        self.size: int = place.size
        # Indexing an array takes four times as long as indexing this list.
        self.inline_info_rooms: list[memoryview] = [row.data for row in self.inline_infos]
        self._inline_info_sizes = self.inline_info_sizes.data

    def inline_info(self, env: int) -> memoryview:
        """Return the used part of an env's room."""
        return self.inline_info_rooms[env][: self._inline_info_sizes[env]]

    def ends_episode(self, env: int, op: int) -> bool:
        """Return whether an env's result of an operation ended the episode."""
        return bool(self.terminated[op & BUFFER, env] or self.truncated[op & BUFFER, env])
