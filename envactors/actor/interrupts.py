"""Holding signals back while state changes: Ctrl-C falls between two changes, never into one."""

from __future__ import annotations

import functools
import os
import signal
import threading

# The functions behind the `signal` module's, a tenth of its time: this stands on the way of every call.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found] # typeshed leaves it out
from _signal import signal as _set_handler
from collections.abc import Callable
from types import FrameType
from typing import Any

# Those whose handlers commonly raise: Ctrl-C, time limits, service managers.
_HELD = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGALRM", "SIGTERM") if hasattr(signal, name))


class Shield:
    """A context in which the main thread's signal handlers wait; they run on the way out.

    Python runs signal handlers in the main thread, between any two of its steps. In other threads, and for
    signals without a handler in Python, the context does nothing.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._handlers: dict[int, Any] = {}
        self._held: list[int] = []
        self.wake: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        if self._depth == 0:
            try:
                for signum in _HELD:
                    if callable(_get_handler(signum)):
                        self._handlers[signum] = _set_handler(signum, self._hold)
            except BaseException:  # one that is not held yet has come in between
                self._lower()
                raise
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if self._depth == 0 and self._handlers:
            self._lower()

    def _lower(self) -> None:
        """Puts the handlers back and runs those that waited; all of them, even if some raise."""
        handlers, self._handlers = self._handlers, {}
        try:
            for signum, handler in handlers.items():
                _set_handler(signum, handler)
            if not self._held:
                return
        except BaseException as error:  # of a signal that is not held any more
            self._run_held(handlers, error)
        else:
            self._run_held(handlers, None)

    def _run_held(self, handlers: dict[int, Any], first: BaseException | None) -> None:
        held, self._held = self._held, []
        left: list[Callable[[], object]] = [
            *(functools.partial(_set_handler, signum, handler) for signum, handler in handlers.items()),
            *(functools.partial(handlers[signum], signum, None) for signum in held),
        ]
        while left:
            try:
                while left:
                    left.pop(0)()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    @property
    def interrupted(self) -> bool:
        """Whether a signal waits and this is the thread that it is for."""
        return bool(self._held) and threading.get_ident() == self._main

    def _hold(self, signum: int, _frame: FrameType | None) -> None:
        self._held.append(signum)
        if self.wake is not None:
            self.wake()

    def _after_fork(self) -> None:
        self._main = threading.main_thread().ident


SHIELD = Shield()
os.register_at_fork(after_in_child=SHIELD._after_fork)
