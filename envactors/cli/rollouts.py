"""Plays episodes on all envs of a vector env at once, and watches the actors while they do."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.cli.reports import ActorRow, Fleet

Policy = npt.NDArray[np.float64]

# How long nothing may come before those that watch are told the time, in seconds.
_HEARTBEAT = 0.1
# Over how long steps per second are taken, in seconds.
_RATE_WINDOW = 1.5


class Episode(NamedTuple):
    """What is to be played.

    Attributes:
        policy: The weights of the observation; a positive sum is action 1, any other action 0.
        seed: The seed of the env.
    """

    policy: Policy
    seed: int


class OutOfTimeError(Exception):
    """Episodes were left unfinished because there is no time for them."""


class Rollouts:
    """Plays episodes: an env that ends one begins the next that waits, and none waits for another.

    An episode's return depends on its policy and seed alone.

    Args:
        envs: The envs, with autoreset disabled.
        watch: Called again and again while they play, with how many of the episodes are over and how many
            there are.

    Attributes:
        steps: The steps made so far.
    """

    def __init__(self, envs: ea.VectorEnv, watch: Callable[[int, int], None]) -> None:
        self.steps = 0
        self._envs = envs
        self._watch = watch
        self._playing: dict[int, _Run] = {}

    @property
    def num_envs(self) -> int:
        """How many envs play."""
        return self._envs.num_envs

    def play(self, episodes: Sequence[Episode], give_up: Callable[[], bool] | None = None) -> npt.NDArray[np.float64]:
        """Plays episodes.

        Args:
            episodes: What to play.
            give_up: Asked again and again whether to stop.

        Returns:
            Their returns, in their order.

        Raises:
            OutOfTimeError: ``give_up`` said so.
        """
        runs = [_Run(episode) for episode in episodes]
        waiting = deque(runs)
        self._begin(range(self._envs.num_envs), waiting)
        while self._playing:
            self._take_in(self._envs.recv(min_envs=1, timeout=_HEARTBEAT), waiting)
            self._watch(sum(run.is_over for run in runs), len(runs))
            if give_up is not None and give_up():
                self._abandon()
                raise OutOfTimeError
        return np.array([run.total for run in runs])

    def _begin(self, env_ids: Iterable[int], waiting: deque[_Run]) -> None:
        for env_id in env_ids:
            if not waiting:
                return
            run = self._playing[env_id] = waiting.popleft()
            # Without waiting, so that the others are not kept from theirs: `recv` hands the observation out.
            with contextlib.suppress(ea.VectorTimeoutError):
                obs, _ = self._envs.reset(seed=[run.episode.seed], env_ids=[env_id], timeout=0)
                self._act([env_id], obs)

    def _take_in(self, batch: ea.Batch, waiting: deque[_Run]) -> None:
        going_on, free = [], []
        for row, env_id in enumerate(batch.env_ids.tolist()):
            run = self._playing[env_id]
            run.note(batch.rewards[row], bool(batch.terminated[row] or batch.truncated[row]))
            if run.is_over:
                del self._playing[env_id]
                free.append(env_id)
            else:
                going_on.append(row)
        self._act(batch.env_ids[going_on].tolist(), batch.obs[going_on])
        self._begin(free, waiting)

    def _act(self, env_ids: list[int], observations: Any) -> None:
        if not env_ids:
            return
        # One product an env: a product of matrices may round differently with the number of its rows.
        actions = [
            int(self._playing[env_id].episode.policy @ obs > 0)
            for env_id, obs in zip(env_ids, observations, strict=True)
        ]
        self._envs.send(actions, env_ids)
        self.steps += len(actions)

    def _abandon(self) -> None:
        self._envs.recv()
        self._playing.clear()


class _Run:
    """An episode that is or will be played."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.total = 0.0
        self.is_over = False

    def note(self, reward: float, is_over: bool) -> None:
        self.total += reward
        self.is_over = is_over


class Monitor:
    """Watches the actors of a vector env, from the thread that uses it.

    Args:
        envs: The envs.
    """

    def __init__(self, envs: ea.VectorEnv) -> None:
        self._envs = envs
        self._started = time.monotonic()
        self._samples: deque[tuple[float, list[int]]] = deque([(self._started, envs.stats().steps)])

    def look(self) -> Fleet:
        """How the actors are now."""
        # The states first: they change while this function runs.
        states = [actor.state.value for actor in self._envs.actors]
        now, steps = time.monotonic(), self._envs.stats().steps
        rates = self._rates(now, steps)
        rows = [
            ActorRow(actor.name, state, actor.pid, actor.incarnation, count, rate)
            for actor, state, count, rate in zip(self._envs.actors, states, steps, rates, strict=True)
        ]
        return Fleet(now - self._started, rows)

    def _rates(self, now: float, steps: list[int]) -> list[float]:
        samples = self._samples
        samples.append((now, steps))
        while len(samples) > 2 and samples[1][0] <= now - _RATE_WINDOW:
            samples.popleft()
        since, then = samples[0]
        seconds = max(now - since, 1e-9)
        return [(after - before) / seconds for before, after in zip(then, steps, strict=True)]
