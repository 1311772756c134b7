"""A flight recorder: what actors and callers did last, written as a trace when it ends.

Workers write when their steps and resets ran into rings that they share with this process; a thread collects them. All
else (calls, starts, losses, waiting) is recorded here. Of everything the last is kept: memory is bounded.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple
from weakref import WeakKeyDictionary

from envactors.actor import recording
from envactors.actor.core import ActorCore
from envactors.actor.process import ActorProcess
from envactors.actor.signal_deferral import defer_signals
from envactors.mailbox.control_page import TIMED
from envactors.mailbox.durations import METHOD_RESET
from envactors.mailbox.spans import SPANS_KEPT, Spans
from envactors.observe.snapshot import supervisors
from envactors.observe.trace_file import CallerSpan, Notice, Span, write_trace
from envactors.vector.statistics import VectorStatistics, all_statistics

_log = logging.getLogger("envactors")
# How long to wait between two looks at the rings of workers, in seconds, at first and at least and at most.
_FIRST_PERIOD, _LEAST_PERIOD, _MOST_PERIOD = 0.05, 0.02, 0.5
# How many steps and resets of all workers are kept; calls and starts; waits of each caller; notices.
MOST_STEPS = 1 << 18
MOST_SPANS = 1 << 15
MOST_WAITS = 1 << 16
MOST_NOTICES = 1 << 14


def trace(path: str | os.PathLike[str]) -> Trace:
    """Record what all actors of this process do, while the context lasts.

    ``ENVACTORS_TRACE=run.json`` in the environment does so from the first actor on, until the program exits.

    Args:
        path: The file to write, in the JSON that https://ui.perfetto.dev and ``chrome://tracing`` open: a track per
            actor with its starts, steps, resets and calls, failures as instants, and one for the caller of each vector.
            Of long runs it has the end: at most 262,144 steps and resets.

    Returns:
        A context manager.

    Raises:
        OSError: On entering: the file cannot be written.
        RuntimeError: On entering: a trace is being recorded already.
    """
    return Trace(Path(path))


def begin_by_environment() -> None:
    """Record until the program ends, as ``ENVACTORS_TRACE`` asks; what prevents that is logged."""
    path = os.environ.pop("ENVACTORS_TRACE")  # this program's, and not that of programs and workers that it starts
    if not path:
        return
    running = trace(path)
    try:
        running.__enter__()
    except (OSError, RuntimeError) as error:  # it cannot be written; the program records a trace already
        _log.warning("ENVACTORS_TRACE is set, and nothing is recorded: %s", error)
    else:
        atexit.register(running.__exit__, None, None, None)


class Rows(NamedTuple):
    """Steps and resets of one actor, as one look at its ring has found them.

    Attributes:
        track: The number of the actor's track.
        first_index: The index of its first env.
        lead: What to add to their times for those of this process, in seconds.
        spans: The steps and resets.
    """

    track: int
    first_index: int
    lead: float
    spans: Spans


class Trace:
    """Records while it is entered; see `trace`.

    Args:
        path: The file to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._begin = 0.0
        self._ended = threading.Event()
        self._collector = threading.Thread(target=self._collect, name="envactors-trace", daemon=True)
        # Guards what follows; taken under the locks of actors, never the other way round.
        self._lock = threading.Lock()
        # By track: the names of actors.
        self._names: list[str] = []
        self._tracks: WeakKeyDictionary[ActorCore, int] = WeakKeyDictionary()
        # How many spans of each process were collected.
        self._seen: WeakKeyDictionary[ActorProcess, int] = WeakKeyDictionary()
        # When the last process of an actor ended, until the next one has started.
        self._losses: WeakKeyDictionary[ActorCore, float] = WeakKeyDictionary()
        self._rows: deque[Rows] = deque()
        self._row_count = 0
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._notices: deque[Notice] = deque(maxlen=MOST_NOTICES)
        # By vector: the waits of its caller.
        self._waits: list[deque[tuple[str, float, float]]] = []

    def __enter__(self) -> Trace:
        with _lock:
            if recording.recorder is not None:
                raise RuntimeError(f"a trace is being recorded already: end it before the one into {self._path} begins")
            self._file = self._path.open("w", encoding="utf-8")
            self._begin = time.monotonic()
            recording.recorder = self
        for statistics in all_statistics():
            if not all(actor._supervisor.closed.is_set() for actor in statistics.actors):
                self.on_vector(statistics)
        for member in supervisors():
            with defer_signals, member.core.lock:
                self._track(member.core)
                member.core.begin_timing()
                if (process := member.core.process) is not None:
                    self._seen[process] = process.page.spans.written  # those before do not belong to this trace
        self._collector.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._collector.join()
        recording.recorder = None
        for member in supervisors():
            with defer_signals, member.core.lock:
                self._take_rows(member.core, member.core.process)
                member.core.begin_timing()  # from now on only how long steps take is of interest
        for statistics in all_statistics():
            statistics.spans = None
        assert self._file is not None, "it was entered"
        with self._file as file:
            write_trace(file, self._begin, self._names, self._all_spans(), list(self._notices), self._caller_spans())

    # While it runs ---------------------------------------------------------------------------------------

    def on_vector(self, statistics: VectorStatistics) -> None:
        """Record what its caller does; see `envactors.actor.recording.Recorder`."""
        statistics.is_timing = True
        if statistics.spans is None:
            statistics.spans = deque(maxlen=MOST_WAITS)
            self._waits.append(statistics.spans)

    def on_span(self, core: ActorCore, name: str, begin: float, end: float) -> None:
        """Record a span; see `envactors.actor.recording.Recorder`."""
        track = self._track(core)
        with self._lock:
            if name == "start" and (lost := self._losses.pop(core, None)) is not None:
                self._spans.append(Span(track, "renewal", lost, end, core.incarnation))
            self._spans.append(Span(track, name, begin, end, core.incarnation))

    def on_notice(self, core: ActorCore | None, text: str) -> None:
        """Record an instant; see `envactors.actor.recording.Recorder`."""
        track = None if core is None else self._track(core)
        with self._lock:
            self._notices.append(Notice(track, text, time.monotonic()))

    def on_process_end(self, core: ActorCore, process: ActorProcess) -> None:
        """Collect what it has left; see `envactors.actor.recording.Recorder`."""
        self._take_rows(core, process)
        self._track(core)
        with self._lock:
            self._losses[core] = time.monotonic()

    def _track(self, core: ActorCore) -> int:
        with self._lock:
            if core not in self._tracks:
                self._tracks[core] = len(self._names)
                self._names.append(core.config.name)
            return self._tracks[core]

    def _collect(self) -> None:
        period = _FIRST_PERIOD
        while not self._ended.wait(period):
            most = 1
            for member in supervisors():
                with member.core.lock:  # its process is not reaped meanwhile
                    most = max(most, self._take_rows(member.core, member.core.process))
            # At this rate the fullest ring is half full at the next look.
            period = min(max(period * SPANS_KEPT / 2 / most, _LEAST_PERIOD), _MOST_PERIOD)

    def _take_rows(self, core: ActorCore, process: ActorProcess | None) -> int:
        """Take what is new in a worker's ring, and return how much that was; under the actor's lock."""
        if process is None or not process.page.counters[TIMED]:
            return 0
        track = self._track(core)
        page = process.page
        with self._lock:
            spans, self._seen[process] = page.spans.read(self._seen.get(process, 0))
            if len(spans):
                self._rows.append(Rows(track, core.config.first_index, page.clock_lead, spans))
                self._row_count += len(spans)
            while (surplus := self._row_count - MOST_STEPS) > 0:
                oldest = self._rows.popleft()
                if len(oldest.spans) > surplus:
                    self._rows.appendleft(oldest._replace(spans=oldest.spans[surplus:].copy()))
                self._row_count -= min(surplus, len(oldest.spans))
        return len(spans)

    # At its end ------------------------------------------------------------------------------------------

    def _all_spans(self) -> list[Span]:
        with defer_signals, self._lock:
            spans = list(self._spans)
            collected = list(self._rows)
        for track, first_index, lead, rows in collected:
            for begin, end, call_id, position, method in rows.tolist():
                name = "reset" if method == METHOD_RESET else "step"
                spans.append(Span(track, name, begin + lead, end + lead, None, first_index + position, call_id))
        return spans

    def _caller_spans(self) -> list[list[CallerSpan]]:
        """Return of each vector what its caller did: the methods that waited, and what it did between them."""
        callers = []
        for waits in self._waits:
            spans: list[CallerSpan] = []
            for method, begin, end in list(waits):
                if spans and begin > spans[-1].end:
                    spans.append(CallerSpan("policy", spans[-1].end, begin))
                spans.append(CallerSpan(f"wait in {method}", begin, end))
            callers.append(spans)
        return callers


_lock = threading.Lock()
