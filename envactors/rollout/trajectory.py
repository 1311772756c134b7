"""Layout of the memory that a rollout is written into: time-major arrays that the caller and its workers share.

Each worker writes the columns of its envs, and ``done`` last: every step that it counts is complete, at whatever point
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

# Values of `Trajectory.ops`: what happened to an env in a step.
STEP: Final = 0
RESET: Final = 1  # the episode had ended, and the env was reset: its action was ignored
REPEAT: Final = 2  # the episode had ended, nothing reset the env, and the last observation was repeated
TRUNCATED: Final = 3  # the env failed, and its result is the last observation

# Bytes per encoded info; larger infos are sent in messages. Those of MuJoCo take about 500 bytes.
_INFO_ROOM = 1024
# Header of packed columns: the first step, and the step after the last one.
_RANGE = struct.Struct("<qq")


class TrajectoryLayout(NamedTuple):
    """Layout of a trajectory, the same in the caller and the workers.

    Attributes:
        observation: Spec of one env's observation; leaves that cannot be batched have no place in the trajectory.
        action: Spec of one env's action; None until it is learned from the first actions.
        reward: Spec of one env's reward; None if rewards are objects.
        extras: Names and specs, for one env, of what the policy returns besides the actions.
        envs: Number of envs.
        steps: Number of steps.
        is_learnt: Whether the envs have no observation space, so that ``observation`` follows from what they returned.
    """

    observation: Spec
    action: Spec | None
    reward: ArraySpec | None
    extras: tuple[tuple[str, ArraySpec], ...]
    envs: int
    steps: int
    is_learnt: bool


class ColumnsNote(NamedTuple):
    """Names the columns of a trajectory that a worker on another machine is about to write.

    Attributes:
        place: Place of the trajectory in the shared memory.
        layout: Pickled `TrajectoryLayout`.
        first, stop: Range of the worker's envs.
        start: First step.
    """

    place: tuple[int, int]
    layout: bytes
    first: int
    stop: int
    start: int


class Trajectory:
    """Arrays of a layout in shared memory.

    Args:
        layout: Layout of the trajectory.
        memory: Zeroed memory; None only to compute its size.

    Attributes:
        layout: Layout of the trajectory.
        pickled_layout: The pickled layout.
        size: Size of all arrays, in bytes.
        done: Number of complete steps of each env; int64, shape (n,).
        chosen: Number of steps that the policy has chosen actions for, at the first env of each worker; int64,
            shape (n,).
        ops: What happened to an env in a step, one of the values above; uint8, shape (t, n).
        flags: The flags below, which workers clear together; uint8, shape (5, t + 1, n): row ``step + 1`` is about a
            step and the observation after it.
        starts: Whether an observation is the first of its episode; bool, shape (t + 1, n).
        terminated, truncated: Ends of episodes; bool, shape (t, n).
        checks: Checksums over the observations of envs with a journal; uint32, shape (t, n).
        rewards: Rewards; float64, shape (t, n, *shape of the reward spec).
        actions, extras: Arrays of shape (t, n, ...), for each leaf of the action and each extra.
        observations: Arrays of shape (t + 1, n, ...), None for leaves that cannot be batched.
        is_whole: Whether all leaves of observations have a place.
        info_encoding, inline_info_sizes, inline_infos: As in `envactors.mailbox.slab.Slab`, with row ``step * n +
            env``.
    """

    def __init__(self, layout: TrajectoryLayout, memory: mmap.mmap | memoryview | None) -> None:
        self.layout = layout
        self.pickled_layout: bytes = pickle.dumps(layout, 5)
        n, t = layout.envs, layout.steps
        place = Places(memory)
        self.done: npt.NDArray[np.int64] = place((n,), np.int64)
        self.chosen: npt.NDArray[np.int64] = place((n,), np.int64)
        self.flags: npt.NDArray[np.uint8] = place((5, t + 1, n), np.uint8)
        self.starts: npt.NDArray[np.bool_] = self.flags[0].view(np.bool_)
        self.terminated: npt.NDArray[np.bool_] = self.flags[1, 1:].view(np.bool_)
        self.truncated: npt.NDArray[np.bool_] = self.flags[2, 1:].view(np.bool_)
        self.ops: npt.NDArray[np.uint8] = self.flags[3, 1:]
        self.info_encoding: npt.NDArray[np.uint8] = self.flags[4, 1:].reshape(-1)
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
        self.inline_info_sizes: npt.NDArray[np.uint32] = place((t * n,), np.uint32)
        self.inline_infos: npt.NDArray[np.uint8] = place((t * n, _INFO_ROOM), np.uint8)
        self.size: int = place.size

    def inline_info(self, row: int) -> memoryview:
        """Return the encoded info of a row."""
        return self.inline_infos[row, : self.inline_info_sizes[row]].data

    def begin(self, first: int, observations: Sequence[Any], starts: Sequence[bool]) -> None:
        """Begin the columns of consecutive envs with their last observations, as far as these have a place.

        Args:
            first: First env.
            observations: The last observation of each env.
            starts: Whether each is the first of its episode.
        """
        mine = slice(first, first + len(observations))
        self.done[mine] = 0
        self.chosen[mine] = 0
        self.starts[0, mine] = starts
        spec = self.layout.observation
        is_array = isinstance(spec, ArraySpec)
        columns = [observations] if is_array else zip(*(flatten(spec, obs) for obs in observations), strict=True)
        for array, column in zip(self.observations, columns, strict=True):
            if array is not None:
                array[0, mine] = column

    def write_observation(self, step: int, index: int, obs: Any) -> None:
        """Write the leaves of an env's observation that have a place."""
        for array, leaf in zip(self.observations, flatten(self.layout.observation, obs), strict=True):
            if array is not None:
                array[step, index] = leaf

    def objects_of(self, obs: Any) -> list[Any]:
        """Return the leaves of an observation that have no place in the trajectory."""
        pairs = zip(self.observations, flatten(self.layout.observation, obs), strict=True)
        return [leaf for array, leaf in pairs if array is None]

    def pack(self, first: int, stop: int, start: int, end: int | None = None) -> bytes:
        """Serialize the columns of some envs for another machine.

        Args:
            first: First env.
            stop: Env after the last one.
            start: First step.
            end: Step after the last one; None for everything that their worker has written.
        """
        if end is None:
            written = max(int(self.done[first:stop].max()), int(self.chosen[first]))
            end = min(max(start, written), self.layout.steps)
        content: list[bytes | memoryview] = [_RANGE.pack(start, end)]
        content += [block.tobytes() for block in self._blocks(first, stop, start, end)]
        content += [self.inline_info(row) for row in self._rows_with_infos(first, stop, start, end)]
        return b"".join(content)

    def unpack(self, first: int, stop: int, content: bytes | memoryview) -> None:
        """Write columns that `pack` serialized."""
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
        # Observations and starts have one row more: those before and those after each step.
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
        """Copy the columns of some envs from a trajectory that lacks the last arrays of this one."""
        steps = self.layout.steps
        pairs = zip(self._blocks(first, stop, 0, steps), other._blocks(first, stop, 0, steps), strict=False)
        for mine, theirs in pairs:
            mine[...] = theirs
        for row in self._rows_with_infos(first, stop, 0, steps):
            self.inline_info(row)[:] = other.inline_info(row)

    def columns(self, arrays: Sequence[npt.NDArray[Any] | None], first: int, stop: int) -> list[Any]:
        """Return the columns of some envs in each array; None where the array is None."""
        return [None if array is None else array[:, first:stop] for array in arrays]

    def action(self, step: int, env: int) -> Any:
        """Return the action that the policy chose for an env."""
        assert self.layout.action is not None, "the spec was learned"
        return unflatten(self.layout.action, iter([array[step, env].copy()[()] for array in self.actions]))


def size_of(layout: TrajectoryLayout) -> int:
    """Return the size of a trajectory, in bytes."""
    return Trajectory(layout, None).size
