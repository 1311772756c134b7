"""Helpers of the live views on a terminal."""

from __future__ import annotations

import sys

from rich.console import Console


def terminal() -> Console | None:
    """Return the terminal to draw on, or None if stdout is none."""
    console = Console()
    # The environment can make Rich treat a pipe as a terminal, where a live view is of no use.
    return console if sys.stdout.isatty() and not console.is_dumb_terminal else None
