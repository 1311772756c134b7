"""How ``envactors chaos`` shows a storm: as a live table, or in plain lines."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from envactors.cli.reports import LineView, count
from envactors.cli.views import LiveView, plain_table
from envactors.testing.tally import ChaosReport

_LINE_SECONDS = 5.0
_MOST_SHOWN = 5


class Weather(AbstractContextManager["Weather"], Protocol):
    """Shows a storm."""

    def changed(self, report: ChaosReport) -> None:
        """Shows how it stands."""

    def over(self, report: ChaosReport) -> None:
        """Shows how it has ended."""


class PlainWeather(LineView):
    """Prints a line now and then, and the counts at the end.

    Args:
        stream: Where to print.
        title: What comes first.
    """

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream)
        self._title = title
        self._printed = 0.0

    def __enter__(self) -> PlainWeather:
        self._print(self._title)
        self._printed = time.monotonic()
        return self

    def changed(self, report: ChaosReport) -> None:
        if time.monotonic() >= self._printed + _LINE_SECONDS:
            self._printed = time.monotonic()
            self._print(_progress(report))

    def over(self, report: ChaosReport) -> None:
        faults = ", ".join(f"{kind} {number}" for kind, number in report.faults.items())
        self._print(f"faults: {report.injected} of {report.planned} ({faults})")
        for name, value in _counts(report):
            self._print(f"{name}: {value}")
        for line in _verdict(report):
            self._print(line)


class LiveWeather(LiveView):
    """Draws the counts again and again, in place.

    Args:
        console: Where to draw.
        title: What stands above.
    """

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console)
        self._title = title

    def changed(self, report: ChaosReport) -> None:
        self._show(Group(Text(self._title, "bold"), Text(_progress(report), "cyan"), _table(report)))

    def over(self, report: ChaosReport) -> None:
        self.changed(report)
        self._conclude(_verdict(report), report.ok)


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
        ("longest stall", f"{report.longest_stall:.2f} s"),
    ]


def _table(report: ChaosReport) -> RenderableType:
    table = plain_table()
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


def _verdict(report: ChaosReport) -> list[str]:
    """How it went, the first line in short."""
    lines = []
    if report.ok:
        lines.append(
            f"All zeros: {count(report.planned, 'fault')} in {report.seconds:.1f} s, every result accounted for."
        )
    else:
        wrong = ", ".join(f"{name} {number}" for name, number in report.wrong.items() if number)
        lines.append(f"Wrong: {wrong or f'only {report.injected} of {report.planned} faults happened'}.")
    if not report.compared:
        lines.append("The env gives other results each time: what they say was not compared, only whose they are.")
    told = [*report.problems, *report.leaks]
    lines += told[:_MOST_SHOWN]
    if len(told) > _MOST_SHOWN:
        lines.append(f"... and {len(told) - _MOST_SHOWN} more of that: --json FILE has them all.")
    return lines
