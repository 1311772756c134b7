"""Output of a bench: progress, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from envactors.cli.bench.figures import Comparison, Spread, ratio_text
from envactors.cli.views import plain_table


class Scoreboard:
    """Shows progress as a bar on a terminal and as lines elsewhere; a context manager.

    Args:
        total: Number of tasks.
        stream: Where to print.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        drawing = stream.isatty()
        # The environment can make Rich treat a pipe as a terminal.
        self._console = Console(file=stream, force_terminal=None if drawing else False, highlight=False)
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        )
        self._drawing = drawing
        # Drawing takes processor time from the measured sides, so do it rarely.
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not drawing, refresh_per_second=4
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Scoreboard:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def doing(self, what: str) -> None:
        """Show the current task."""
        self._progress.update(self._task, description=what)

    def done(self, what: str = "") -> None:
        """Advance by one task; without a bar, print ``what``."""
        self._progress.advance(self._task)
        if what and not self._drawing:
            self.line(what)

    def line(self, text: str, style: str = "") -> None:
        """Print a permanent line."""
        self._console.print(Text(text, style), soft_wrap=True)
        self._console.file.flush()

    def table(self, comparisons: Sequence[Comparison], failures: Mapping[str, str]) -> None:
        """Print the table of results.

        Args:
            comparisons: Sides that ran.
            failures: Error messages of the others, by title.
        """
        table = plain_table()
        table.add_column("side", no_wrap=True)
        table.add_column("env-steps/s", justify="right", no_wrap=True)
        table.add_column("quartiles", justify="right", style="dim", no_wrap=True)
        table.add_column("side\n/ loop", justify="right", no_wrap=True)
        table.add_column("envactors\n/ side", justify="right", no_wrap=True)
        for one in comparisons:
            quartiles = f"{one.rate.lower_quartile:,.0f} to {one.rate.upper_quartile:,.0f}"
            table.add_row(
                Text(one.title, "bold" if one.is_ours else ""),
                f"{one.rate.median:,.0f}",
                quartiles,
                _ratio(one.to_loop),
                _ratio(one.envactors_to_side),
            )
        for title in failures:
            table.add_row(title, Text("failed", "red"), "", "", "")
        self._console.print()
        self._console.print(table)
        for title, why in failures.items():
            self.line(f"{title} failed: {why}", "red")
        self._console.print()


def _ratio(ratio: Spread | None) -> str:
    return "-" if ratio is None else ratio_text(ratio.median)
