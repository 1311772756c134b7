"""What a vector env counts, and where its time goes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakSet

from envactors.actor import recording
from envactors.actor.handle import ActorHandle
from envactors.actor.inspection import read_histograms
from envactors.actor.states import ActorStats
from envactors.mailbox.durations import Durations, Histograms
from envactors.vector.episodes import Episodes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class VectorStats:
    """Counts over a vector env's life. Times are taken from the first `VectorEnv.stats` on, in seconds.

    Attributes:
        steps: Steps of each env.
        episodes: Episodes that ended, of each env.
        actors: The counts of each actor.
        batches: How many full-batch steps were timed.
        wait_seconds: How long they took, and the waits of ``recv``.
        caller_seconds: How long the caller took between them.
        step_seconds: How long each env's steps took, as measured where it runs.
        reset_seconds: How long its resets took, those within steps included.
    """

    steps: list[int]
    episodes: list[int]
    actors: list[ActorStats]
    batches: int = 0
    wait_seconds: float = 0.0
    caller_seconds: float = 0.0
    step_seconds: list[Durations] = dataclasses.field(default_factory=list)
    reset_seconds: list[Durations] = dataclasses.field(default_factory=list)
    # How many envs run one after the other.
    _in_turns: Sequence[int] = ()

    def __str__(self) -> str:
        whole = self.wait_seconds + self.caller_seconds
        if not whole:
            return f"{sum(self.steps)} steps, {sum(self.episodes)} episodes; nothing was timed yet"
        # Actors run side by side: the busiest one is what was waited for.
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


class CallerClock:
    """Measures how long a caller waits for its envs, and how long it does other things between that.

    Attributes:
        batches: How many full-batch steps there were.
        wait_seconds: How long it has waited.
        caller_seconds: How long it has done other things.
        spans: The methods that have waited, each with when it began and ended; None unless a trace runs.
    """

    def __init__(self) -> None:
        self.batches: int = 0
        self.wait_seconds: float = 0.0
        self.caller_seconds: float = 0.0
        self.spans: deque[tuple[str, float, float]] | None = None
        # When it began to wait or stopped last; 0 before it did.
        self._since = 0.0

    def enter(self) -> None:
        """The caller waits from now on."""
        now = time.monotonic()
        if self._since:
            self.caller_seconds += now - self._since
        self._since = now

    def leave(self, method: str, batches: int = 0) -> None:
        """The caller goes on after this method of the vector, with so many full batches more."""
        begin, self._since = self._since, time.monotonic()
        if method != "reset":
            self.wait_seconds += self._since - begin
        self.batches += batches
        if self.spans is not None:
            self.spans.append((method, begin, self._since))

    def time(self, method: str, wait: Callable[[], T], batches: int = 0) -> T:
        """Call a function that waits, for a method of the vector."""
        self.enter()
        try:
            return wait()
        finally:
            self.leave(method, batches)


class VectorStatistics:
    """What is counted of one vector env.

    Args:
        episodes: The bookkeeper of its episodes.
        actors: Its actors.
        inline: Whether they run one after the other.

    Attributes:
        actors: Its actors.
        clock: Measures where time goes; None until that is asked for.
    """

    def __init__(self, episodes: Episodes, actors: Sequence[ActorHandle], *, inline: bool) -> None:
        self.actors = actors
        self.clock: CallerClock | None = None
        self._episodes = episodes
        self._inline = inline
        with _lock:
            _vectors.add(self)
        if recording.recorder is not None:
            recording.recorder.on_vector(self)

    def begin_timing(self) -> CallerClock:
        """Measure where the caller's time goes from now on, if that is not measured yet."""
        self.clock = self.clock or CallerClock()
        return self.clock

    def collect(self) -> VectorStats:
        """Return what was counted; the first time, begin to take times where the envs run.

        Raises:
            OSError: There is not enough memory.
        """
        clock = self.begin_timing()
        times = Histograms.joined([read_histograms(actor._supervisor) for actor in self.actors])
        steps, resets = zip(*times.durations(), strict=True)
        return VectorStats(
            self._episodes.steps.tolist(),
            self._episodes.episodes.tolist(),
            [actor.stats() for actor in self.actors],
            clock.batches,
            clock.wait_seconds,
            clock.caller_seconds,
            list(steps),
            list(resets),
            [len(steps)] if self._inline else [len(actor._supervisor.config.start.factories) for actor in self.actors],
        )


_lock = threading.Lock()
_vectors: WeakSet[VectorStatistics] = WeakSet()


def all_statistics() -> list[VectorStatistics]:
    """Return what is counted of all vector envs of this process."""
    with _lock:
        return list(_vectors)
