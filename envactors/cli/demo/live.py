"""Live view of the demo: a table of the actors, and the learning curve beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from envactors.cli.demo.reports import Fleet, Generation, Summary, fault_counts
from envactors.cli.views import LiveView, plain_table

_FRAME_SECONDS = 0.12
_STATE_STYLES = {
    "starting": "yellow",
    "idle": "dim",
    "busy": "green",
    "renewing": "magenta",
    "dead": "bold red",
    "closed": "dim",
}
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 30
_WIDTH_FOR_FAILURES = 74
_CURVE_HEIGHTS = range(8, 17)
_LEAST_CURVE_HEIGHT = 4


class LiveReporter(LiveView):
    """Redraws the actors and the curve in place.

    Args:
        console: Terminal to draw on.
        goal: Mean return to reach.
        longest_return: Return at the top of the curve's scale.
    """

    def __init__(self, console: Console, goal: float, longest_return: float) -> None:
        super().__init__(console)
        self._goal = goal
        self._longest_return = longest_return
        self._title = ""
        self._phase = ""
        self._progress = ""
        self._fleet: Fleet | None = None
        self._generations: list[Generation] = []
        self._drawn = 0.0

    def opened(self, title: str) -> None:
        self._title = title

    def phase(self, name: str) -> None:
        self._phase, self._progress = name, ""
        self._draw()

    def tick(self, snapshot: Callable[[], Fleet], done: int, total: int) -> None:
        # The last frame of a phase is always drawn, so that the screen is complete.
        if done < total and time.monotonic() < self._drawn + _FRAME_SECONDS:
            return
        self._progress = f", {done} of {total} episodes"
        self._fleet = snapshot()
        self._draw()

    def generation(self, generation: Generation) -> None:
        self._generations.append(generation)

    def finished(self, summary: Summary) -> None:
        self._conclude(summary.lines(), summary.goal_met)

    def frame(self) -> RenderableType:
        """Return the current picture."""
        heading = Text.assemble((self._title, "bold"), "  ", (self._phase + self._progress, "cyan"))
        if self._fleet is None:
            return heading
        heading.append(f"  {self._fleet.seconds:.1f} s", "dim")
        faults = Text.assemble(("faults injected: ", "dim"), fault_counts(self._fleet.faults))
        table = _table(self._fleet, self._console.width)
        height = self._curve_height(table, len(self._fleet.rows))
        curve = curve_lines(self._generations, self._longest_return, _CURVE_WIDTH, height)
        panel = Panel.fit(Group(*curve, self._caption()), title="return", border_style="dim")
        return Group(heading, faults, Columns([table, panel]))

    def _curve_height(self, table: Table, rows: int) -> int:
        # Head and foot of the table take one line more than frame and caption of the curve.
        height = min(max(rows + 1, _CURVE_HEIGHTS[0]), _CURVE_HEIGHTS[-1])
        if self._console.measure(table).maximum + _CURVE_WIDTH + 10 <= self._console.width:
            return height
        # Stacked: headings, head and foot of the table, frame and caption of the curve.
        return max(min(height, self._console.height - rows - 10), _LEAST_CURVE_HEIGHT)

    def _caption(self) -> Text:
        if not self._generations:
            return Text("█ mean  ━ best", "dim")
        last = self._generations[-1]
        return Text.assemble(
            ("█", "green"), f" mean {last.mean_return:.0f}  ", ("━", "yellow"), f" best {last.best_return:.0f}  ",
            (f"goal {self._goal:.0f}", "dim"),
        )  # fmt: skip

    def _draw(self) -> None:
        self._show(self.frame())
        self._drawn = time.monotonic()


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


def _table(fleet: Fleet, width: int) -> Table:
    table = plain_table(show_footer=True)
    table.add_column("actor", "all", no_wrap=True)
    table.add_column("state", min_width=8)
    far = any(row.node for row in fleet.rows)
    if far:
        table.add_column("node", min_width=8)
    table.add_column("pid", justify="right", min_width=7)
    table.add_column("inc.", justify="right")
    table.add_column("steps", f"{fleet.steps:,}", justify="right", min_width=7)
    table.add_column("steps/s", f"{fleet.steps_per_second:,.0f}", justify="right", min_width=7)
    table.add_column("restarts", str(fleet.restarts), justify="right")
    # In a narrow terminal this column would squeeze the others.
    if width >= _WIDTH_FOR_FAILURES:
        table.add_column("last failure", min_width=13, no_wrap=True)
    for row in fleet.rows:
        table.add_row(
            row.name,
            Text(row.state, _STATE_STYLES.get(row.state, "")),
            *([row.node or ""] if far else []),
            "" if row.pid is None else str(row.pid),
            str(row.incarnation),
            f"{row.steps:,}",
            f"{row.steps_per_second:,.0f}",
            Text(str(row.restarts), "yellow" if row.restarts else "dim"),
            *([Text(row.last_failure, "red")] if width >= _WIDTH_FOR_FAILURES else []),
        )
    return table
