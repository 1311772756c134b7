"""Output of ``python -m tests.chaos``: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Protocol, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chaos.report import ChaosReport
from envactors.cli.units import count

_LINE_SECONDS = 5.0
_MOST_SHOWN = 5


class ChaosView(AbstractContextManager["ChaosView"], Protocol):
    """Output of a chaos run."""

    def changed(self, report: ChaosReport) -> None:
        """Show the report so far."""

    def over(self, report: ChaosReport) -> None:
        """Show the final report."""


class PlainChaosView:
    """Prints a line every few seconds, and the counts at the end.

    Args:
        stream: Stream to print to.
        title: First line of the output.
    """

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream = stream
        self._title = title
        self._printed = 0.0

    def __enter__(self) -> PlainChaosView:
        self._print(self._title)
        self._printed = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def changed(self, report: ChaosReport) -> None:
        if time.monotonic() >= self._printed + _LINE_SECONDS:
            self._printed = time.monotonic()
            self._print(_progress(report))

    def over(self, report: ChaosReport) -> None:
        faults = ", ".join(f"{kind} {number}" for kind, number in report.faults.items())
        self._print(f"faults: {report.injected} of {report.planned} ({faults})")
        for name, value in _counts(report):
            self._print(f"{name}: {value}")
        for line in _conclusion(report):
            self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveChaosView:
    """Redraws the counts in place.

    Args:
        console: Terminal to draw on.
        title: Line above the table.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._title = title

    def __enter__(self) -> LiveChaosView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def changed(self, report: ChaosReport) -> None:
        picture = Group(Text(self._title, "bold"), Text(_progress(report), "cyan"), _table(report))
        self._live.update(picture, refresh=True)

    def over(self, report: ChaosReport) -> None:
        self.changed(report)
        self._live.stop()
        summary, *rest = _conclusion(report)
        self._console.print(Text(summary, "bold green" if report.ok else "bold red"))
        for line in rest:
            self._console.print(Text(line))


def _progress(report: ChaosReport) -> str:
    wrong = ", ".join(f"{number} {name}" for name, number in report.wrong.items() if number) or "nothing wrong"
    return (
        f"{report.seconds:5.1f} s: {report.injected} of {count(report.planned, 'fault')}, "
        f"{report.renewals:,} renewals, {report.delivered:,} results, {wrong}"
    )


def _counts(report: ChaosReport) -> list[tuple[str, str]]:
    return [
        ("renewals", f"{report.renewals:,}"),
        ("results delivered", f"{report.delivered:,}"),
        ("of them failures", f"{report.failures:,}"),
        *((name, str(number)) for name, number in report.wrong.items()),
        *([("bundles", str(report.reproduced))] if report.reproduced else []),
        *([("nodes replaced", str(report.replaced_nodes))] if report.replaced_nodes else []),
        ("longest stall", f"{report.longest_stall:.2f} s"),
    ]


def _table(report: ChaosReport) -> RenderableType:
    table = Table(border_style="dim", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    table.add_column("", justify="right")
    table.add_column("count", no_wrap=True)
    table.add_column("", justify="right")
    faults, counts = list(report.faults.items()), _counts(report)
    for row in range(max(len(faults), len(counts))):
        kind, number = faults[row] if row < len(faults) else ("", 0)
        name, value = counts[row] if row < len(counts) else ("", "")
        style = ""
        if name in report.wrong:
            style = "bold red" if report.wrong[name] else "green"
        table.add_row(kind, str(number) if kind else "", name, Text(value, style))
    return table


def _conclusion(report: ChaosReport) -> list[str]:
    """Return the result in words; the first line is the summary."""
    lines = []
    if report.ok:
        lines.append(
            f"All zeros: {count(report.planned, 'fault')} in {report.seconds:.1f} s, every result accounted for."
        )
    else:
        wrong = ", ".join(f"{name} {number}" for name, number in report.wrong.items() if number)
        lines.append(f"Wrong: {wrong or f'only {report.injected} of {report.planned} faults happened'}.")
    if not report.compared:
        lines.append(
            "The env is not deterministic: values were not compared, only which request each result belongs to."
        )
    details = [*report.problems, *report.leaks]
    lines += details[:_MOST_SHOWN]
    if len(details) > _MOST_SHOWN:
        lines.append(f"... and {len(details) - _MOST_SHOWN} more: --json FILE has them all.")
    return lines
