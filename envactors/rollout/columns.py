"""The columns of one actor's envs in a trajectory, as the caller reads and writes them under the lock of the vector.

They begin with the last results in the rows of the envs. Completed steps are counted, which advances episodes and
journals. At the end the rows get the last results, as if steps had written them. So nothing else needs to know about
rollouts.
"""

from __future__ import annotations

import numpy as np

from envactors.mailbox.info_codec import PLAIN
from envactors.mailbox.slab import RESET as RESET_BIT
from envactors.rollout.memory import TrajectoryBuffer
from envactors.rollout.messages import EnvPlan
from envactors.rollout.trajectory import OP_REPEAT, OP_RESET, OP_STEP, OP_TRUNCATED, Trajectory
from envactors.vector.episodes import NEEDS_RESET, SEEDED
from envactors.vector.table import EnvTable


class ActorColumns:
    """The columns of one actor's envs in a trajectory.

    Args:
        table: The envs of the vector.
        envs: Indices of the actor's envs.
        buffer: The trajectory.

    Attributes:
        envs: As above.
        steps: Number of steps of the rollout.
        have_begun: Whether the rollout has begun to use them.
        counted: How many steps of each env are counted, by env.
        renewing: Envs that the next process resets within a step that has failed, as ``autoreset="same_step"`` demands.
        encoded_leaves: The object leaves of observations that no worker wrote, by (step, env).
        large_infos: Infos that did not fit into the trajectory, by cell.
    """

    def __init__(self, table: EnvTable, envs: range, buffer: TrajectoryBuffer) -> None:
        self.envs = envs
        self.steps: int = buffer.trajectory.layout.steps
        self.have_begun: bool = False
        self.counted: dict[int, int] = dict.fromkeys(envs, 0)
        self.renewing: set[int] = set()
        self.encoded_leaves: dict[tuple[int, int], bytes | None] = {}
        self.large_infos: dict[int, bytes] = {}
        self._table = table
        self._buffer = buffer
        self._slice = slice(envs.start, envs.stop)
        # How many steps the worker had completed when it missed a deadline, by position.
        self._done_in_time: list[int] | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The memory that the steps are written into."""
        return self._buffer.trajectory

    @property
    def next_step(self) -> int:
        """The first step that is not complete."""
        return min(self.counted.values())

    @property
    def are_chosen(self) -> bool:
        """Whether the policy has chosen the actions of the next step."""
        return int(self.trajectory.chosen[self.envs.start]) > self.next_step

    def begin(self) -> None:
        """Write the last observations of the envs as the first ones of the trajectory."""
        table, slab, trajectory, mine = self._table, self._table.slab, self.trajectory, self._slice
        self.have_begun = True
        trajectory.done[mine] = trajectory.chosen[mine] = 0
        trajectory.starts[0, mine] = table.starts(mine)
        for last, array in zip(slab.observations, trajectory.observations, strict=True):
            if array is not None and last is not None:
                array[0, mine] = last[table.buffer_index[mine], self.envs]
        if not trajectory.is_whole:
            self.encoded_leaves = {(0, index): table.last_infos[index] for index in self.envs}

    def end(self) -> None:
        """Write the last results of the envs into their rows; again after an interrupt."""
        table, slab, trajectory = self._table, self._table.slab, self.trajectory
        ids = [index for index, counted in self.counted.items() if counted]
        at = np.array([self.counted[index] for index in ids], np.int64)
        buffer = table.buffer_index[ids]
        for last, array in zip(slab.observations, trajectory.observations, strict=True):
            if array is not None and last is not None:
                last[buffer, ids] = array[at, ids]
        if slab.layout.reward is not None:
            slab.rewards[ids] = trajectory.rewards[at - 1, ids]
        slab.terminated[ids] = trajectory.terminated[at - 1, ids]
        slab.truncated[ids] = trajectory.truncated[at - 1, ids]
        table.ops[ids] = buffer | trajectory.starts[at, ids] * np.uint8(RESET_BIT)
        if self.encoded_leaves or table.on_failure != "raise":
            for index in ids:
                table.last_infos[index] = self.encoded_at(self.counted[index], index)

    def encoded_at(self, step: int, index: int) -> bytes | None:
        """Return the encoded info and object leaves of the observation before a step; None without any."""
        if step == 0 or (step, index) in self.encoded_leaves:
            return self.encoded_leaves.get((step, index))
        cell = (step - 1) * self.trajectory.layout.envs + index
        if self.trajectory.info_encoding[cell] == PLAIN:
            return None
        large = self.large_infos.get(cell)
        return bytes(self.trajectory.inline_info(cell)) if large is None else large

    # The next steps --------------------------------------------------------------------------------------

    def plan(self, index: int) -> EnvPlan:
        """Plan the next step of an env, and record its seed."""
        table, episodes = self._table, self._table.episodes
        resets, incarnation = self.resets_next(index), int(table.incarnations[index])
        table.seeds[index] = episodes.seed_of_reset(index, incarnation) if resets else episodes.next_seeds[index]
        root_seed = episodes.root_seeds[index] if episodes.flags[index] & SEEDED else None
        op = OP_RESET if resets else OP_REPEAT if self.repeats(index) else OP_STEP
        return EnvPlan(self.counted[index], op, table.seeds[index], root_seed, episodes.numbers[index])

    def resets_next(self, index: int) -> bool:
        """Return whether the next step of an env resets it."""
        return bool(self._table.episodes.resets_next_of[index]) or index in self.renewing

    def repeats(self, index: int) -> bool:
        """Return whether an env's episode is over and nothing resets it."""
        needs_reset = self._table.episodes.flags[index] & NEEDS_RESET
        return bool(needs_reset) and index not in self.renewing and self._table.autoreset == "disabled"

    def truncate(self, index: int) -> None:
        """Answer the next step of an env, which has failed, with its last observation."""
        step, trajectory = self.counted[index], self.trajectory
        trajectory.repeat_observation(step, index)
        if self.encoded_leaves:
            self.encoded_leaves[step + 1, index] = self.encoded_at(step, index)
        trajectory.terminated[step, index] = trajectory.starts[step + 1, index] = False
        trajectory.truncated[step, index] = True
        trajectory.ops[step, index] = OP_TRUNCATED
        trajectory.info_encoding[step * trajectory.layout.envs + index] = PLAIN
        self.counted[index] = trajectory.done[index] = step + 1

    # Counting --------------------------------------------------------------------------------------------

    def ignore_later(self) -> None:
        """Count no steps that the worker completes from now on, since it has missed a deadline."""
        self._done_in_time = self.trajectory.done[self._slice].tolist()

    def forget_later(self) -> None:
        """Forget the steps that are not counted: the worker that has missed a deadline has ended."""
        self._done_in_time = None
        self.trajectory.done[self._slice] = list(self.counted.values())
        chosen, first = self.trajectory.chosen, self.envs.start
        chosen[first] = min(int(chosen[first]), self.next_step + 1)

    def count(self) -> int:
        """Count the steps that the worker has completed; return how many are new."""
        trajectory, mine = self.trajectory, self._slice
        done, before = self._done_in_time, list(self.counted.values())
        if done is None:
            done = trajectory.done[mine].tolist()
        done = [min(max(new, old), self.steps) for new, old in zip(done, before, strict=True)]
        if done == before or not self.have_begun:
            return 0
        low, high = min(before), max(done)
        # As bytes, env by env, which are searched in a tenth of the time that short arrays take.
        all_ends = (trajectory.terminated[low:high, mine] | trajectory.truncated[low:high, mine]).T.tobytes()
        all_ops = trajectory.ops[low:high, mine].T.tobytes()
        for position, index in enumerate(self.envs):
            old, new = before[position], done[position]
            if new > old:
                at = position * (high - low) - low
                self._count_steps(index, old, new, all_ends[at + old : at + new], all_ops[at + old : at + new])
        return sum(done) - sum(before)

    def _count_steps(self, index: int, before: int, done: int, ends: bytes, ops: bytes) -> None:
        table, trajectory, episodes = self._table, self.trajectory, self._table.episodes
        if table.replays:
            self._record(index, before, ends, ops)
        has_reset = OP_RESET in ops or (table.autoreset == "same_step" and 1 in ends)
        if OP_REPEAT in ops:
            ends = bytes(end for end, op in zip(ends, ops, strict=True) if op != OP_REPEAT)
            ops = ops.replace(bytes([OP_REPEAT]), b"")
        if ops:
            episodes.record_many(index, ends, ops)
        if has_reset:
            table.seeds[index] = episodes.next_seeds[index]
        self.counted[index] = done
        if index in self.renewing:
            self.renewing.discard(index)
            trajectory.truncated[before, index] = True
            trajectory.ops[before, index] = OP_TRUNCATED

    def _record(self, index: int, before: int, ends: bytes, ops: bytes) -> None:
        """Record steps of an env in its journal, which a seeded reset begins anew."""
        table, trajectory, journal = self._table, self.trajectory, self._table.journals[index]
        seeds, within, start = trajectory.seeds[:, index], table.autoreset == "same_step", 0
        resets = (offset for offset, op in enumerate(ops) if op == OP_RESET or (within and ends[offset]))
        for offset in resets:
            if (seed := int(seeds[before + offset])) >= 0:
                journal.begin(seed, int(trajectory.checks[before + offset, index]))
                start = offset + 1
        steps = [before + offset for offset in range(start, len(ops)) if ops[offset] != OP_REPEAT]
        if not steps:
            return
        ops = ops[start:].replace(bytes([OP_REPEAT]), b"")
        if table.slab.layout.action is not None:
            actions = [array[steps, index].tobytes() for array in trajectory.actions]
            journal.record_steps(actions, ops, int(trajectory.checks[steps[-1], index]))
            return
        for step, op in zip(steps, ops, strict=True):
            check = int(trajectory.checks[step, index])
            if op == OP_RESET:
                journal.record_reset(check)
            else:
                action = trajectory.actions[0][step, index].copy()[()]
                journal.record_action(action, autoreset=within, check=check)
