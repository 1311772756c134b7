"""Warns about slow requests that run in the threads of their callers."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from envactors.actor import slow_calls
from envactors.actor.exits import Step
from envactors.loop import Loop
from envactors.system.threads import current_frames

# How often it looks within the time after which a request is slow.
_LOOKS = 4


class InlineRequest(NamedTuple):
    """A request that is running in a thread of its caller.

    Attributes:
        actor: The actor that runs it.
        step: The request.
        key: Differs from those of all other requests.
        thread: The identifier of the thread.
    """

    actor: slow_calls.SlowActor
    step: Step
    key: object
    thread: int


class InlineWatch:
    """Looks a few times, while requests run, whether the same one is still running.

    So requests need not record when they begin, and a warning comes up to a quarter later than in a worker.

    Args:
        loop: Runs the looks.
        slow: After how many seconds a request is slow; None to warn about none.
        find_running: Returns the current request; None if nothing is running.
    """

    def __init__(self, loop: Loop, slow: float | None, find_running: Callable[[], InlineRequest | None]) -> None:
        self._loop = loop
        self._slow = slow
        self._find_running = find_running
        self._is_looking = False
        # The request that was running at the last look, when it was first seen, and whether it was reported.
        self._seen: object = None
        self._since = 0.0
        self._is_reported = False

    def begin(self) -> None:
        """Look after requests from now on; called when one has begun."""
        if not self._is_looking and self._slow is not None:
            self._look_later(self._slow)

    def _look_later(self, slow: float) -> None:
        self._is_looking = True
        self._loop.call_at(time.monotonic() + slow / _LOOKS, functools.partial(self._look, slow))

    def _look(self, slow: float) -> None:
        self._is_looking = False
        running, now = self._find_running(), time.monotonic()
        if running is None:
            return
        if running.key != self._seen:
            self._seen, self._since, self._is_reported = running.key, now, False
        elif not self._is_reported and now - self._since >= slow:
            self._is_reported = True
            read_stack = functools.partial(stack_of, running.thread)
            slow_calls.warn(running.actor, running.step, now - self._since, read_stack)
        self._look_later(slow)


def stack_of(thread: int | None) -> str:
    """Return the stack of a thread of this process that runs env code; None if there is none."""
    frame = None if thread is None else current_frames().get(thread)
    return "no env code is running\n" if frame is None else "".join(traceback.format_stack(frame))
