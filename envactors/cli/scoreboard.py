"""What a bench shows: how far it is, and the table at its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from envactors.cli.figures import Comparison, Spread, ratio_text
from envactors.cli.views import plain_table


class Scoreboard:
    """Shows a bench: a bar on a terminal, lines elsewhere; also a context manager.

    Args:
        total: How many things are to be done.
    """

    def __init__(self, total: int) -> None:
        drawing = sys.stdout.isatty()
        # Rich takes a pipe for a terminal where it is told to by the environment.
        self._console = Console(force_terminal=None if drawing else False, highlight=False)
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        )
        self._drawing = drawing
        # Drawing takes processor time from those that are measured.
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
        """Says what is being done from now on."""
        self._progress.update(self._task, description=what)

    def done(self, what: str = "") -> None:
        """One of the things is done; where there is no bar to show it, a line says what."""
        self._progress.advance(self._task)
        if what and not self._drawing:
            self.line(what)

    def line(self, text: str, style: str = "") -> None:
        """Prints a line that stays."""
        self._console.print(Text(text, style), soft_wrap=True)
        self._console.file.flush()

    def table(self, comparisons: Sequence[Comparison], failures: Mapping[str, str]) -> None:
        """Prints the sides below each other.

        Args:
            comparisons: Those that ran.
            failures: Why the others did not, by what they are called.
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
                Text(one.title, "bold" if one.ours else ""),
                f"{one.rate.median:,.0f}",
                quartiles,
                _ratio(one.to_loop),
                _ratio(one.ours_to_it),
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
