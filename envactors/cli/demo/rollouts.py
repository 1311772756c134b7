"""Rollouts of the demo: play episodes on all envs of a vector env."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.cli.demo.faults import Fault, Injector

Policy = npt.NDArray[np.float64]

# Longest time between two calls of ``watch``, in seconds.
_WATCH_SECONDS = 0.1


class Episode(NamedTuple):
    """An episode to play.

    Attributes:
        policy: Weights of the observation; a positive weighted sum is action 1, any other action 0.
        seed: Seed of the env.
    """

    policy: Policy
    seed: int


class OutOfTimeError(Exception):
    """Raised when time runs out before all episodes are finished."""


class Rollouts:
    """Plays episodes. An env that finishes one starts the next at once, without waiting for other envs.

    An episode's return depends only on its policy and seed: where a worker fails, the vector env replays the episode in
    a new process.

    Args:
        envs: Vector env with ``autoreset="disabled"`` and ``on_failure="replay"``.
        injector: Injects the faults passed to `play`.
        watch: Called repeatedly with the number of finished episodes and the number of all.

    Attributes:
        steps: Steps of the finished episodes.
        busy_seconds: Time spent playing, without waits in which no result came.
        lost: Number of episodes that a failure has ended.
    """

    def __init__(self, envs: ea.VectorEnv, injector: Injector, watch: Callable[[int, int], None]) -> None:
        self.steps: int = 0
        self.busy_seconds: float = 0.0
        self.lost: int = 0
        self._envs = envs
        self._injector = injector
        self._watch = watch
        self._playing: dict[int, _Run] = {}

    @property
    def num_envs(self) -> int:
        """Number of envs."""
        return self._envs.num_envs

    def play(
        self,
        episodes: Sequence[Episode],
        give_up: Callable[[], bool],
        faults: Mapping[int, Fault] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Play episodes and return their returns.

        Args:
            episodes: Episodes to play.
            give_up: Called repeatedly; returns True to stop.
            faults: Faults by position of the episode.

        Returns:
            The returns, in the order of ``episodes``.

        Raises:
            OutOfTimeError: ``give_up`` returned True.
        """
        faults = faults or {}
        runs = [_Run(episode, faults.get(position)) for position, episode in enumerate(episodes)]
        waiting = deque(runs)
        for env_id in range(self._envs.num_envs):
            self._begin(env_id, waiting)
        while self._playing:
            wait_began = time.monotonic()
            batch = self._envs.recv(min_envs=1, timeout=_WATCH_SECONDS)
            self._take(batch, waiting)
            self._watch(sum(run.is_over for run in runs), len(runs))
            if len(batch.env_ids):
                self.busy_seconds += time.monotonic() - wait_began
            if give_up():
                self._playing.clear()
                self._envs.recv()  # what is pending, so that the envs can be used again
                raise OutOfTimeError
        return np.array([run.total for run in runs])

    def _begin(self, env_id: int, waiting: deque[_Run]) -> None:
        if not waiting:
            self._playing.pop(env_id, None)
            return
        run = self._playing[env_id] = waiting.popleft()
        self._inject(run, env_id)
        # Without waiting, so that other envs continue; `recv` delivers the observation.
        with contextlib.suppress(ea.VectorTimeoutError):
            obs, _ = self._envs.reset(seed=[run.episode.seed], env_ids=[env_id], timeout=0)
            self._act([env_id], obs)

    def _take(self, batch: ea.Batch, waiting: deque[_Run]) -> None:
        """Add results to their episodes, and send the next steps or begin the next episodes."""
        over = batch.terminated | batch.truncated
        continuing = np.flatnonzero(~over)
        for row, env_id in enumerate(batch.env_ids.tolist()):
            self._playing[env_id].total += batch.rewards[row]
        self._act(batch.env_ids[continuing].tolist(), batch.obs[continuing])
        for row in np.flatnonzero(over).tolist():
            env_id = int(batch.env_ids[row])
            run = self._playing[env_id]
            run.is_over = True
            self.steps += run.steps
            self.lost += "failure" in batch.infos[row]
            self._begin(env_id, waiting)

    def _act(self, env_ids: list[int], observations: Any) -> None:
        if not env_ids:
            return
        runs = [self._playing[env_id] for env_id in env_ids]
        # One product per env: the rounding of a matrix product can depend on its number of rows.
        actions = [int(run.episode.policy @ obs > 0) for run, obs in zip(runs, observations, strict=True)]
        for env_id, run in zip(env_ids, runs, strict=True):
            run.steps += 1
            self._inject(run, env_id)
        self._envs.send(actions, env_ids)

    def _inject(self, run: _Run, env_id: int) -> None:
        if run.fault is not None and run.fault.step == run.steps and self._injector.inject(run.fault, env_id):
            run.fault = None


class _Run:
    """State of an episode.

    Attributes:
        episode: The episode.
        fault: Fault that is still to be injected; None if there is none.
        total: Sum of the rewards so far.
        steps: Steps so far, a pending one included.
        is_over: True once the episode has ended.
    """

    def __init__(self, episode: Episode, fault: Fault | None) -> None:
        self.episode = episode
        self.fault = fault
        self.total = 0.0
        self.steps = 0
        self.is_over = False
