"""Rollouts of the demo: play episodes on all envs of a vector env, and watch its actors."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.cli.demo.faults import RESET_DEADLINE, Fault, Injector, short
from envactors.cli.demo.reports import ActorRow, Fleet

Policy = npt.NDArray[np.float64]

# Longest time between two calls of ``watch``, in seconds.
_WATCH_SECONDS = 0.1
# Time to wait for pending results when episodes are abandoned; enough for the slowest reset.
_PATIENCE = RESET_DEADLINE
# Period over which steps per second are computed, in seconds.
_RATE_WINDOW = 1.5


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

    An episode's return depends only on its policy and seed. If a failure interrupts it, it is played again from its
    seed; only the steps of the complete run are counted.

    Args:
        envs: Vector env with ``autoreset="disabled"`` and ``on_failure="renew"``.
        injector: Injects the faults passed to `play`.
        watch: Called repeatedly with the number of finished episodes and the number of all.

    Attributes:
        steps: Steps of the finished episodes.
        busy_seconds: Time spent playing, without waits in which no result came.
        repeated: Number of interrupted episodes that were started again.
        lost: Number of episodes that were neither finished nor abandoned.
    """

    def __init__(self, envs: ea.VectorEnv, injector: Injector, watch: Callable[[int, int], None]) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self.repeated = 0
        self._asked = self._delivered = self._given_up = 0
        self._envs = envs
        self._injector = injector
        self._watch = watch
        self._playing: dict[int, _Run] = {}

    @property
    def num_envs(self) -> int:
        """Number of envs."""
        return self._envs.num_envs

    @property
    def lost(self) -> int:
        return self._asked - self._delivered - self._given_up

    def play(
        self,
        episodes: Sequence[Episode],
        give_up: Callable[[], bool] | None = None,
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
        self._asked += len(runs)
        waiting = deque(runs)
        self._begin(range(self._envs.num_envs), waiting)
        while self._playing:
            wait_began = time.monotonic()
            batch = self._envs.recv(min_envs=1, timeout=_WATCH_SECONDS)
            self._process_batch(batch, waiting)
            self._watch(sum(run.is_over for run in runs), len(runs))
            if len(batch.env_ids):
                self.busy_seconds += time.monotonic() - wait_began
            if give_up is not None and give_up():
                self._abandon(waiting)
                raise OutOfTimeError
        return np.array([run.total for run in runs])

    def _begin(self, env_ids: Iterable[int], waiting: deque[_Run]) -> None:
        for env_id in env_ids:
            if not waiting:
                return
            run = self._playing[env_id] = waiting.popleft()
            self._inject(run, env_id)
            # Do not wait, so that other envs continue; `recv` delivers the observation.
            with contextlib.suppress(ea.VectorTimeoutError):
                obs, infos = self._envs.reset(seed=[run.episode.seed], env_ids=[env_id], timeout=0)
                self._go_on([env_id], obs, infos, waiting)

    def _process_batch(self, batch: ea.Batch, waiting: deque[_Run]) -> None:
        going_on, free = [], []
        for row, env_id in enumerate(batch.env_ids.tolist()):
            run = self._playing[env_id]
            if "failure" not in batch.infos[row]:
                run.add_reward(batch.rewards[row], bool(batch.terminated[row] or batch.truncated[row]))
            if run.is_over:
                self._delivered += 1
                self.steps += run.steps
                del self._playing[env_id]
                free.append(env_id)
            else:
                going_on.append(row)
        self._go_on(
            batch.env_ids[going_on].tolist(), batch.obs[going_on], [batch.infos[row] for row in going_on], waiting
        )
        self._begin(free, waiting)

    def _go_on(self, env_ids: list[int], observations: Any, infos: list[dict[str, Any]], waiting: deque[_Run]) -> None:
        """Send each env's next step, or restart its episode if the last request failed."""
        intact: list[int] = []
        broken: list[int] = []
        for row, info in enumerate(infos):
            (broken if "failure" in info else intact).append(row)
        self._act([env_ids[row] for row in intact], observations[intact])
        for env_id in [env_ids[row] for row in broken]:
            run = self._playing.pop(env_id)
            run.begin_again()
            self.repeated += 1
            waiting.appendleft(run)
            self._begin([env_id], waiting)

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

    def _abandon(self, waiting: deque[_Run]) -> None:
        """Abandon all episodes; one whose result does not come in time is lost."""
        end = time.monotonic() + _PATIENCE
        self._given_up += len(waiting)
        while self._playing and (left := end - time.monotonic()) > 0:
            for env_id in self._envs.recv(min_envs=1, timeout=left).env_ids.tolist():
                del self._playing[env_id]
                self._given_up += 1
        self._playing.clear()


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
        self.begin_again()

    def begin_again(self) -> None:
        self.total, self.steps, self.is_over = 0.0, 0, False

    def add_reward(self, reward: float, is_over: bool) -> None:
        self.total += reward
        self.is_over = is_over


class Monitor:
    """Takes snapshots of the actors of a vector env, in the thread that uses it.

    Args:
        envs: Vector env to watch.
        injector: Counts the injected faults.
    """

    def __init__(self, envs: ea.VectorEnv, injector: Injector) -> None:
        self._envs = envs
        self._injector = injector
        self._started = time.monotonic()
        self._samples: deque[tuple[float, list[int]]] = deque([(self._started, envs.stats().steps)])

    def snapshot(self) -> Fleet:
        """Return a snapshot of all actors."""
        # Read the states first, since they change meanwhile.
        states = [actor.state.value for actor in self._envs.actors]
        now, stats = time.monotonic(), self._envs.stats()
        steps = stats.steps
        rates = self._rates(now, steps)
        rows = [
            ActorRow(
                actor.name,
                state,
                actor.pid,
                actor.incarnation,
                count,
                rate,
                counts.restarts,
                "" if counts.last_failure is None else short(counts.last_failure),
                actor.node,
            )
            for actor, counts, state, count, rate in zip(
                self._envs.actors, stats.actors, states, steps, rates, strict=True
            )
        ]
        return Fleet(now - self._started, rows, self._injector.injected())

    def _rates(self, now: float, steps: list[int]) -> list[float]:
        samples = self._samples
        samples.append((now, steps))
        while len(samples) > 2 and samples[1][0] <= now - _RATE_WINDOW:
            samples.popleft()
        since, then = samples[0]
        seconds = max(now - since, 1e-9)
        return [(after - before) / seconds for before, after in zip(then, steps, strict=True)]
