"""Runs the requests of in-process workers in the calling thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

from envactors.actor.core import ActorCore
from envactors.actor.signal_deferral import is_on_stack
from envactors.system.polling import READABLE


class InlineTurns:
    """Runs the in-line worker of one actor, and starts it.

    Args:
        core: The actor's state.
        launch: Starts a worker.
        on_channel: Reads its replies.

    Attributes:
        launch_due: Whether a worker is to be started by the thread that leaves the lock.
    """

    def __init__(self, core: ActorCore, launch: Callable[[], None], on_channel: Callable[[int], None]) -> None:
        self._core = core
        self._launch = launch
        self._on_channel = on_channel
        self.launch_due: bool = False
        # The threads in `run`. They come and go in any order: each takes out what it has put in, and nothing else.
        self._threads: dict[int, FrameType] = {}

    def run(self) -> None:
        """Run the posted requests, unless an outer call in this thread is already doing so.

        Called without the lock, since env code runs in here.
        """
        me = threading.get_ident()
        if self._threads and is_on_stack(self._threads.get(me), sys._getframe()):
            return
        process = self._core.process
        try:
            self._threads[me] = sys._getframe()
            if self.launch_due:
                with self._core.lock:
                    due, self.launch_due = self.launch_due, False
                if due:
                    self._launch()
            while (process := self._core.process) is not None and process.worker.work():
                self._on_channel(READABLE)
            if process is not None and process.on_ring is not None:
                process.on_ring()
        except BaseException:  # of the library's own lines: what env code raises is the outcome of its request
            with self._core.lock:
                if self._core.process is process:  # else the change that was interrupted has replaced it
                    self._core.kill_inconsistent()
            raise
        finally:
            self._threads.pop(me, None)
