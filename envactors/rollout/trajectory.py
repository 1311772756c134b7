"""The memory that a rollout is written into: time-major arrays that the caller and its workers share.

The observation after a step is the one before the next step, so observations have one row more than everything else:

    observations, starts                            [t] ──┐                 ┌──▶ [t + 1]
    actions, extras                                    policy ──▶ [t] ──┐   │
    rewards, terminated, truncated, kinds, checksums                   env ─┴──▶ [t]

Step ``t`` reads row ``t`` of the observations. The policy writes row ``t`` of the actions. The env writes row ``t`` of
the results, and row ``t + 1`` of the observations. ``starts[t]`` tells whether observation ``t`` begins an episode.

Each worker writes the steps of its envs, and counts a step in ``steps_complete`` once all of it is written. So every
counted step is complete, wherever the worker is killed.

A trajectory has three regions of memory. Those of actions and of extras come later if their specs are known only after
the first call of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.mailbox import packing
from envactors.mailbox.info_codec import PLAIN
from envactors.mailbox.slab import PLAIN_REWARD, Places, slice_of
from envactors.mailbox.specs import ArraySpec, Spec, leaves

# The regions of a trajectory.
REGIONS: Final = ("results", "actions", "extras")
# The places of a trajectory's regions in the memory of its vector; None for missing regions.
RegionPlaces: TypeAlias = "tuple[tuple[int, int] | None, ...]"

# Bytes per encoded info; larger infos are sent in messages. Those of MuJoCo take about 500 bytes.
_INFO_ROOM = 1024


class TrajectoryLayout(NamedTuple):
    """Layout of a trajectory, the same in the caller and the workers.

    Attributes:
        observation: Spec of one env's observation; leaves that cannot be batched have no array in the trajectory.
        action: Spec of one env's action; None until it is inferred from the first actions.
        reward: Spec of one env's reward; None if rewards are objects.
        extras: Names and specs, for one env, of what the policy returns besides the actions.
        num_envs: Number of envs.
        steps: Number of steps.
        inferred: Spec of one env's observation, inferred from a reset, if envs have no observation space. Then
            ``observation`` is one object. Otherwise None.
    """

    observation: Spec
    action: Spec | None
    reward: ArraySpec | None
    extras: tuple[tuple[str, ArraySpec], ...]
    num_envs: int
    steps: int
    inferred: Spec | None = None


class Trajectory:
    """Arrays of a layout in shared memory.

    Args:
        layout: Layout of the trajectory.
        regions: Memory for each of `REGIONS`; None for a region that the layout does not need. New memory is zeroed; a
            reused buffer keeps what earlier rollouts wrote. A trajectory without regions serves to compute ``sizes``.

    Attributes:
        layout: Layout of the trajectory.
        sizes: Size of each region in bytes; 0 for those that the layout does not need.
        counts: The numbers of complete and of chosen steps in one array; int64, shape (2, n).
        steps_complete: Number of complete steps of each env, also of repeats; int64, shape (n,).
        steps_chosen: Number of steps that a policy has written actions for, at the index of its first env; int64, shape
            (n,).
        flags: The five arrays of flags below in one, so that workers can clear them together; uint8, shape
            (5, t + 1, n). Row ``t + 1`` has the flags of step ``t`` and of the observation after it.
        starts: Whether an observation is the first of its episode; bool, shape (t + 1, n).
        terminated, truncated: Ends of episodes; bool, shape (t, n).
        kinds: The kind of each step, as in `envactors.rollout.env_plan`; uint8, shape (t, n).
        checksums: Checksums over the observations of envs with a journal; uint32, shape (t, n).
        rewards: Rewards; float64, shape (t, n, *shape of the reward spec).
        observations: Arrays of shape (t + 1, n, ...), None for leaves that cannot be batched.
        has_all_leaves: Whether no leaf of the observations is None.
        info_encoding, inline_info_sizes, inline_infos: As in `envactors.mailbox.slab.Slab`, by `cell`.
        actions, extras: Arrays of shape (t, n, ...), for each leaf of the action and each extra. Only in-process
            envs may have actions that cannot be batched.
    """

    def __init__(self, layout: TrajectoryLayout, regions: Iterable[Any] = (None,) * len(REGIONS)) -> None:
        self.layout = layout
        n, t = layout.num_envs, layout.steps
        add, add_action, add_extra = map(Places, regions)
        self.counts: npt.NDArray[np.int64] = add((2, n), np.int64)
        self.steps_complete: npt.NDArray[np.int64] = self.counts[0]
        self.steps_chosen: npt.NDArray[np.int64] = self.counts[1]
        self.flags: npt.NDArray[np.uint8] = add((5, t + 1, n), np.uint8)
        starts, terminated, truncated, kinds, info_encoding = self.flags
        self.starts: npt.NDArray[np.bool_] = starts.view(np.bool_)
        self.terminated: npt.NDArray[np.bool_] = terminated[1:].view(np.bool_)
        self.truncated: npt.NDArray[np.bool_] = truncated[1:].view(np.bool_)
        self.kinds: npt.NDArray[np.uint8] = kinds[1:]
        self.info_encoding: npt.NDArray[np.uint8] = info_encoding[1:].reshape(-1)
        self.checksums: npt.NDArray[np.uint32] = add((t, n), np.uint32)
        reward = layout.reward or PLAIN_REWARD
        self.rewards: npt.NDArray[np.float64] = add((t, n, *reward.shape), reward.dtype)
        self.observations: list[npt.NDArray[Any] | None] = [
            add((t + 1, n, *leaf.shape), leaf.dtype) if leaf.batchable else None for leaf in leaves(layout.observation)
        ]
        self.has_all_leaves: bool = all(array is not None for array in self.observations)
        self.inline_info_sizes: npt.NDArray[np.uint32] = add((t * n,), np.uint32)
        self.inline_infos: npt.NDArray[np.uint8] = add((t * n, _INFO_ROOM), np.uint8)
        actions = () if layout.action is None else leaves(layout.action)
        self.actions: list[npt.NDArray[Any]] = [
            add_action((t, n, *leaf.shape), leaf.dtype) if leaf.batchable else np.full((t, n), None, object)
            for leaf in actions
        ]
        self.extras: list[npt.NDArray[Any]] = [add_extra((t, n, *spec.shape), spec.dtype) for _, spec in layout.extras]
        # Arrays without elements need a region, too.
        self.sizes: list[int] = [add.size, add_action.size or len(self.actions), add_extra.size or len(self.extras)]

    def cell(self, step: int, index: int) -> int:
        """Return the cell of a step of an env: its position in the arrays of infos, which are flat."""
        return step * self.layout.num_envs + index

    def inline_info(self, cell: int) -> memoryview:
        """Return the encoded info of a cell."""
        return self.inline_infos[cell, : self.inline_info_sizes[cell]].data

    def steps_with_infos(self, indices: range, start: int, end: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the steps, among some envs and steps, that have an encoded info, and the env of each."""
        encodings = self.info_encoding.reshape(-1, self.layout.num_envs)[start:end, slice_of(indices)]
        steps, positions = (encodings != PLAIN).nonzero()
        return steps + start, positions + indices.start

    def repeat_observation(self, step: int, index: int) -> None:
        """Write the observation before a step of an env once more after it, with reward 0."""
        for array in self.observations:
            if array is not None:
                array[step + 1, index] = array[step, index]
        self.rewards[step, index] = 0

    def clear_incomplete(self, indices: range) -> None:
        """Clear the steps of an actor's envs that have not run: the memory may have those of an earlier rollout."""
        for array in (*self.actions, *self.extras):
            array[self.steps_chosen[indices.start] :, slice_of(indices)] = 0
        with_first_row = [array for array in (*self.flags, *self.observations) if array is not None]
        for index in indices:
            complete = int(self.steps_complete[index])
            self.rewards[complete:, index] = 0
            for array in with_first_row:
                array[complete + 1 :, index] = 0

    def pack(self, indices: range, start: int) -> bytearray:
        """Serialize the steps of an actor's envs for another machine, from one step on, as far as they are written."""
        written = max(int(self.steps_complete[slice_of(indices)].max()), int(self.steps_chosen[indices.start]))
        end = min(max(start, written), self.layout.steps)
        blocks = ((0, block.tobytes()) for block in self._blocks(indices, start, end))
        return packing.pack([(start, b""), (end, b""), *blocks])

    def unpack(self, indices: range, content: bytes | memoryview) -> None:
        """Write steps that `pack` serialized."""
        (start, _), (end, _), *parts = packing.unpack(content)
        # The sender may have had no room for actions or extras: see `_blocks`.
        for block, (_, part) in zip(self._blocks(indices, start, end), parts, strict=False):
            block[...] = np.ndarray(block.shape, block.dtype, part)

    def _blocks(self, indices: range, start: int, end: int) -> Iterator[npt.NDArray[Any]]:
        """Yield some envs and steps of each array.

        Infos come after their sizes, which `unpack` must write first. Extras come last, since only the layout of the
        caller may have them: it adds room for those of one worker while another runs. Likewise for inferred actions,
        although they come before the infos: a worker without room for them has run no step, and sends no infos.
        """
        mine = slice_of(indices)
        info_sizes = self.inline_info_sizes.reshape(-1, self.layout.num_envs)
        per_step: list[npt.NDArray[Any]] = [self.checksums, self.rewards, info_sizes, *self.actions]
        yield from (self.counts[:, mine], self.flags[:, start : end + 1, mine])
        yield from (array[start : end + 1, mine] for array in self.observations if array is not None)
        yield from (array[start:end, mine] for array in per_step)
        for step, index in zip(*self.steps_with_infos(indices, start, end), strict=True):
            cell = self.cell(step, index)
            yield self.inline_infos[cell, : self.inline_info_sizes[cell]]
        yield from (array[start:end, mine] for array in self.extras)
