"""Statistics of a vector: counts, and where its time goes. Nothing is timed before somebody asks."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakSet

from envactors.actor import recording
from envactors.actor.handle import ActorHandle
from envactors.actor.states import ActorStats
from envactors.mailbox.durations import Durations, summarize
from envactors.vector.base import Engine

_NOT_TIMED = nullcontext()


@dataclasses.dataclass(frozen=True)
class VectorStats:
    """Counts over the lifetime of a vector env, and times in seconds since the first call of `VectorEnv.stats`.

    Attributes:
        steps: Number of steps of each env.
        episodes: Number of episodes of each env that the env has ended. Those that a failure cut off do not count.
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
    # How many envs run one after another, in the order of the envs.
    _envs_per_process: Sequence[int] = ()

    def __str__(self) -> str:
        whole = self.wait_seconds + self.caller_seconds
        if not whole:
            return f"{sum(self.steps)} steps, {sum(self.episodes)} episodes; nothing was timed yet"
        # Actors run in parallel: the caller waits for the busiest one.
        first, busiest = 0, 0.0
        for count in self._envs_per_process:
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
    """The statistics of one vector, and the clock of its caller.

    Args:
        engine: The engine of the vector.
        actors: Its actors.

    Attributes:
        actors: As above.
        serial: A number that no other vector of this process has.
        is_timing: Whether steps, resets, and waits are timed.
        waits: The method, the begin, and the end of each wait; None unless a trace is running.
    """

    def __init__(self, engine: Engine, actors: Sequence[ActorHandle]) -> None:
        self.actors = actors
        self.serial: int = next(_serials)
        self.waits: deque[tuple[str, float, float]] | None = None
        self._engine = engine
        self.is_timing: bool = False
        self._batches = 0
        self._wait_seconds = self._caller_seconds = 0.0
        # When the last wait began or ended; 0.0 before the first.
        self._since = 0.0
        with _lock:
            _vectors.add(self)
        recording.recorder.on_vector(self)

    def begin_timing(self) -> None:
        """Have steps, resets, and waits timed from now on. Another call completes an interrupted one."""
        self.is_timing = True
        self._engine.begin_timing()

    def waiting(self, method: str, is_batch: bool = False) -> AbstractContextManager[object]:
        """Return the context of a wait, which is timed if anything is.

        `VectorEnv.step` does without it as long as nothing is timed, since it takes 0.2 us.

        Args:
            method: The method that waits.
            is_batch: Whether it steps all envs.
        """
        return _Wait(self, method, is_batch) if self.is_timing else _NOT_TIMED

    def begin_wait(self) -> None:
        """Count the time since the last wait as the caller's."""
        now = time.monotonic()
        if self._since:
            self._caller_seconds += now - self._since
        self._since = now

    def end_wait(self, method: str, is_batch: bool) -> None:
        """Count the time of a wait."""
        begin, self._since = self._since, time.monotonic()
        if method != "reset":
            self._wait_seconds += self._since - begin
            self._batches += is_batch
        if self.waits is not None:
            self.waits.append((method, begin, self._since))

    def collect(self) -> VectorStats:
        """Return the statistics, and begin to time if nobody has asked before."""
        self.begin_timing()
        counts = self._engine.counts()
        steps, resets = zip(*summarize(self._engine.histograms()), strict=True)
        return VectorStats(
            *counts,
            [actor.stats() for actor in self.actors],
            self._batches,
            self._wait_seconds,
            self._caller_seconds,
            list(steps),
            list(resets),
            self._engine.envs_per_process,
        )


class _Wait:
    """The context of one wait."""

    __slots__ = ("_is_batch", "_method", "_statistics")

    def __init__(self, statistics: VectorStatistics, method: str, is_batch: bool) -> None:
        self._statistics, self._method, self._is_batch = statistics, method, is_batch

    def __enter__(self) -> None:
        self._statistics.begin_wait()

    def __exit__(self, *_: object) -> None:
        self._statistics.end_wait(self._method, self._is_batch)


_lock = threading.RLock()
_serials = itertools.count()
_vectors: WeakSet[VectorStatistics] = WeakSet()


def all_statistics() -> list[VectorStatistics]:
    """Return the statistics of all vectors of this process, in the order in which they were made."""
    with _lock:
        return sorted(_vectors, key=lambda vector: vector.serial)
