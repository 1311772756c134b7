"""One actor's share of a trajectory, as the caller reads and writes it under the lock of the vector.

It begins with the last results in the rows of the envs. Accepting completed steps advances episodes and journals. At
the end the rows get the last results, as if steps had written them. So `envactors.vector` knows only this of rollouts:

- `EnvTable` records how many are in flight, and which process has the current order. `RowEngine` refuses steps
  meanwhile, and resets wait.
- `EnvRecovery` reads no observations from rows meanwhile, since the rows are behind.
- `EnvGroup` ends the parts of its actor after an interrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.info_codec import PLAIN
from envactors.mailbox.slab import slice_of
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import EnvPlan
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET, OP_STEP, OP_TRUNCATED, Trajectory
from envactors.vector.table import EnvTable


class ActorTrajectory:
    """The share of one actor's envs in a trajectory.

    Args:
        table: The envs of the vector.
        envs: Indices of the actor's envs.
        buffer: The trajectory.

    Attributes:
        envs: As above.
        steps: Number of steps of the rollout.
        has_begun: Whether the rollout has begun to use it.
        accepted: How many steps of each env are accepted, by env.
        incarnations: The ``incarnation`` of each env's last result, by env; see `envactors.vector.results.EnvStep`.
        seeds: The seed of the reset that each env may run in its next step, by env.
        reset_after_failure: Envs that the next process resets within a step that has failed, as
            ``autoreset="same_step"`` demands.
        encoded_leaves: The encoded info and object leaves of observations that no worker wrote, by env and the step
            after the observation; None without any.
        large_infos: Encoded infos, with object leaves, that did not fit into the trajectory, by cell.
    """

    def __init__(self, table: EnvTable, envs: range, buffer: TrajectoryBuffer) -> None:
        self.envs = envs
        self.steps: int = buffer.trajectory.layout.steps
        self.has_begun: bool = False
        self.accepted: dict[int, int] = dict.fromkeys(envs, 0)
        self.incarnations: dict[int, int] = dict.fromkeys(envs, 0)
        self.seeds: dict[int, int | None] = dict.fromkeys(envs)
        self.reset_after_failure: set[int] = set()
        self.encoded_leaves: dict[tuple[int, int], bytes | None] = {}
        self.large_infos: dict[int, bytes] = {}
        self._table = table
        self._buffer = buffer
        self._slice = slice_of(envs)
        # How many steps of each env were complete when the worker missed a deadline; None if it has missed none.
        self._done_in_time: list[int] | None = None

    @property
    def arrays(self) -> Trajectory:
        """The memory that the steps of all actors are written into."""
        return self._buffer.trajectory

    @property
    def next_step(self) -> int:
        """The first step that is not complete."""
        return min(self.accepted.values())

    @property
    def has_next_actions(self) -> bool:
        """Whether the policy has chosen the actions of the next step."""
        return int(self.arrays.steps_chosen[self.envs.start]) > self.next_step

    def begin(self) -> None:
        """Write the last observations of the envs as the first ones of the trajectory."""
        table, arrays, mine = self._table, self.arrays, self._slice
        self.has_begun = True
        arrays.starts[0, mine] = table.last.are_first(mine)
        for last, array in self._observations():
            array[0, mine] = last[table.last.buffers(mine), self.envs]
        if not arrays.is_whole:
            self.encoded_leaves = {(0, index): table.last.contents[index] for index in self.envs}

    def end(self) -> None:
        """Write the last results of the envs into their rows; again after an interrupt."""
        table, slab, arrays = self._table, self._table.slab, self.arrays
        ids = [index for index, accepted in self.accepted.items() if accepted]
        at = np.array([self.accepted[index] for index in ids], np.int64)
        buffer = table.last.buffers(ids)
        for last, array in self._observations():
            last[buffer, ids] = array[at, ids]
        if slab.layout.reward is not None:
            slab.rewards[buffer, ids] = arrays.rewards[at - 1, ids]
        slab.terminated[buffer, ids] = arrays.terminated[at - 1, ids]
        slab.truncated[buffer, ids] = arrays.truncated[at - 1, ids]
        for index, is_first in zip(ids, arrays.starts[at, ids].tolist(), strict=True):
            content = self._encoded_at(self.accepted[index], index)
            table.last.record(index, content, self.incarnations[index], is_first=is_first)

    def _observations(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield the array in the rows, and the one in the trajectory, of each leaf that has both."""
        for last, array in zip(self._table.slab.observations, self.arrays.observations, strict=True):
            if last is not None and array is not None:
                yield last, array

    def last_leaves(self) -> list[bytes | None]:
        """Return the encoded info and object leaves of each env's last observation; empty if all have arrays."""
        if self.arrays.is_whole:
            return []
        return [self._encoded_at(accepted, index) for index, accepted in self.accepted.items()]

    def _encoded_at(self, step: int, index: int) -> bytes | None:
        """Return the encoded info and object leaves of the observation before a step; None without any."""
        if step == 0 or (step, index) in self.encoded_leaves:
            return self.encoded_leaves.get((step, index))
        cell = (step - 1) * self.arrays.layout.envs + index
        if self.arrays.info_encoding[cell] == PLAIN:
            return None
        large = self.large_infos.get(cell)
        return bytes(self.arrays.inline_info(cell)) if large is None else large

    # The next steps --------------------------------------------------------------------------------------

    def plan_next(self, index: int) -> EnvPlan:
        """Return the plan of the next step of an env."""
        table, episodes = self._table, self._table.episodes
        op, seed = OP_STEP, episodes.next_seeds[index]
        if self.resets_next(index):
            op, seed = OP_RESET, episodes.seed_of_reset(index, table.incarnations[index])
        elif self.repeats(index):
            op = OP_REPEAT
        return EnvPlan(
            first_step=self.accepted[index],
            op=op,
            seed=seed,
            root_seed=None if episodes.next_seeds[index] is None else episodes.root_seeds[index],
            episode=episodes.numbers[index],
        )

    def resets_next(self, index: int) -> bool:
        """Return whether the next step of an env resets it."""
        return bool(self._table.episodes.resets_next[index]) or index in self.reset_after_failure

    def repeats(self, index: int) -> bool:
        """Return whether an env's episode is over and nothing resets it."""
        episodes = self._table.episodes
        is_over = episodes.autoreset.needs_reset_after_end and episodes.needs_reset(index)
        return is_over and index not in self.reset_after_failure

    def truncate(self, index: int, incarnation: int) -> None:
        """Answer the next step of an env, which has failed, with its last observation.

        The env continues in the process with that incarnation.
        """
        step, arrays = self.accepted[index], self.arrays
        arrays.repeat_observation(step, index)
        if not arrays.is_whole:
            self.encoded_leaves[step + 1, index] = self._encoded_at(step, index)
        arrays.terminated[step, index] = False
        arrays.truncated[step, index] = True
        arrays.starts[step + 1, index] = False
        arrays.ops[step, index] = OP_TRUNCATED
        arrays.info_encoding[step * arrays.layout.envs + index] = PLAIN
        arrays.steps_done[index] = step + 1
        self.accepted[index] = step + 1
        self.incarnations[index] = incarnation

    # Accepting steps -------------------------------------------------------------------------------------

    def freeze_progress(self) -> None:
        """Accept no steps that the worker completes from now on, since it has missed a deadline."""
        self._done_in_time = self.arrays.steps_done[self._slice].tolist()

    def drop_unaccepted(self) -> None:
        """Forget the steps that are not accepted: the worker that has missed a deadline has ended."""
        steps_chosen, first = self.arrays.steps_chosen, self.envs.start
        self._done_in_time = None
        self.arrays.steps_done[self._slice] = list(self.accepted.values())
        steps_chosen[first] = min(int(steps_chosen[first]), self.next_step + 1)

    def accept_completed(self) -> int:
        """Record the steps that the worker has completed in episodes and journals; return how many are new."""
        arrays, mine = self.arrays, self._slice
        if not self.has_begun:
            return 0
        before = list(self.accepted.values())
        reported: list[int] = arrays.steps_done[mine].tolist() if self._done_in_time is None else self._done_in_time
        after = [min(max(new, old), self.steps) for new, old in zip(reported, before, strict=True)]
        if after == before:
            return 0
        low, high = min(before), max(after)
        # One row of bytes per env: slices of bytes are searched in a tenth of the time that short arrays take.
        all_ends = (arrays.terminated[low:high, mine] | arrays.truncated[low:high, mine]).T.tobytes()
        all_ops = arrays.ops[low:high, mine].T.tobytes()
        for position, index in enumerate(self.envs):
            old, new = before[position], after[position]
            if new > old:
                at = position * (high - low) - low
                self._accept_steps(index, old, all_ends[at + old : at + new], all_ops[at + old : at + new])
                if index in self.reset_after_failure:
                    self.reset_after_failure.discard(index)
                    self._mark_truncated(index, old)
        return sum(after) - sum(before)

    def _accept_steps(self, index: int, first: int, ends: bytes, ops: bytes) -> None:
        """Record steps of an env in its episode and journal.

        Args:
            index: The env.
            first: The first of these steps.
            ends: Whether each has ended an episode.
            ops: What happened in each.
        """
        table, episodes = self._table, self._table.episodes
        if table.keeps_journals:
            self._record(index, first, ends, ops)
        resets = _resets_in(ops)
        if resets:
            episodes.record_sequence(index, _without_repeats(ends, ops), resets)
        if OP_RESET in ops or (table.attach.resets_within_step and 1 in ends):
            self.seeds[index] = episodes.next_seeds[index]
        self.accepted[index] = first + len(ops)
        self.incarnations[index] = table.posted_in[index]

    def _record(self, index: int, first: int, ends: bytes, ops: bytes) -> None:
        """Record steps of an env in its journal, which a seeded reset begins anew."""
        table, arrays, journal = self._table, self.arrays, self._table.journal(index)
        resets_within_step = table.attach.resets_within_step
        begin = 0
        for offset, op in enumerate(ops):
            if op == OP_RESET or (resets_within_step and ends[offset]):
                seed = int(arrays.seeds[first + offset, index])
                if seed >= 0:
                    journal.begin(seed, int(arrays.checks[first + offset, index]))
                    begin = offset + 1
        steps = [first + offset for offset in range(begin, len(ops)) if ops[offset] != OP_REPEAT]
        if not steps:
            return
        resets = _resets_in(ops[begin:])
        if table.slab.layout.action is not None:
            actions = [array[steps, index].tobytes() for array in arrays.actions]
            journal.record_steps(actions, resets, int(arrays.checks[steps[-1], index]))
            return
        for step, is_reset in zip(steps, resets, strict=True):
            check = int(arrays.checks[step, index])
            if is_reset:
                journal.record_reset(check)
            else:
                action = arrays.actions[0][step, index].copy()[()]
                journal.record_action(action, resets_within_step=resets_within_step, check=check)

    def _mark_truncated(self, index: int, step: int) -> None:
        """Mark a step that had failed, and in which the next process has reset the env, as truncated."""
        self.arrays.truncated[step, index] = True
        self.arrays.ops[step, index] = OP_TRUNCATED


def _resets_in(ops: bytes) -> bytes:
    """Return for each step that is no repeat whether it is a reset: `OP_RESET` is 1, and `OP_STEP` 0."""
    return _without_repeats(ops, ops)


def _without_repeats(values: bytes, ops: bytes) -> bytes:
    """Return the values of those steps in which an env has been stepped or reset."""
    if OP_REPEAT not in ops:
        return values
    return bytes(value for value, op in zip(values, ops, strict=True) if op != OP_REPEAT)
