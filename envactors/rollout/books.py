"""What rollouts read and update of their vector: counts of steps and episodes, and the last result of each env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envactors.actor.handle import ActorView
from envactors.envs.core import EnvFuture, VectorCore
from envactors.envs.results import EnvStep
from envactors.mailbox.slab import RESET
from envactors.mailbox.specs import Spec


class Books:
    """The state of a vector, as far as rollouts know it.

    Args:
        vector: The vector.
        handles: The handle of each env.
    """

    def __init__(self, vector: VectorCore, handles: Sequence[ActorView]) -> None:
        self._vector = vector
        self._handles = handles
        self._slots = vector.slots
        # By env: the number of its last post when its last rollout ended, and whether an episode began with that.
        self._starts: dict[int, tuple[int, bool]] = {}

    def check_steppable(self) -> None:
        """Check that every env can step.

        Raises:
            VectorInputError: An env needs a reset first.
        """
        self._vector.check_steppable(range(len(self._slots.of)))

    def make_future(self, index: int) -> EnvFuture:
        """Return a future for a step that an env finishes in its row."""
        return self._vector.make_future(self._handles[index], index)

    def record(self, index: int, over: bytes, resets: bytes) -> None:
        """Record consecutive steps and resets of an env.

        Args:
            index: Index of the env.
            over: Whether each transition ended an episode, 0 or 1.
            resets: Whether each transition was a reset, 0 or 1.
        """
        episodes, slots = self._vector.episodes, self._slots
        slot, autoreset = slots.of[index], slots.autoreset
        if slot.counted_in != slot.incarnation:
            episodes.begin_process(slot)
        if slot.next_seed is not None:
            for _ in range(resets.count(1)):
                slot.count_episode()
        until_end = over.rfind(1) + 1
        slot.needs_reset = False
        if until_end:
            # Whether a process is to be replaced depends on the steps until the last end of an episode.
            episodes.add_steps(index, until_end - resets.count(1, 0, until_end))
            episodes.end(slot, over.count(1))
        episodes.add_steps(index, len(over) - until_end - resets.count(1, until_end))
        is_over = until_end == len(over)
        slots.ended[index] = is_over and autoreset == "next_step"
        if not is_over:
            slot.needs_reset = False
        begins = resets[-1] == 1 or (over[-1] == 1 and autoreset == "same_step")
        self._starts[index] = slots.numbers_of[index], begins

    @property
    def observation_spec(self) -> Spec | None:
        """Spec of one env's observation; None if the envs have no observation space and were never reset."""
        return self._vector.batcher.observation_spec

    def keep(self, index: int, obs: Any, reward: Any, *, terminated: bool, truncated: bool) -> None:
        """Store the last result of an env, which is not in its row."""
        incarnation = self._slots.of[index].incarnation
        self._vector.reader.keep(EnvStep(index, obs, reward, terminated, truncated, {}, incarnation))

    def last_obs(self, index: int) -> Any:
        """Return the last observation of an env."""
        return self._vector.reader.last_kept(index).obs

    def starts(self, index: int) -> bool:
        """Return whether the last observation of an env is the first of its episode."""
        slots, slab = self._slots, self._slots.slab
        number, begins = self._starts.get(index, (-1, False))
        if number == slots.numbers_of[index]:
            return begins
        over = bool(slab.terminated[index] or slab.truncated[index])
        return bool(slots.ops[index] & RESET) or (over and slots.autoreset == "same_step")
