"""The format of traces: JSON of the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

Spans of one track are nested or apart: where clocks disagree by some microseconds, the later span is cut.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

# The number of the one process that a trace has, and of its tracks, in the order in which they are shown.
_PROGRAM = _NODES = 1
_FIRST_CALLER, _FIRST_ACTOR = 2, 1000


class Span(NamedTuple):
    """An activity of a worker between two times (`time.monotonic`).

    Attributes:
        track: The number of its actor's track.
        name: What it did.
        begin: When it began.
        end: When it ended.
        incarnation: The number of its process, where that is known.
        env: The index of the env, for steps and resets.
        call_id: The number of the request, for steps and resets.
    """

    track: int
    name: str
    begin: float
    end: float
    incarnation: int | None = None
    env: int | None = None
    call_id: int | None = None


class CallerSpan(NamedTuple):
    """An activity of the caller of a vector between two times (`time.monotonic`)."""

    name: str
    begin: float
    end: float


class Notice(NamedTuple):
    """An event of an actor or, without a track, of the program, at one time (`time.monotonic`)."""

    track: int | None
    text: str
    at: float


def write_trace(
    file: IO[str],
    begin: float,
    names: list[str],
    spans: list[Span],
    notices: list[Notice],
    callers: list[list[CallerSpan]],
) -> None:
    """Write a trace.

    Args:
        file: Where to.
        begin: When it began (`time.monotonic`).
        names: The names of the actors, by track.
        spans: What they did.
        notices: What has happened.
        callers: By vector: what its caller did.
    """
    clock = _Clock(begin)
    program = " ".join([os.path.basename(sys.executable), *sys.argv])[:200]  # noqa: PTH119 # it may be no path
    parts: list[Iterable[dict[str, Any]]] = [
        [_metadata("process_name", 0, program), _metadata("thread_name", _NODES, "nodes")]
    ]
    for number, caller in enumerate(callers):
        track = _FIRST_CALLER + number
        parts.append([_metadata("thread_name", track, f"caller of vector {number}")])
        parts.append(clock.events(track, [(span, {}) for span in caller]))
    by_track: dict[int, list[Span]] = {track: [] for track in range(len(names))}
    for span in spans:
        by_track[span.track].append(span)
    for track, name in enumerate(names):
        parts.append([_metadata("thread_name", _FIRST_ACTOR + track, name)])
        parts.append(clock.events(_FIRST_ACTOR + track, [(span, _details(span)) for span in by_track[track]]))
    parts.append(_instants(clock, notices))
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    separator = ""
    for event in itertools.chain.from_iterable(parts):
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _details(span: Span) -> dict[str, Any]:
    fields = {"env": span.env, "call": span.call_id, "incarnation": span.incarnation}
    return {name: value for name, value in fields.items() if value is not None}


def _metadata(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROGRAM, "tid": track, "name": kind, "args": {"name": name}}


def _instants(clock: _Clock, notices: list[Notice]) -> Iterator[dict[str, Any]]:
    for track, text, at in notices:
        tid, scope = (_NODES, "g") if track is None else (_FIRST_ACTOR + track, "t")
        yield {"ph": "i", "pid": _PROGRAM, "tid": tid, "ts": clock.at(at) / 1000, "s": scope, "name": text}


class _Clock:
    """Turns times into those of a trace: nanoseconds since its beginning."""

    def __init__(self, begin: float) -> None:
        self._begin = begin

    def at(self, when: float) -> int:
        return max(0, round((when - self._begin) * 1e9))

    def events(self, track: int, spans: list[tuple[Any, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        """Yield the events of a track, those that overlap cut so that they are nested or apart."""
        # The ends of the spans that enclose the next one, outermost first.
        open_ends: list[int] = []
        last_begin = 0
        for span, details in sorted(spans, key=lambda pair: (pair[0].begin, -pair[0].end)):
            begin = max(last_begin, self.at(span.begin))
            end = self.at(span.end)
            end = max(begin, end)
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if open_ends and end > open_ends[-1]:
                begin = open_ends[-1]
                while open_ends and open_ends[-1] <= begin:
                    open_ends.pop()
            if open_ends:
                end = min(end, open_ends[-1])
            open_ends.append(end)
            last_begin = begin
            times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
            yield {"ph": "X", "pid": _PROGRAM, "tid": track, **times, "name": span.name, "args": details}
