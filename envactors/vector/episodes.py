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
        changes: Grows when an env goes in frames, needs a reset, or changes its process: then a prepared step has to
            look at its envs before it is used again.
    """

    def __init__(self, envs: Sequence[EnvState], autoreset: Autoreset, recycle: RecyclePolicy | None) -> None:
        count = len(envs)
        self.autoreset: Autoreset = autoreset
        self.ended = np.zeros(count, np.bool_)
        self.episodes = np.zeros(count, np.int64)
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
        if self.autoreset == "next_step":
            self.ended[index] = overs
        if overs.any():
            self._end(index[overs].tolist())

    def record(self, env_id: int, *, over: bool, reset: bool) -> None:
        """Record one transition of an env that was asked in a frame, and may have had no episode before."""
        self._steps[env_id] += not reset
        self.ended[env_id] = over and self.autoreset == "next_step"
        self._envs[env_id].needs_reset = False
        if over:
            self._end([env_id])

    def begin_process(self, env: EnvState) -> None:
        """Note that an env has gone over to another process."""
        env.steps_before = int(self._steps[env.env_id]) + self._rounds
        env.retiring = False  # the one that was to be replaced is gone

    def _end(self, env_ids: list[int]) -> None:
        """Record the ends of episodes."""
        for env_id in env_ids:
            env = self._envs[env_id]
            self.episodes[env_id] += 1
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
