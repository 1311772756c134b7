"""Counts of steps and episodes per env, seeds of episodes, and the decision to recycle a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.slots import Autoreset, Slot, Slots
from envactors.actor.supervisor import Supervisor
from envactors.envs.selection import Selection
from envactors.options import RecyclePolicy


class Episodes:
    """Counts the steps and episodes of envs.

    Args:
        slots: All envs.
        supervisors: The actor of each env.
        recycle: Policy that replaces processes between episodes; None for never.

    Attributes:
        autoreset: What happens at the end of an episode.
        episodes: Number of episodes that have ended; int64, shape (n,).
    """

    def __init__(self, slots: Slots, supervisors: Sequence[Supervisor], recycle: RecyclePolicy | None) -> None:
        count = len(supervisors)
        self.autoreset: Autoreset = slots.autoreset
        # The steps of each env, without those of all envs together: a number takes a tenth of the time of an array.
        self._steps: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._steps_of_all = 0
        self.episodes: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        # Not the slots themselves: they refer to memory that is freed when the vector is closed.
        self._of = slots.of
        self._ended = slots.ended
        self._unusual = slots.unusual
        self._supervisors = supervisors
        self._recycle = recycle

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Number of steps of each env; int64, shape (n,)."""
        return self._steps + self._steps_of_all

    def add_steps(self, index: int, count: int) -> None:
        """Count steps of an env."""
        self._steps[index] += count

    def seed_episodes(self) -> None:
        """Seed each episode. Until the first seeded reset, the seeds are derived from a random one."""
        for slot, seed in zip(self._of, np.random.SeedSequence().generate_state(len(self._of)), strict=True):
            slot.root_seed = slot.next_seed = int(seed)

    def record_all(self, envs: Selection, terminated: Any, truncated: Any, resets: Sequence[int]) -> None:
        """Record one transition of several envs.

        Args:
            envs: The envs.
            terminated: Whether each episode ended; bool, shape (n,), in the user's order.
            truncated: Whether each episode was cut off; the same.
            resets: The envs whose transition was a reset.
        """
        if envs.index is None:
            self._steps_of_all += 1
        else:
            self._steps[envs.index] += 1
        for index in resets:
            self._steps[index] -= 1  # a reset does not count as a step
            self._ended[index] = False
            self._of[index].count_episode()
        if True in terminated.tobytes() or True in truncated.tobytes():
            for position in (terminated | truncated).nonzero()[0].tolist():
                index = envs.env_ids[position]
                self._ended[index] = self.autoreset == "next_step"
                self.end(self._of[index])

    def record(self, index: int, *, over: bool, reset: bool) -> None:
        """Record one transition of an env."""
        slot = self._of[index]
        self._steps[index] += not reset
        self._ended[index] = over and self.autoreset == "next_step"
        slot.needs_reset = False
        if slot.counted_in != slot.incarnation:
            self.begin_process(slot)
        if reset:
            slot.count_episode()
        if over:
            self.end(slot)

    def begin_process(self, slot: Slot) -> None:
        """Record that an env has moved to another process."""
        slot.counted_in = slot.incarnation
        slot.steps_before = int(self.steps[slot.index])
        slot.retiring = False  # the process to be replaced is gone

    def end(self, slot: Slot, count: int = 1) -> None:
        """Record the end of one or more episodes."""
        self.episodes[slot.index] += count
        if self.autoreset == "same_step":
            for _ in range(count):
                slot.count_episode()
        if self.autoreset == "disabled" and slot.strict:
            slot.needs_reset = True
            self._unusual.add(slot.index)
        if self._is_to_be_replaced(slot):
            slot.retiring = True
            self._unusual.add(slot.index)

    def _is_to_be_replaced(self, slot: Slot) -> bool:
        supervisor, policy = self._supervisors[slot.index], self._recycle
        process = supervisor.core.process
        if process is None:
            return False
        if process.worker.is_leaving and len(supervisor.config.start.factories) == 1:
            return True
        if policy is None:
            return False
        steps = int(self.steps[slot.index]) - slot.steps_before
        if policy.max_steps is not None and steps >= policy.max_steps:
            return True
        return policy.max_rss is not None and process.worker.resident_memory() > policy.max_rss
