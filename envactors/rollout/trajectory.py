"""The memory that a rollout is written into: time-major arrays that the caller and its workers share.

Each worker writes the columns of its envs. ``done`` is written last: every step that it counts is complete, wherever
the worker is killed.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.mailbox.info_codec import INLINE_INFO
from envactors.mailbox.slab import PLAIN_REWARD, Places
from envactors.mailbox.specs import ArraySpec, Spec, flatten, leaves, unflatten

# The values of `Trajectory.ops`: what became of an env in a step.
STEP: Final = 0
RESET: Final = 1  # the episode had ended, and the env was reset: its action was ignored
REPEAT: Final = 2  # the episode has ended, and nothing resets: the last observation again
STAND_IN: Final = 3  # its process was lost, and the last observation was returned again

# Room for an encoded info, in bytes; larger ones are sent beside. MuJoCo's take about 500.
_INFO_ROOM = 1024
# The first step of packed columns, and the one behind the last.
_RANGE = struct.Struct("<qq")


class TrajectoryLayout(NamedTuple):
    """The contents of a trajectory, the same in the caller and the workers.

    Attributes:
        observation: One env's observation; leaves that cannot be batched are not in the trajectory.
        action: One env's action; None if that is to be learnt from the first ones.
        reward: One env's reward; None if rewards are objects.
        extras: What the policy returns beside the actions, by name, for one env.
        envs: The number of envs.
        steps: The number of steps.
        is_learnt: Whether the envs have no observation space, so that it is what they have returned so far.
    """

    observation: Spec
    action: Spec | None
    reward: ArraySpec | None
    extras: tuple[tuple[str, ArraySpec], ...]
    envs: int
    steps: int
    is_learnt: bool


class ColumnsNote(NamedTuple):
    """Which columns of a trajectory a worker on another machine is about to write.

    Attributes:
        place: The place of the trajectory.
        layout: What it looks like: a pickled `TrajectoryLayout`.
        first, stop: The range of its envs.
        start: The first step.
    """

    place: tuple[int, int]
    layout: bytes
    first: int
    stop: int
    start: int


class _Rooms:
    """Slots of `_INFO_ROOM` bytes for infos; slices them on demand, as a list would take as much memory as the rest."""

    def __init__(self, rooms: npt.NDArray[np.uint8]) -> None:
        self._memory = rooms.data

    def __getitem__(self, row: int) -> memoryview:
        return self._memory[row * _INFO_ROOM : (row + 1) * _INFO_ROOM]


class Trajectory:
    """The arrays of a layout over shared memory.

    Args:
        layout: The layout.
        memory: The memory, zeros at first; None only to find out its size.

    Attributes:
        layout: As above.
        pickled_layout: The same, pickled.
        size: The size of all arrays, in bytes.
        done: int64, shape (n,): how many steps of each env are whole.
        chosen: int64, shape (n,): for how many steps the policy has chosen each env's action.
        ops: uint8, shape (t, n): what became of an env in a step.
        starts: bool, shape (t + 1, n): whether an observation is the first one of its episode.
        terminated, truncated: bool, shape (t, n).
        checks: uint32, shape (t, n): the checksums of envs that have a journal.
        rewards: float64, shape (t, n) and the reward's.
        actions, extras: Arrays of shape (t, n, ...), for each leaf of the action and each extra.
        observations: Arrays of shape (t + 1, n, ...), None for leaves that cannot be batched.
        is_whole: Whether all leaves of observations have a place.
        info_encoding, inline_info_sizes, inline_info_rooms: As those of a `envactors.mailbox.slab.Slab` that has a row
            for each env and step, step by step.
    """

    def __init__(self, layout: TrajectoryLayout, memory: mmap.mmap | memoryview | None) -> None:
        self.layout = layout
        self.pickled_layout: bytes = pickle.dumps(layout, 5)
        n, t = layout.envs, layout.steps
        place = Places(memory)
        self.done: npt.NDArray[np.int64] = place((n,), np.int64)
        self.chosen: npt.NDArray[np.int64] = place((n,), np.int64)
        self.ops: npt.NDArray[np.uint8] = place((t, n), np.uint8)
        self.starts: npt.NDArray[np.bool_] = place((t + 1, n), np.bool_)
        self.terminated: npt.NDArray[np.bool_] = place((t, n), np.bool_)
        self.truncated: npt.NDArray[np.bool_] = place((t, n), np.bool_)
        self.checks: npt.NDArray[np.uint32] = place((t, n), np.uint32)
        reward = layout.reward or PLAIN_REWARD
        self.rewards: npt.NDArray[np.float64] = place((t, n, *reward.shape), reward.dtype)
        actions = () if layout.action is None else leaves(layout.action)
        self.actions: list[npt.NDArray[Any]] = [place((t, n, *leaf.shape), leaf.dtype) for leaf in actions]
        self.extras: list[npt.NDArray[Any]] = [place((t, n, *spec.shape), spec.dtype) for _, spec in layout.extras]
        self.observations: list[npt.NDArray[Any] | None] = [
            place((t + 1, n, *leaf.shape), leaf.dtype) if leaf.batchable else None
            for leaf in leaves(layout.observation)
        ]
        self.is_whole: bool = all(array is not None for array in self.observations)
        self.info_encoding: npt.NDArray[np.uint8] = place((t * n,), np.uint8)
        self.inline_info_sizes: npt.NDArray[np.uint32] = place((t * n,), np.uint32)
        self.inline_info_rooms: _Rooms = _Rooms(place((t * n * _INFO_ROOM,), np.uint8))
        self.size: int = place.size

    def inline_info(self, row: int) -> memoryview:
        """Return the used part of the room of a row."""
        return self.inline_info_rooms[row][: self.inline_info_sizes[row]]

    def write_observation(self, step: int, index: int, obs: Any) -> None:
        """Write the leaves of an env's observation that have a place."""
        for array, leaf in zip(self.observations, flatten(self.layout.observation, obs), strict=True):
            if array is not None:
                array[step, index] = leaf

    def objects_of(self, obs: Any) -> list[Any]:
        """Return the leaves of an observation that have no place."""
        pairs = zip(self.observations, flatten(self.layout.observation, obs), strict=True)
        return [leaf for array, leaf in pairs if array is None]

    def pack(self, first: int, stop: int, start: int, end: int | None = None) -> bytes:
        """Return what the columns of some envs hold of the steps ``start`` to ``end``, for another machine.

        Without ``end``, it is all that their worker has written.
        """
        if end is None:
            written = max(int(self.done[first:stop].max()), int(self.chosen[first]))
            end = min(max(start, written), self.layout.steps)
        content: list[bytes | memoryview] = [_RANGE.pack(start, end)]
        content += [block.tobytes() for block in self._blocks(first, stop, start, end)]
        content += [self.inline_info(row) for row in self._rows_with_infos(first, stop, start, end)]
        return b"".join(content)

    def unpack(self, first: int, stop: int, content: bytes | memoryview) -> None:
        """Take over what `pack` has returned."""
        start, end = _RANGE.unpack_from(content)
        at = _RANGE.size
        for block in self._blocks(first, stop, start, end):
            block[...] = np.frombuffer(content, block.dtype, block.size, at).reshape(block.shape)
            at += block.nbytes
        for row in self._rows_with_infos(first, stop, start, end):
            room = self.inline_info(row)
            room[:] = content[at : at + len(room)]
            at += len(room)

    def _blocks(self, first: int, stop: int, start: int, end: int) -> list[npt.NDArray[Any]]:
        envs = self.layout.envs
        encodings, sizes = self.info_encoding.reshape(-1, envs), self.inline_info_sizes.reshape(-1, envs)
        flags = [self.ops, self.terminated, self.truncated, self.checks, self.rewards, encodings, sizes]
        # Observations, and whether they are the first ones, are there before a step and after it.
        later = [self.starts, *(array for array in self.observations if array is not None)]
        return [
            self.done[first:stop],
            self.chosen[first:stop],
            *(array[start : end + 1, first:stop] for array in later),
            *(array[start:end, first:stop] for array in (*flags, *self.actions, *self.extras)),
        ]

    def _rows_with_infos(self, first: int, stop: int, start: int, end: int) -> list[int]:
        rows = np.arange(start * self.layout.envs, end * self.layout.envs).reshape(-1, self.layout.envs)[:, first:stop]
        found: list[int] = rows[self.info_encoding[rows] == INLINE_INFO].tolist()
        return found

    def take_columns(self, other: Trajectory, first: int, stop: int) -> None:
        """Take over the columns of some envs from a trajectory that lacks the last arrays of this one."""
        steps = self.layout.steps
        pairs = zip(self._blocks(first, stop, 0, steps), other._blocks(first, stop, 0, steps), strict=False)
        for mine, theirs in pairs:
            mine[...] = theirs
        for row in self._rows_with_infos(first, stop, 0, steps):
            self.inline_info(row)[:] = other.inline_info(row)

    def columns(self, arrays: Sequence[npt.NDArray[Any] | None], first: int, stop: int) -> list[Any]:
        """Return the columns of some envs of arrays; None for those that are None."""
        return [None if array is None else array[:, first:stop] for array in arrays]

    def action(self, step: int, env: int) -> Any:
        """Return the action that was chosen for an env."""
        assert self.layout.action is not None, "it was learnt"
        return unflatten(self.layout.action, iter([array[step, env].copy()[()] for array in self.actions]))


def size_of(layout: TrajectoryLayout) -> int:
    """Return how many bytes a trajectory takes."""
    return Trajectory(layout, None).size
