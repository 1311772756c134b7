"""A flight recorder: what actors and callers did last, written as a trace when it ends.

Workers write when their steps and resets ran into rings that they share with this process; a thread collects them. All
else (calls, starts, losses, waiting) is recorded here. Of everything the last is kept: memory is bounded.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from envactors.actor import recording
from envactors.actor.base import ActorBase
from envactors.actor.job import Activity
from envactors.actor.recording import RecordedVector
from envactors.mailbox.control_page import ControlPage
from envactors.mailbox.durations import METHOD_RESET
from envactors.mailbox.spans import SPANS_KEPT, Spans
from envactors.observe.snapshot import find_actors
from envactors.observe.trace_file import CallerSpan, Notice, Span, write_trace
from envactors.threads import LibraryThread
from envactors.vector_stats import all_statistics

_log = logging.getLogger("envactors")
# How long to wait between two looks at the rings of workers, in seconds, at first and at least and at most.
_FIRST_PERIOD, _LEAST_PERIOD, _MOST_PERIOD = 0.05, 0.02, 0.5
# How many steps and resets of all workers are kept; calls and starts; waits of each caller; notices.
MOST_STEPS = 1 << 18
MOST_SPANS = 1 << 15
MOST_WAITS = 1 << 16
MOST_NOTICES = 1 << 14


# Steps that end with the process, as they are meant to.
_ENDINGS = ("close", "renew")


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
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
    path = Path(path)
    recorder = TraceRecorder()
    try:
        _claim(recorder, path)
        with recorder.collecting():
            recorder.begin()
            with path.open("w", encoding="utf-8") as file:
                try:
                    yield
                finally:
                    if recording.recorder is recorder:  # not in a process that was forked meanwhile
                        recorder.collect()
                        write_trace(file, recorder.began, *recorder.content())
    finally:
        try:
            _release(recorder)
        except BaseException:  # an interrupt
            _release(recorder)
            raise


def _claim(recorder: TraceRecorder, path: Path) -> None:
    with _lock:
        if recording.is_recording():
            raise RuntimeError(f"a trace is being recorded already: end it before the one into {path} begins")
        recording.recorder = recorder


def _release(recorder: TraceRecorder) -> None:
    """End recording, if it was this one's."""
    if recording.recorder is recorder:
        recording.end_recording()
        for statistics in all_statistics():
            if statistics.waits is not None:
                statistics.waits = None
                statistics.begin_timing()  # from now on only how long steps take is of interest


def begin_by_environment() -> None:
    """Record until the program ends, as ``ENVACTORS_TRACE`` asks; what prevents that is logged."""
    path = os.environ.pop("ENVACTORS_TRACE")  # this program's, and not that of programs and workers that it starts
    if not path:
        return
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(trace(path))
    except (OSError, RuntimeError) as error:  # it cannot be written; the program records a trace already
        _log.warning("ENVACTORS_TRACE is set, and nothing is recorded: %s", error)
    else:
        atexit.register(stack.close)


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


class TraceRecorder(recording.Recorder):
    """Keeps the last events of all actors and callers; see `envactors.actor.recording`.

    Attributes:
        began: When it was made (`time.monotonic`).
        row_count: How many steps and resets it keeps now.
    """

    def __init__(self) -> None:
        self.began: float = time.monotonic()
        # Guards what follows; taken under the locks of actors, never the other way round.
        self._lock = threading.RLock()
        # By track: the names of actors.
        self._names: list[str] = []
        self._tracks: WeakKeyDictionary[ActorBase, int] = WeakKeyDictionary()
        # How many spans of each process were collected.
        self._seen: WeakKeyDictionary[ControlPage, int] = WeakKeyDictionary()
        # When the last process of an actor ended, until the next one has started.
        self._losses: WeakKeyDictionary[ActorBase, float] = WeakKeyDictionary()
        self._rows: deque[Rows] = deque()
        self.row_count: int = 0
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._notices: deque[Notice] = deque(maxlen=MOST_NOTICES)
        # By vector: the waits of its caller.
        self._waits: list[deque[tuple[str, float, float]]] = []

    def begin(self) -> None:
        """Begin with the actors and vectors that there are."""
        for actor in find_actors():
            with self._lock:
                self._track(actor)
                if (page := actor.page) is not None:
                    self._seen[page] = page.spans.written  # those before do not belong to this trace
        for statistics in all_statistics():
            if not all(handle._actor.closed.is_set for handle in statistics.actors):
                self.on_vector(statistics)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Return a context in which a thread collects what workers write, before they overwrite it."""
        ended = threading.Event()
        thread = LibraryThread(lambda: self._collect_until(ended), "envactors-trace", runs_user_code=False)
        try:
            thread.start()
            yield
        finally:
            ended.set()
            if thread.is_alive():  # an interrupt may have come before it was
                thread.join()

    def _collect_until(self, ended: threading.Event) -> None:
        period = _FIRST_PERIOD
        while recording.recorder is self and not ended.wait(period):
            # At this rate the fullest ring is half full at the next look.
            period = min(max(period * SPANS_KEPT / 2 / max(1, self.collect()), _LEAST_PERIOD), _MOST_PERIOD)

    def collect(self) -> int:
        """Collect the steps and resets of all actors; return how many there were of the actor with the most."""
        return max(map(self._take_rows, find_actors()), default=0)

    def _take_rows(self, actor: ActorBase) -> int:
        """Collect the new steps and resets of an actor; return how many there were."""
        if (page := actor.page) is None:
            return 0
        with self._lock:
            track = self._track(actor)
            spans, self._seen[page] = page.spans.read(self._seen.get(page, 0))
            if len(spans):
                self._rows.append(Rows(track, actor.config.first_index, page.clock_lead, spans))
                self.row_count += len(spans)
            while (surplus := self.row_count - MOST_STEPS) > 0:
                oldest = self._rows.popleft()
                if len(oldest.spans) > surplus:
                    self._rows.appendleft(oldest._replace(spans=oldest.spans[surplus:].copy()))
                self.row_count -= min(surplus, len(oldest.spans))
        return len(spans)

    def _track(self, actor: ActorBase) -> int:
        """Return the number of the track of an actor."""
        if actor not in self._tracks:
            self._tracks[actor] = len(self._names)
            self._names.append(actor.config.name)
        return self._tracks[actor]

    # Events ----------------------------------------------------------------------------------------------

    def on_vector(self, vector: RecordedVector) -> None:
        """Record what its caller does."""
        if vector.waits is None:
            vector.waits = deque(maxlen=MOST_WAITS)
            self._waits.append(vector.waits)
        vector.begin_timing()

    def on_span(self, actor: ActorBase, name: str, begin: float) -> None:
        """Record a span; with a start, also the renewal that it ends."""
        end = time.monotonic()
        with self._lock:
            track, incarnation = self._track(actor), actor.process.incarnation
            lost = self._losses.pop(actor, None) if name == "start" else None
            if lost is not None:
                self._spans.append(Span(track, "renewal", lost, end, incarnation))
            self._spans.append(Span(track, name, begin, end, incarnation))

    def on_notice(self, actor: ActorBase | None, text: str) -> None:
        """Record an instant."""
        with self._lock:
            track = None if actor is None else self._track(actor)
            self._notices.append(Notice(track, text, time.monotonic()))

    def on_exit(self, actor: ActorBase, step: Activity | None) -> None:
        """Record the step that was lost, and collect what the process has left."""
        with self._lock:
            if step is not None and step.started_at and step.method not in _ENDINGS:
                self.on_span(actor, f"{step.method} (lost)", step.started_at)
            self._take_rows(actor)
            self._losses[actor] = time.monotonic()

    # The end ---------------------------------------------------------------------------------------------

    def content(self) -> tuple[list[str], list[Span], list[Notice], list[list[CallerSpan]]]:
        """Return the names of the actors by track, the spans, the instants, and by vector those of its caller."""
        with self._lock:
            names, spans, notices, collected = [*self._names], [*self._spans], [*self._notices], [*self._rows]
        for track, first_index, lead, rows in collected:
            for begin, end, call_id, position, method in rows.tolist():
                name = "reset" if method == METHOD_RESET else "step"
                spans.append(Span(track, name, begin + lead, end + lead, None, first_index + position, call_id))
        return names, spans, notices, [_caller_spans(waits) for waits in self._waits]


def _caller_spans(waits: deque[tuple[str, float, float]]) -> list[CallerSpan]:
    """Return what a caller did: the methods that waited, and what it did between them."""
    spans: list[CallerSpan] = []
    for method, begin, end in waits.copy():
        if spans and begin > spans[-1].end:
            spans.append(CallerSpan("policy", spans[-1].end, begin))
        spans.append(CallerSpan(f"wait in {method}", begin, end))
    return spans


# Guards the choice of the recorder.
_lock = threading.RLock()
