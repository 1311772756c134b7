"""Running in-line workers in the threads that call them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class InlineRunner:
    """Runs a function in the calling thread, but not within itself.

    Args:
        run_posted: Runs what in-line workers were asked.
    """

    def __init__(self, run_posted: Callable[[], None]) -> None:
        self._run_posted = run_posted
        # Threads that are in `run`. They come and go in any order: each takes out what it has put in, and nothing else.
        self._threads: set[int] = set()

    def run(self) -> None:
        """Run what was asked, unless this thread is in here already, further out."""
        me = threading.get_ident()
        if me in self._threads:
            return
        self._threads.add(me)
        try:
            self._run_posted()
        finally:
            self._threads.discard(me)
