"""What is put off while the state of an actor changes.

Signal handlers run between two changes: Ctrl-C is never handled within one. What may run code of users, or needs the
lock of another actor, runs once the lock is released.
"""

from __future__ import annotations

import os
import signal
import threading

# The functions behind the `signal` module's take a tenth of their time, and every call enters this context.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found] # typeshed leaves it out
from _signal import signal as _set_handler
from collections import deque
from collections.abc import Callable
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

from envactors.errors import ActorError

# The signals whose handlers commonly raise: Ctrl-C, time limits, service managers.
_COMMON = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGALRM", "SIGTERM") if hasattr(signal, name))
_ALL = tuple(map(int, signal.valid_signals()))
# How often it is looked, in entries of the context, which other signals have handlers: that takes some microseconds.
_LOOK_EVERY = 64


class SignalDeferral:
    """A reentrant context that defers the main thread's signal handlers until it is left.

    Python runs signal handlers in the main thread, between any two bytecode instructions. In other threads, and for
    signals without a handler in Python, the context does nothing. An asynchronous exception or a lack of stack may keep
    it from being left; that is noticed when it is entered again, or when a signal comes.

    Attributes:
        pending: The signals that were deferred, in order.
        wake: Called when a signal is deferred, so that the main thread does not sleep on; None for nothing.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        # The frame of the main thread that has entered the context first, and how often it was entered again since.
        self._frame: FrameType | None = None
        self._nested = 0
        # The signals to defer, and how many entries are left until that is looked up.
        self._signals = _COMMON
        self._until_look = 0
        # The original handler of each signal that is deferred.
        self._handlers: dict[int, Any] = {}
        self.pending: list[int] = []
        self.wake: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if get_ident() != self._main:
            return
        frame, handlers = _getframe(1), self._handlers
        first = self._frame
        if first is not None:
            caller: FrameType | None = frame
            while caller is not None:  # as in `is_on_stack`, which would be a call
                if caller is first:
                    self._nested += 1
                    return
                caller = caller.f_back
        if handlers:
            self._restore()
        self._until_look -= 1
        if self._until_look < 0:
            self._until_look = _LOOK_EVERY
            self._signals = tuple({*_COMMON, *(one for one in _ALL if callable(_get_handler(one)))})
        try:
            self._nested = 0
            # First: a handler that runs in the middle of the rest, and enters the context as well, is within this one.
            self._frame = frame
            for signum in self._signals:
                if callable(handler := _get_handler(signum)):
                    handlers[signum] = handler
                    _set_handler(signum, self._defer)
        except BaseException:  # the handler of a signal that is not deferred yet has raised
            self._restore()
            raise

    def __exit__(self, *exc: object) -> None:
        if get_ident() != self._main:
            return
        if self._nested:
            self._nested -= 1
            return
        # Restore the handlers and run the deferred ones, all of them even if some raise. From here on, handlers may run
        # that enter and leave the context themselves, and do the same.
        self._frame = None
        first_error: BaseException | None = None
        handlers, pending = self._handlers, self.pending
        while handlers or pending:
            try:
                for signum in tuple(handlers):
                    if (handler := handlers.get(signum)) is not None:
                        _set_handler(signum, handler)
                        handlers.pop(signum, None)
                while pending:
                    try:
                        signum = pending.pop(0)
                    except IndexError:  # what a handler has left has run it meanwhile
                        break
                    if callable(handler := _get_handler(signum)):
                        handler(signum, None)
            except BaseException as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _restore(self) -> None:
        self._nested = 0
        self.__exit__()  # one function: the end of each context is on the way of every step

    @property
    def interrupted(self) -> bool:
        """Whether a signal was deferred and this is the main thread."""
        return bool(self.pending) and get_ident() == self._main

    def _defer(self, signum: int, frame: FrameType | None) -> None:
        self.pending.append(signum)
        if not is_on_stack(self._frame, frame):
            self._restore()
        elif self.wake is not None:
            self.wake()

    def _after_fork(self) -> None:
        self._main = threading.main_thread().ident


def is_on_stack(wanted: FrameType | None, frame: FrameType | None) -> bool:
    """Return whether a function has not returned: its frame is ``frame``, or has led there."""
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


defer_signals: SignalDeferral = SignalDeferral()
os.register_at_fork(after_in_child=defer_signals._after_fork)


class DeferredCalls:
    """Runs functions one after the other, each until it has returned once: they must bear being run again.

    A function that raises may have been interrupted, so it runs once more in a thread that nothing interrupts. If it
    raises there too, it is broken: the error is logged, and the remaining functions run.

    Args:
        post: Runs a function soon, in a thread that no signal and no asynchronous exception interrupts.
        is_safe: Returns whether the calling thread is that one.
        report: Logs an error, without waiting for that.

    Attributes:
        waiting: What is still to be run, in order; after an addition `run` is to follow.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        is_safe: Callable[[], bool],
        report: Callable[[BaseException], None],
    ) -> None:
        self._post, self._is_safe, self._report = post, is_safe, report
        self.waiting: deque[Callable[[], None]] = deque()
        # The thread that runs functions adds an entry, and takes it out. No lock: two threads that each run what one
        # actor has left, and come to the other's, must not wait for each other. A dict's setdefault is atomic.
        self._runner: dict[None, object] = {}

    def run(self) -> None:
        """Run the waiting functions, unless another thread or an outer call in this one is already doing so."""
        me, waiting = object(), self.waiting
        try:
            while waiting and self._runner.setdefault(None, me) is me:
                while waiting:
                    try:
                        waiting[0]()
                    except BaseException as error:
                        if not self._is_safe():
                            raise
                        self._report(error)
                    # Taken out last: after an interrupt it runs once more, and finds its future settled.
                    waiting.popleft()
                self._runner.clear()
        except BaseException:
            if self._runner.get(None) is me:
                self._runner.clear()
            self._post(self.run)
            raise


class Changing(Protocol):
    """The state of one actor, as far as each change of it ends alike."""

    is_inconsistent: bool
    deferred: DeferredCalls
    run_inline: Callable[[], None] | None

    def kill_inconsistent(self, *, was_left: bool = False) -> None:
        """Replace the process after an error in the middle of a change, or after an earlier one that is left."""


class StateChange:
    """A change of an actor's state: with signals deferred; what follows from it runs once the lock is released.

    It does not acquire the lock itself; write ``with core.change, core.lock``. An exception between an acquire and the
    end of a Python-level ``__enter__`` would leave the lock held.
    """

    def __init__(self, core: Changing) -> None:
        self._core = core

    __enter__: staticmethod[[], None] = staticmethod(defer_signals.__enter__)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        core = self._core
        try:
            if core.is_inconsistent or (kind is not None and not issubclass(kind, ActorError)):
                was_left = core.is_inconsistent
                core.is_inconsistent = True  # with little stack, the next line may raise
                core.kill_inconsistent(was_left=was_left)
        finally:
            try:
                if core.deferred.waiting:
                    core.deferred.run()
            finally:
                defer_signals.__exit__()
        if core.run_inline is not None:
            core.run_inline()
