"""The vector's side of rollouts: counts of steps and episodes, and the last result of each env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envactors.actor.handle import ActorView
from envactors.actor.slots import Slots
from envactors.backends.base import RowMemory
from envactors.mailbox.slab import RESET
from envactors.mailbox.specs import Spec
from envactors.rollout.rollouts import Rollouts
from envactors.vector.asking import Asker, EnvFuture, make_future
from envactors.vector.episodes import Episodes
from envactors.vector.pending import Pending
from envactors.vector.results import Batcher, EnvStep, RowReader


class RolloutBooks:
    """Implements `envactors.rollout.books.Books`.

    Args:
        handles: The handle of each env.
        slots: All envs.
        asker: Checks whether envs can step.
        pending: Results that were not delivered yet.
        episodes: Counts steps and episodes.
        reader: Stores the last result of each env.
        batcher: Knows the observation spec.
    """

    def __init__(
        self,
        handles: Sequence[ActorView],
        slots: Slots,
        asker: Asker,
        pending: Pending,
        episodes: Episodes,
        reader: RowReader,
        batcher: Batcher,
    ) -> None:
        self._handles = handles
        self._slots = slots
        self._asker = asker
        self._pending = pending
        self._episodes = episodes
        self._reader = reader
        self._batcher = batcher
        # By env: the number of its last post when its last rollout ended, and whether an episode began with that.
        self._starts: dict[int, tuple[int, bool]] = {}

    def make_rollouts(self, actors: Sequence[ActorView], memory: RowMemory) -> Rollouts:
        """Return a new object that runs the vector's rollouts."""
        supervisors = [actor._supervisor for actor in actors]
        return Rollouts(self._slots, supervisors, self, memory, copy=self._reader.copies)

    def check_steppable(self) -> None:
        self._asker.check_steppable(self._asker.all.env_ids)

    def make_future(self, index: int) -> EnvFuture:
        return make_future(self._handles[index], index, self._pending)

    def record(self, index: int, over: bytes, resets: bytes) -> None:
        self._episodes.record_column(index, over, resets)
        autoreset = self._slots.autoreset
        begins = bool(resets[-1]) or (bool(over[-1]) and autoreset == "same_step")
        self._starts[index] = self._slots.numbers_of[index], begins

    @property
    def observation_spec(self) -> Spec | None:
        return self._batcher.observation_spec

    def keep(self, index: int, obs: Any, reward: Any, *, terminated: bool, truncated: bool) -> None:
        incarnation = self._slots.of[index].incarnation
        self._reader.keep(EnvStep(index, obs, reward, terminated, truncated, {}, incarnation))

    def last_obs(self, index: int) -> Any:
        return self._reader.last_obs(index)

    def starts(self, index: int) -> bool:
        slots, slab = self._slots, self._slots.slab
        number, begins = self._starts.get(index, (-1, False))
        if number == slots.numbers_of[index]:
            return begins
        over = bool(slab.terminated[index] or slab.truncated[index])
        return bool(slots.ops[index] & RESET) or (over and slots.autoreset == "same_step")
