"""Live view of the demo: a table of the actors, and next to it the learning curve."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from envactors.cli.demo.reports import Generation, Reporter, Summary, fault_counts
from envactors.cli.top.rows import Picture, Sampler
from envactors.cli.top.view import ORDERS, actor_table
from envactors.observe.snapshot import take_snapshot

_FRAME_SECONDS = 0.25
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 30
# Frame, scale, and the gap to the table.
_AROUND_CURVE = 10
# From this width on, the curve has its place next to the table.
_WIDE = 140
_CURVE_HEIGHTS = range(8, 17)
_LEAST_CURVE_HEIGHT = 4


class LiveReporter(Reporter):
    """Redraws the actors and the curve in place.

    Args:
        console: Terminal to draw on.
        goal: Mean return to reach.
        longest_return: Return at the top of the curve's scale.
    """

    def __init__(self, console: Console, goal: float, longest_return: float) -> None:
        super().__init__(sys.stdout)
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._goal = goal
        self._longest_return = longest_return
        self._title = ""
        self._progress = ""
        self._sampler = Sampler()
        self._picture: Picture | None = None
        self._faults: Mapping[str, int] = {}
        self._generations: list[Generation] = []
        self._drawn = 0.0

    def __enter__(self) -> LiveReporter:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def opened(self, title: str) -> None:
        self._title = title

    def phase(self, name: str) -> None:
        self._progress = name
        self._draw()

    def tick(self, faults: Mapping[str, int], done: int, total: int) -> None:
        # The last frame of a phase is always drawn, so that the screen is complete.
        if done < total and time.monotonic() < self._drawn + _FRAME_SECONDS:
            return
        self._progress = f"{self._progress.partition(', ')[0]}, {done} of {total} episodes"
        self._faults = faults
        self._picture = self._sampler.sample(dict(take_snapshot()))
        self._draw()

    def generation(self, generation: Generation) -> None:
        self._generations.append(generation)

    def finished(self, summary: Summary) -> None:
        verdict, *rest = summary.lines()
        self._console.print(Text(verdict, "bold green" if summary.goal_met else "bold red"))
        for line in rest:
            self._console.print(Text(line))

    def _draw(self) -> None:
        self._live.update(self._frame(), refresh=True)
        self._drawn = time.monotonic()

    def _frame(self) -> RenderableType:
        heading = Text.assemble((self._title, "bold"), "  ", (self._progress, "cyan"))
        if self._picture is None:
            return heading
        faults = Text.assemble(("faults injected: ", "dim"), fault_counts(self._faults))
        rows = sorted(self._picture.rows, key=ORDERS[0].key)
        is_wide = self._console.width >= _WIDE
        width = self._console.width - (_CURVE_WIDTH + _AROUND_CURVE if is_wide else 0)
        height = min(max(len(rows) + 1, _CURVE_HEIGHTS[0]), _CURVE_HEIGHTS[-1])
        if not is_wide:  # below the table: headings, head of the table, frame and caption of the curve
            height = max(min(height, self._console.height - len(rows) - 9), _LEAST_CURVE_HEIGHT)
        curve = curve_lines(self._generations, self._longest_return, _CURVE_WIDTH, height)
        panel = Panel.fit(Group(*curve, self._caption()), title="return", border_style="dim")
        return Group(heading, faults, Columns([actor_table(rows, rows, width), panel]))

    def _caption(self) -> Text:
        if not self._generations:
            return Text("█ mean  ━ best", "dim")
        last = self._generations[-1]
        return Text.assemble(
            ("█", "green"), f" mean {last.mean_return:.0f}  ", ("━", "yellow"), f" best {last.best_return:.0f}  ",
            (f"goal {self._goal:.0f}", "dim"),
        )  # fmt: skip


def curve_lines(generations: list[Generation], top: float, width: int, height: int) -> list[Text]:
    """Return a chart: the mean return of each generation as a bar, its best return as a line above.

    Args:
        generations: Generations; the last ones if not all fit.
        top: Return at the top of the scale.
        width: Width in characters, without the scale.
        height: Height in lines.

    Returns:
        The lines from the top down, with the scale on the left.
    """
    bar = max(1, min(3, width // max(1, len(generations))))
    shown = generations[-(width // bar) :]
    lines = []
    for row in reversed(range(height)):
        line = Text.assemble((f"{_scale_mark(row, top, height):>4} ", "dim"))
        for generation in shown:
            filled = generation.mean_return / top * height - row
            is_best = min(int(generation.best_return / top * height), height - 1) == row
            line.append(*_cell(filled, is_best, bar))
        line.pad_right(width + 5 - line.cell_len)
        lines.append(line)
    return lines


def _cell(filled: float, is_best: bool, bar: int) -> tuple[str, str]:
    gap = 1 if bar > 1 else 0
    if is_best and filled < 0.5:
        return "━" * (bar - gap) + " " * gap, "yellow"
    return _EIGHTHS[round(min(max(filled, 0.0), 1.0) * 8)] * (bar - gap) + " " * gap, "green"


def _scale_mark(row: int, top: float, height: int) -> str:
    marks = {height - 1: top, height // 2: top / 2, 0: 0.0}
    return f"{marks[row]:.0f}" if row in marks else ""
