"""The threads that serve all actors of this process: the loop, the launcher, callbacks, and printing.

They start with the first actor and end with the last one. A forked child has none of them and starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
from _thread import LockType, allocate_lock
from collections.abc import Callable, Sequence
from typing import Protocol

from envactors import services
from envactors.loop import Loop
from envactors.threads import LibraryThread

_log = logging.getLogger("envactors")
# How long a function waits behind others before its pool adds a thread, in seconds.
_PATIENCE = 0.1
# How long actors may take to close after Ctrl-C, and those that are left at the exit of the program, in seconds.
_EXIT_PATIENCE = 3.0
_JOIN_PATIENCE = 1.0
# How many log records may wait for slow handlers.
_MOST_RECORDS = 1 << 13


class ThreadPool:
    """Threads that run functions which may block, in the order of their submission.

    A blocked function may wait for one that is queued behind it, so with a loop the pool adds a thread whenever no
    function was started for a moment although some wait. Without a loop there is one thread, until `stop`.

    Args:
        name: Name of the threads.
        runs_user_code: Whether code of users runs in the threads.
        loop: Runs the timer that adds threads; None to add none.
    """

    def __init__(self, name: str, *, runs_user_code: bool, loop: Loop | None = None) -> None:
        self._name = name
        self._runs_user_code = runs_user_code
        self._loop = loop
        # `put` is reentrant and enters no lock in Python code, so signal handlers and finalizers may submit functions.
        # None wakes a thread to see that the pool is stopping; each thread that ends wakes the next one.
        self._functions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._start_count = 0  # how many functions were started
        self._is_watched = False  # whether a timer is set that adds a thread
        self._is_stopping = False
        self._first_thread = self._add_thread()

    def submit(self, function: Callable[[], object]) -> None:
        """Queue a function. After `stop`, the threads may have ended, so another one runs it."""
        self._functions.put(function)
        if self._is_stopping:
            self._add_thread()
        elif self._loop is not None and not self._is_watched:
            self._loop.call_soon(functools.partial(self._watch, self._loop))

    def count_waiting(self) -> int:
        """Return how many functions wait for a thread."""
        return self._functions.qsize()

    def stop(self) -> None:
        """Let the threads end once the queue is empty; do not wait for them."""
        self._is_stopping = True
        self._functions.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the first thread to end, unless it is the calling one."""
        if self._first_thread is not threading.current_thread():
            self._first_thread.join(timeout)

    def _watch(self, loop: Loop) -> None:
        """Set the timer that adds a thread if functions are stuck. Runs in the loop, where no interrupt can end it."""
        if not self._is_watched:
            self._is_watched = True
            add_thread = functools.partial(self._add_thread_if_stuck, loop, self._start_count)
            loop.call_at(time.monotonic() + _PATIENCE, add_thread)

    def _add_thread_if_stuck(self, loop: Loop, started: int) -> None:
        """Add a thread if functions wait and none was started since ``started`` of them were; look again later."""
        self._is_watched = False  # so that a function that is submitted from here on is watched
        if self._functions.empty() or self._is_stopping:
            return
        self._watch(loop)
        if self._start_count == started:
            self._add_thread()

    def _add_thread(self) -> threading.Thread:
        thread = LibraryThread(self._run, self._name, runs_user_code=self._runs_user_code)
        thread.start()
        return thread

    def _run(self) -> None:
        while not (self._is_stopping and self._functions.empty()):
            function = self._functions.get()
            if function is None:
                continue
            self._start_count += 1
            try:
                function()
            except BaseException as error:
                log_error(f"a function raised in the thread {self._name}", error)
            del function
        self._functions.put(None)


class Launcher:
    """Starts workers in one thread that outlives them: the kernel ends some workers with the thread that started them.

    A start is a function, by which it is withdrawn and finished, too: the same bound method of an actor each time.

    An interrupt may end a method between any two statements. So `submit` and `finish` first have the launcher's thread
    look for a start that may begin, and then change the record, both under the lock. The look needs the lock, too, so
    it sees the change. `withdraw` lets no start begin.
    """

    def __init__(self) -> None:
        self._pool = ThreadPool("envactors-launcher", runs_user_code=False)
        self._lock = threading.RLock()
        self._waiting: dict[Callable[[], object], int | None] = {}
        self._starting: set[Callable[[], object]] = set()

    def submit(self, start: Callable[[], object], limit: int | None) -> None:
        """Call a function once fewer than ``limit`` starts with a limit are unfinished; None for no limit.

        A start without a limit begins at once and does not count, such as one that has to wait for a node.
        """
        with self._lock:
            self._pool.submit(self._begin_next)
            self._waiting[start] = limit

    def withdraw(self, start: Callable[[], object]) -> bool:
        """Remove a start that has not begun; return whether there was one."""
        with self._lock:
            return self._waiting.pop(start, self) is not self

    def finish(self, start: Callable[[], object]) -> None:
        """Record that a start has succeeded or failed, so that others may begin."""
        with self._lock:
            self._pool.submit(self._begin_next)
            self._starting.discard(start)

    def _begin_next(self) -> None:
        """Begin the first start that its limit allows. Only the launcher's thread calls this, so no start is lost."""
        with self._lock:
            allowed = (one for one, most in self._waiting.items() if most is None or len(self._starting) < most)
            start = next(allowed, None)
            if start is None:
                return
            if self._waiting.pop(start) is not None:
                self._starting.add(start)
        start()

    def stop(self) -> None:
        """Let the thread end."""
        self._pool.stop()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end."""
        self._pool.join(timeout)


class Member(Protocol):
    """An actor, as the runtime closes it at the exit of the program.

    Attributes:
        runtime: The runtime that it has joined.
    """

    runtime: Runtime

    def begin_close(self, timeout: float | None, began: float | None = None) -> None:
        """Start to close it.

        Args:
            timeout: How long that may take, in seconds.
            began: When that time began (`time.monotonic`); None for now.
        """

    def wait_closed(self, timeout: float | None, began: float | None = None) -> None:
        """Wait until it is closed; for the arguments see `begin_close`."""


class Runtime:
    """The threads of this process.

    Attributes:
        members: The actors that they serve, in the order in which they were made, each with its serial number.
        loop: The event loop.
        launcher: Starts workers.
        callbacks: Runs callbacks of futures, and other functions that may take long.
        printer: Prints the output of workers and logs, in order.
        has_ended: Whether the last actor has ended, so that the threads are ending.
    """

    def __init__(self) -> None:
        self.members: dict[Member, int] = {}
        self.has_ended: bool = False
        self._join_deadline = math.inf
        # How many records were dropped since that was last reported. No lock guards it: signal handlers may log, too.
        self._dropped = 0
        self._services: list[services.Service] = []
        self.printer: ThreadPool = ThreadPool("envactors-printer", runs_user_code=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self.printer.stop)
            self.loop: Loop = Loop(self._report)
            undo.callback(self.loop.stop)
            self.launcher: Launcher = Launcher()
            undo.callback(self.launcher.stop)
            self.callbacks: ThreadPool = ThreadPool("envactors-callbacks", runs_user_code=True, loop=self.loop)
            undo.callback(self.callbacks.stop)
            for service in filter(None, (start(self.loop) for start in services.on_start)):
                undo.callback(service.close)
                self._services.append(service)
            undo.pop_all()

    def log(self, log: Callable[[], object]) -> None:
        """Call a function that logs, in a thread where handlers may block; drop and count it if too many wait."""
        if self.printer.count_waiting() < _MOST_RECORDS:
            self.printer.submit(functools.partial(self._log, log))
        else:
            self._dropped += 1

    def _log(self, log: Callable[[], object]) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            _log.warning("%d log records were dropped: handlers did not take them in time", dropped)
        log()

    def _report(self, error: BaseException) -> None:
        self.log(lambda: log_error("an internal callback of envactors raised; all actors continue", error))

    def leave(self, member: Member) -> None:
        """Remove an actor that has ended; with the last one, end the threads."""
        with _lock:
            self.members.pop(member, None)
            self.end_if_unused()

    def end_if_unused(self) -> None:
        """End the threads if there are no actors: none has joined yet, since it was interrupted, or all have left."""
        global _runtime
        with _lock:
            if self.members or self.has_ended:
                return
            self.loop.call_soon(self.end_if_unused)  # it completes this after an interrupt
            if _runtime is self:
                _runtime = None
            for service in self._services:
                service.close()
            self._join_deadline = time.monotonic() + _JOIN_PATIENCE
            self.launcher.stop()
            self.callbacks.stop()
            self.printer.stop()
            self.loop.stop()
            self.has_ended = True

    def join_if_ended(self) -> None:
        """If the last actor has ended, wait until the threads have, too, up to a second after its end.

        Callbacks may block, so nobody waits for theirs.
        """
        if self.has_ended:
            for join in (self.loop.join, self.launcher.join, self.printer.join, *(one.join for one in self._services)):
                join(max(0.0, self._join_deadline - time.monotonic()))


_lock = threading.RLock()
_runtime: Runtime | None = None
_serials = itertools.count()
# How many forks lie between this process and the one that imported this module.
forks: int = 0


def enroll(member: Member) -> None:
    """Add an actor to the runtime, and set its ``runtime``."""
    while True:
        with _lock:
            if _runtime is not None:
                member.runtime = _runtime
                _runtime.members[member] = next(_serials)
                return
        _start_runtime()


def _start_runtime() -> None:
    """Start the runtime in a new thread, where no exception from a signal handler can leave it half built."""
    gate, errors = allocate_lock(), list[BaseException]()
    gate.acquire()
    LibraryThread(functools.partial(_build_runtime, gate, errors), "envactors-start", runs_user_code=False).start()
    gate.acquire()
    if errors:
        raise errors[0]


def _build_runtime(gate: LockType, errors: list[BaseException]) -> None:
    """Build the runtime if there is none. It ends soon unless an actor joins it."""
    global _runtime
    try:
        with _lock:
            if _runtime is None:
                atexit.unregister(_close_all)
                atexit.register(_close_all)
                _runtime = Runtime()
                _runtime.loop.call_at(time.monotonic() + _JOIN_PATIENCE, _runtime.end_if_unused)
    except BaseException as error:
        errors.append(error)
    finally:
        gate.release()


def runtime_of(member: Member) -> Runtime | None:
    """Return the runtime of an actor; None if the actor has not joined it, or has left it. Takes no lock."""
    runtime = _runtime
    return runtime if runtime is not None and member in runtime.members else None


def members() -> dict[Member, int]:
    """Return the actors of this process that have not ended, each with a serial number that no other has."""
    with _lock:
        return {} if _runtime is None else dict(_runtime.members)


def log_error(text: str, error: BaseException) -> None:
    """Log an error, even if the logging of the program fails. Call this only where handlers may block."""
    try:
        _log.error("%s", text, exc_info=error)
    except BaseException:  # a filter or handler of the user's
        with contextlib.suppress(Exception):  # stderr may be closed
            traceback.print_exception(type(error), error, error.__traceback__)


def close_members(members: Sequence[Member], timeout: float | None) -> None:
    """Close actors side by side. After Ctrl-C this takes no longer than at the exit of the program.

    Args:
        members: The actors.
        timeout: How long that may take, in seconds; None for their close deadlines.
    """
    began = time.monotonic()
    is_interrupted = timeout is None and isinstance(sys.exc_info()[1], KeyboardInterrupt)
    for member in members:
        member.begin_close(timeout, began)
        if is_interrupted:
            member.begin_close(_EXIT_PATIENCE, began)
    for member in members:
        member.wait_closed(timeout, began)


def _close_all() -> None:
    if (runtime := _runtime) is not None:
        close_members(list(runtime.members), _EXIT_PATIENCE)
        runtime.join_if_ended()


def _reset_after_fork() -> None:
    global _runtime, _lock, forks
    _runtime = None
    _lock = threading.RLock()
    forks += 1


os.register_at_fork(after_in_child=_reset_after_fork)
