"""Statistics of a vector env: counts, and where its time is spent."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakSet

import numpy as np

from envactors.actor import recording
from envactors.actor.handle import ActorHandle
from envactors.actor.states import ActorStats
from envactors.envs.episodes import Episodes
from envactors.mailbox.durations import Durations, summarize

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class VectorStats:
    """Counts over the lifetime of a vector env, and times in seconds since the first call of `VectorEnv.stats`.

    Attributes:
        steps: Number of steps of each env.
        episodes: Number of episodes of each env that have ended.
        actors: Statistics of each actor.
        batches: Number of full-batch steps that were timed.
        wait_seconds: Time spent in full-batch steps and in ``recv``.
        caller_seconds: Time that the caller spent between these calls.
        step_seconds: Durations of each env's steps, as measured in the worker.
        reset_seconds: Durations of each env's resets, including resets within steps.
    """

    steps: list[int]
    episodes: list[int]
    actors: list[ActorStats]
    batches: int = 0
    wait_seconds: float = 0.0
    caller_seconds: float = 0.0
    step_seconds: list[Durations] = dataclasses.field(default_factory=list)
    reset_seconds: list[Durations] = dataclasses.field(default_factory=list)
    # Numbers of envs that run one after another.
    _in_turns: Sequence[int] = ()

    def __str__(self) -> str:
        whole = self.wait_seconds + self.caller_seconds
        if not whole:
            return f"{sum(self.steps)} steps, {sum(self.episodes)} episodes; nothing was timed yet"
        # Actors run in parallel: the caller waits for the busiest one.
        first, busiest = 0, 0.0
        for count in self._in_turns:
            rows = range(first, first + count)
            busiest = max(busiest, sum(self.step_seconds[i].total + self.reset_seconds[i].total for i in rows))
            first += count
        envs = min(busiest, self.wait_seconds)
        shares = ("envs", envs), ("caller", self.caller_seconds), ("envactors", self.wait_seconds - envs)
        slowest = max(range(len(self.step_seconds)), key=lambda i: self.step_seconds[i].total)
        p99 = 1000 * self.step_seconds[slowest].p99
        parts = ", ".join(f"{name} {100 * seconds / whole:.0f} %" for name, seconds in shares)
        return f"{parts}; slowest env {slowest} (p99 {p99:.3g} ms)"


class VectorStatistics:
    """Statistics of one vector env: counts, how long the caller waits, and how long it does other things.

    Args:
        episodes: Counts of steps and episodes.
        actors: Actors of the vector.
        inline: Whether the actors run one after another, in the caller's thread.

    Attributes:
        actors: Actors of the vector.
        serial: A number that no other vector of this process has.
        is_timing: Whether the caller's time is measured.
        spans: Name, begin, and end of each method that has waited; None unless a trace is running.
    """

    def __init__(self, episodes: Episodes, actors: Sequence[ActorHandle], *, inline: bool) -> None:
        self.actors = actors
        self.serial: int = next(_serials)
        self.is_timing: bool = False
        self.spans: deque[tuple[str, float, float]] | None = None
        self._episodes = episodes
        self._inline = inline
        self._batches = 0
        self._wait_seconds = 0.0
        self._caller_seconds = 0.0
        # Time at which the last wait began or ended; 0 before the first.
        self._since = 0.0
        with _lock:
            _vectors.add(self)
        if recording.recorder is not None:
            recording.recorder.on_vector(self)

    def enter(self) -> None:
        """Begin a wait."""
        now = time.monotonic()
        if self._since:
            self._caller_seconds += now - self._since
        self._since = now

    def leave(self, method: str, batches: int = 0) -> None:
        """End a wait in a method of the vector, which has completed ``batches`` full-batch steps."""
        begin, self._since = self._since, time.monotonic()
        if method != "reset":
            self._wait_seconds += self._since - begin
        self._batches += batches
        if self.spans is not None:
            self.spans.append((method, begin, self._since))

    def time(self, method: str, wait: Callable[[], T], batches: int = 0) -> T:
        """Call a function that waits on behalf of a method of the vector."""
        if not self.is_timing:
            return wait()
        self.enter()
        try:
            return wait()
        finally:
            self.leave(method, batches)

    def collect(self) -> VectorStats:
        """Return the statistics. The first call also begins to measure times in the workers."""
        self.is_timing = True
        times = np.concatenate([actor._supervisor.core.histograms() for actor in self.actors])
        steps, resets = zip(*summarize(times), strict=True)
        return VectorStats(
            self._episodes.steps.tolist(),
            self._episodes.episodes.tolist(),
            [actor.stats() for actor in self.actors],
            self._batches,
            self._wait_seconds,
            self._caller_seconds,
            list(steps),
            list(resets),
            [len(steps)] if self._inline else [len(actor._supervisor.config.start.factories) for actor in self.actors],
        )


_lock = threading.Lock()
_serials = itertools.count()
_vectors: WeakSet[VectorStatistics] = WeakSet()


def all_statistics() -> list[VectorStatistics]:
    """Return the statistics of all vector envs of this process."""
    with _lock:
        return list(_vectors)
