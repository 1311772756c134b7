"""What all that is drawn on a terminal has in common."""

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
    """Draws something again and again, in place; also a context manager.

    Args:
        console: Where to draw.
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
        """Draws no more, and prints how it went below; the first line in the colour of that."""
        self._live.stop()
        verdict, *rest = lines
        self._console.print(Text(verdict, "bold green" if good else "bold red"))
        for line in rest:
            self._console.print(Text(line))


def terminal() -> Console | None:
    """The terminal to draw on; None where there is none."""
    console = Console()
    # Rich takes a pipe for a terminal where it is told to by the environment; a live view is of no use there.
    return console if sys.stdout.isatty() and not console.is_dumb_terminal else None


def plain_table(*, show_footer: bool = False) -> Table:
    """An empty table with nothing but a line below its head."""
    return Table(border_style="dim", show_footer=show_footer, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
