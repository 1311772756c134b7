"""Base of the live views on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_View = TypeVar("_View", bound="LiveView")


class LiveView:
    """Redraws a picture in place; a context manager.

    Args:
        console: Terminal to draw on.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self: _View) -> _View:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def _show(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def _conclude(self, lines: Sequence[str], good: bool) -> None:
        """Stop drawing and print the result; the first line is green if ``good``, else red."""
        self._live.stop()
        summary, *rest = lines
        self._console.print(Text(summary, "bold green" if good else "bold red"))
        for line in rest:
            self._console.print(Text(line))


def terminal() -> Console | None:
    """Return the terminal to draw on, or None if stdout is none."""
    console = Console()
    # The environment can make Rich treat a pipe as a terminal, where a live view is of no use.
    return console if sys.stdout.isatty() and not console.is_dumb_terminal else None


def plain_table(*, show_footer: bool = False) -> Table:
    """Return an empty table with a line below its head and no other borders."""
    return Table(border_style="dim", show_footer=show_footer, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
