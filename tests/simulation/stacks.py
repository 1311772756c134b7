"""What simulated processes run on: greenlets, or threads where greenlet is not installed."""

from __future__ import annotations

import _thread
import importlib.util
from collections.abc import Callable
from typing import Protocol

# Switching between threads takes about a fifth of the time of a history, and between greenlets next to nothing.
HAS_GREENLETS = importlib.util.find_spec("greenlet") is not None
if HAS_GREENLETS:
    from greenlet import getcurrent, greenlet


class Stack(Protocol):
    """What runs a function piece by piece."""

    def resume(self) -> None:
        """Continue the function; return once it pauses or ends."""

    def pause(self) -> None:
        """Called in the function: stop here until it is resumed."""


class GreenletStack:
    """Runs a function in a greenlet.

    Args:
        run: The function, which raises nothing.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._greenlet = greenlet(run)

    def resume(self) -> None:
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()

    def pause(self) -> None:
        parent = self._greenlet.parent
        assert parent is not None, "it was resumed"
        parent.switch()


class ThreadStack:
    """Runs a function in a thread.

    Args:
        run: The function, which raises nothing.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._go = _thread.allocate_lock()
        self._back = _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        _thread.start_new_thread(self._main, ())

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        self._back.release()
        self._go.acquire()

    def _main(self) -> None:
        self._go.acquire()
        try:
            self._run()
        finally:
            self._back.release()


# What simulated processes run on unless a test says otherwise.
make_stack: Callable[[Callable[[], None]], Stack] = GreenletStack if HAS_GREENLETS else ThreadStack
