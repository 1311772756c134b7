"""Deferral of signal handlers while state changes: Ctrl-C is handled between two changes, never within one."""

from __future__ import annotations

import functools
import os
import signal
import threading

# The functions behind the `signal` module's take a tenth of their time, and every call enters this context.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found] # typeshed leaves it out
from _signal import signal as _set_handler
from collections.abc import Callable
from types import FrameType
from typing import Any

# The signals whose handlers commonly raise: Ctrl-C, time limits, service managers.
_DEFERRED = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGALRM", "SIGTERM") if hasattr(signal, name))


class SignalDeferral:
    """A reentrant context that defers the main thread's signal handlers until it is left.

    Python runs signal handlers in the main thread, between any two bytecode instructions. In other threads, and for
    signals without a handler in Python, the context does nothing.

    Attributes:
        wake: Called when a signal is deferred, so that the main thread does not sleep on; None for nothing.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        # How many times the main thread has entered the context.
        self._depth = 0
        # The original handler of each signal, while the context is entered.
        self._handlers: dict[int, Any] = {}
        # The signals that came meanwhile, in order.
        self._pending: list[int] = []
        self.wake: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        if self._depth == 0:
            try:
                for signum in _DEFERRED:
                    if callable(_get_handler(signum)):
                        self._handlers[signum] = _set_handler(signum, self._defer)
            except BaseException:  # the handler of a signal that is not deferred yet has raised
                self._restore()
                raise
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if self._depth == 0 and self._handlers:
            self._restore()

    def _restore(self) -> None:
        """Restore the handlers and run the deferred ones, all of them even if some raise."""
        handlers, self._handlers = self._handlers, {}
        try:
            for signum, handler in handlers.items():
                _set_handler(signum, handler)
            if not self._pending:
                return
        except BaseException as error:  # raised by the handler of a signal that is not deferred any more
            self._run_pending(handlers, error)
        else:
            self._run_pending(handlers, None)

    def _run_pending(self, handlers: dict[int, Any], first_error: BaseException | None) -> None:
        pending, self._pending = self._pending, []
        left: list[Callable[[], object]] = [
            *(functools.partial(_set_handler, signum, handler) for signum, handler in handlers.items()),
            *(functools.partial(handlers[signum], signum, None) for signum in pending),
        ]
        while left:
            try:
                while left:
                    left.pop(0)()
            except BaseException as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    @property
    def interrupted(self) -> bool:
        """Whether a signal was deferred and this is the main thread."""
        return bool(self._pending) and threading.get_ident() == self._main

    def _defer(self, signum: int, _frame: FrameType | None) -> None:
        self._pending.append(signum)
        if self.wake is not None:
            self.wake()

    def _after_fork(self) -> None:
        self._main = threading.main_thread().ident


defer_signals = SignalDeferral()
os.register_at_fork(after_in_child=defer_signals._after_fork)
