"""Plays episodes on all envs of a vector env at once, and watches the actors while they do."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.cli.faults import RESET_DEADLINE, Fault, Injector, short
from envactors.cli.reports import ActorRow, Fleet

Policy = npt.NDArray[np.float64]

# How long nothing may come before those that watch are told the time, in seconds.
_HEARTBEAT = 0.1
# How long results that are under way may take to come when episodes are given up: those of the
# slowest reset come.
_PATIENCE = RESET_DEADLINE
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

    An episode's return depends on its policy and seed alone. One that a failure of its env broke off is played again
    from its seed; what is counted is what counts for its return.

    Args:
        envs: The envs, with autoreset disabled and failures renewed.
        injector: Injects the faults that `play` is given.
        watch: Called again and again while they play, with how many of the episodes are over and how many
            there are.

    Attributes:
        steps: The steps of the episodes that are over.
        busy_seconds: How long they were played, without the time in which no env had anything to tell.
        repeated: How often an episode was broken off and begun again.
        lost: How many episodes were asked for and neither played to their end nor given up.
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
        """How many envs play."""
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
        """Plays episodes.

        Args:
            episodes: What to play.
            give_up: Asked again and again whether to stop.
            faults: For the positions of some episodes, what is done to them.

        Returns:
            Their returns, in their order.

        Raises:
            OutOfTimeError: ``give_up`` said so.
        """
        faults = faults or {}
        runs = [_Run(episode, faults.get(position)) for position, episode in enumerate(episodes)]
        self._asked += len(runs)
        waiting = deque(runs)
        self._begin(range(self._envs.num_envs), waiting)
        while self._playing:
            asked = time.monotonic()
            batch = self._envs.recv(min_envs=1, timeout=_HEARTBEAT)
            self._take_in(batch, waiting)
            self._watch(sum(run.is_over for run in runs), len(runs))
            if len(batch.env_ids):
                self.busy_seconds += time.monotonic() - asked
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
            # Without waiting, so that the others are not kept from theirs: `recv` hands the observation out.
            with contextlib.suppress(ea.VectorTimeoutError):
                obs, infos = self._envs.reset(seed=[run.episode.seed], env_ids=[env_id], timeout=0)
                self._go_on([env_id], obs, infos, waiting)

    def _take_in(self, batch: ea.Batch, waiting: deque[_Run]) -> None:
        going_on, free = [], []
        for row, env_id in enumerate(batch.env_ids.tolist()):
            run = self._playing[env_id]
            if "failure" not in batch.infos[row]:
                run.note(batch.rewards[row], bool(batch.terminated[row] or batch.truncated[row]))
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
        """Has envs make their next step, or begin again where the last request failed."""
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
        # One product an env: a product of matrices may round differently with the number of its rows.
        actions = [int(run.episode.policy @ obs > 0) for run, obs in zip(runs, observations, strict=True)]
        for env_id, run in zip(env_ids, runs, strict=True):
            run.steps += 1
            self._inject(run, env_id)
        self._envs.send(actions, env_ids)

    def _inject(self, run: _Run, env_id: int) -> None:
        if run.fault is not None and run.fault.step == run.steps and self._injector.inject(run.fault, env_id):
            run.fault = None

    def _abandon(self, waiting: deque[_Run]) -> None:
        """Ends the episodes; one whose env never gives the result that it owes is lost."""
        end = time.monotonic() + _PATIENCE
        self._given_up += len(waiting)
        while self._playing and (left := end - time.monotonic()) > 0:
            for env_id in self._envs.recv(min_envs=1, timeout=left).env_ids.tolist():
                del self._playing[env_id]
                self._given_up += 1
        self._playing.clear()


class _Run:
    """An episode that is or will be played.

    Attributes:
        episode: The episode.
        fault: What is still to be done to it.
        total: Its rewards so far.
        steps: Its steps so far, the one under way included.
        is_over: Whether it was played to its end.
    """

    def __init__(self, episode: Episode, fault: Fault | None) -> None:
        self.episode = episode
        self.fault = fault
        self.begin_again()

    def begin_again(self) -> None:
        self.total, self.steps, self.is_over = 0.0, 0, False

    def note(self, reward: float, is_over: bool) -> None:
        self.total += reward
        self.is_over = is_over


class Monitor:
    """Watches the actors of a vector env, from the thread that uses it.

    Args:
        envs: The envs.
        injector: Injects faults into them.
    """

    def __init__(self, envs: ea.VectorEnv, injector: Injector) -> None:
        self._envs = envs
        self._injector = injector
        self._started = time.monotonic()
        self._samples: deque[tuple[float, list[int]]] = deque([(self._started, envs.stats().steps)])

    def look(self) -> Fleet:
        """How the actors are now."""
        # The states first: they change while this function runs.
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
