"""Helpers of the live views on a terminal."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def terminal() -> Console | None:
    """Return the terminal to draw on, or None if stdout is none."""
    console = Console()
    # The environment can make Rich treat a pipe as a terminal, where a live view is of no use.
    return console if sys.stdout.isatty() and not console.is_dumb_terminal else None


def plain_table(*, show_footer: bool = False) -> Table:
    """Return an empty table with a line below its head and no other borders."""
    return Table(border_style="dim", show_footer=show_footer, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
