"""The bookkeeper of a vector: steps and episodes of each env, which of them resets next, when a process is too old."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.arrays.slab import RESET, Slab
from envactors.options import RecyclePolicy
from envactors.vector.env_state import EnvState
from envactors.vector.failure_policy import Autoreset
from envactors.wire.messages import episode_seed


class Episodes:
    """Counts what envs have done, and knows where their episodes stand.

    Args:
        envs: The envs.
        autoreset: What happens at the end of an episode.
        recycle: When a process is replaced between two episodes.

    Attributes:
        autoreset: What happens at the end of an episode.
        ended: bool, shape (n,): whether the next step of an env resets it, by autoreset.
        episodes: int64, shape (n,): how many episodes have ended.
        seeds: uint32, shape (n,): the seed of each env's next episode, in the rows that the workers read if there are
            any; None if episodes are not seeded.
        changes: Grows when an env goes in frames, needs a reset, or changes its process: then a prepared step has to
            look at its envs before it is used again.
    """

    def __init__(self, envs: Sequence[EnvState], autoreset: Autoreset, recycle: RecyclePolicy | None) -> None:
        count = len(envs)
        self.autoreset: Autoreset = autoreset
        self.ended = np.zeros(count, np.bool_)
        self.episodes = np.zeros(count, np.int64)
        self.seeds: npt.NDArray[np.uint32] | None = None
        self.changes = 0
        # Steps of each env, without those of full batches, which `_rounds` counts for all of them.
        self._steps = np.zeros(count, np.int64)
        self._rounds = 0
        self._envs = envs
        self._recycle = recycle
        self._none = bytes(count)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """int64, shape (n,): how many steps each env has made."""
        return self._steps + self._rounds

    def seed_episodes(self, rows: Slab | None) -> None:
        """Have each episode begin with a seed of its own, which stands in its row if there are rows.

        Until an env is reset with a seed, its episodes count from a random one.
        """
        seeds: npt.NDArray[Any] = np.random.SeedSequence().generate_state(len(self._envs))
        if rows is not None:
            rows.seeds[:], seeds = seeds, rows.seeds
        self.seeds = seeds
        for env in self._envs:
            env.root_seed = int(seeds[env.env_id])

    def next_seed(self, env_id: int) -> int | None:
        """Return the seed of an env's next episode; None if the env chooses."""
        seeds, env = self.seeds, self._envs[env_id]
        if seeds is None:
            return None
        return int(seeds[env_id]) if env.episode else env.root_seed

    def count_episode(self, env_id: int) -> None:
        """Count an episode that has begun, or could not: the next one has another seed."""
        seeds, env = self.seeds, self._envs[env_id]
        if seeds is not None and env.root_seed is not None:
            env.episode += 1
            seeds[env_id] = episode_seed(env.root_seed, env.episode)

    def record_all(self, terminated: Any, truncated: Any, resets: Any) -> None:
        """Record one transition of every env.

        Args:
            terminated: bool, shape (n,).
            truncated: bool, shape (n,).
            resets: bool, shape (n,): which of them were resets; None for none.
        """
        self._rounds += 1
        if resets is not None:
            self._steps -= resets  # a reset is no step
            if self.seeds is not None:
                self._count_episodes(np.flatnonzero(resets))
        if terminated.tobytes() != self._none or truncated.tobytes() != self._none:
            self._end(np.flatnonzero(terminated | truncated).tolist())
            if self.autoreset == "next_step":
                self.ended[...] = terminated | truncated
        elif resets is not None:
            self.ended[...] = False

    def record_rows(self, env_ids: Sequence[int] | npt.NDArray[np.int64], rows: Slab) -> None:
        """Record one transition of each of some envs, as it stands in the rows."""
        index = np.asarray(env_ids)
        overs = rows.terminated[index] | rows.truncated[index]
        self._steps[index] += rows.ops[index] != RESET
        if self.seeds is not None:
            self._count_episodes(index[rows.ops[index] == RESET])
        if self.autoreset == "next_step":
            self.ended[index] = overs
        if overs.any():
            self._end(index[overs].tolist())

    def record(self, env_id: int, *, over: bool, reset: bool) -> None:
        """Record one transition of an env that was asked in a frame, and may have had no episode before."""
        self._steps[env_id] += not reset
        self.ended[env_id] = over and self.autoreset == "next_step"
        self._envs[env_id].needs_reset = False
        if reset:
            self.count_episode(env_id)
        if over:
            self._end([env_id])

    def restore(self, env: EnvState, *, ended: bool) -> None:
        """Note that an env was put into another state: whether its next step is a reset, and its episode's number."""
        self.ended[env.env_id] = ended
        self.changes += 1
        if self.seeds is not None and env.root_seed is not None:
            self.seeds[env.env_id] = episode_seed(env.root_seed, env.episode)

    def resume(self, env: EnvState, *, steps: int, episodes: int) -> None:
        """Go on with the counts of an env that was written to a file."""
        self._steps[env.env_id] = steps - self._rounds
        self.episodes[env.env_id] = episodes
        self.begin_process(env)

    def begin_process(self, env: EnvState) -> None:
        """Note that an env has gone over to another process."""
        env.steps_before = int(self._steps[env.env_id]) + self._rounds
        env.retiring = False  # the one that was to be replaced is gone

    def _count_episodes(self, env_ids: npt.NDArray[np.intp]) -> None:
        for env_id in env_ids.tolist():
            self.count_episode(env_id)

    def _end(self, env_ids: list[int]) -> None:
        """Record the ends of episodes."""
        for env_id in env_ids:
            env = self._envs[env_id]
            self.episodes[env_id] += 1
            if self.seeds is not None and self.autoreset == "same_step":
                self.count_episode(env_id)
            if self.autoreset == "disabled" and env.strict:
                env.needs_reset = True
                self.changes += 1
            if self._is_to_be_replaced(env):
                env.retiring = True
                self.changes += 1

    def _is_to_be_replaced(self, env: EnvState) -> bool:
        process, policy = env.supervisor.core.process, self._recycle
        if process is not None and process.worker.is_leaving and env.is_alone:
            return True
        return policy is not None and self._is_too_old(env, policy)

    def _is_too_old(self, env: EnvState, policy: RecyclePolicy) -> bool:
        process, steps = env.supervisor.core.process, int(self._steps[env.env_id]) + self._rounds - env.steps_before
        too_many = policy.max_steps is not None and steps >= policy.max_steps
        limit = float("inf") if policy.max_rss is None else policy.max_rss
        return process is not None and (too_many or (limit < float("inf") and process.worker.resident_memory() > limit))
