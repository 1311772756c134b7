"""An actor that writes down when it runs, to show that no two processes of it ever do at once."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from helpers import Counter

import envactors as ea


class Witness(Counter):
    """Writes which incarnation runs from when to when, by a clock that all processes share."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.note("made")

    def note(self, what):
        with Path(self.path).open("a") as file:
            file.write(f"{ea.current_actor().incarnation} {what} {time.monotonic()}\n")

    def work(self, seconds):
        self.note("begin")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.note("runs")
            time.sleep(0.002)
        self.note("end")


def read_spans(path):
    """Returns from when to when each incarnation ran env code, in order."""
    spans = {}
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else its process was killed while it wrote
            incarnation, _, when = line.split()
            began, _ = spans.get(int(incarnation), (float(when), 0.0))
            spans[int(incarnation)] = began, float(when)
    return [span for _, span in sorted(spans.items())]


def assert_one_at_a_time(path, *, least):
    spans = read_spans(path)
    assert len(spans) >= least
    for (_, ended), (began, _) in itertools.pairwise(spans):
        assert ended < began, spans
