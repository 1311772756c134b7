"""Locks, conditions, threads, and clocks that a `simulation.schedule` controls.

`controlled` puts them, and the doorbells and pollers of `simulation.descriptors`, in place of the real ones in the
modules under test. Only threads of the explorer get them; all other threads of the process keep the real ones.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from envactors.system.polling import Doorbell, Poller, remaining
from simulation.descriptors import ControlledDoorbell, ControlledPoller
from simulation.schedule import Run
from simulation.tasks import Carriers, Task

# A lock may be taken this often by others before a thread that waits for it gets it.
_MOST_PASSED = 3


class ControlledLock:
    """Replaces `threading.Lock`.

    Args:
        run: The schedule.
    """

    _place = "a lock"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._owner: Task | None = None
        self._count = 0
        # How many threads wait for it, and how often others have had it since the last of them got it.
        self._waiting = self._passed = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._run.enter()
        if task is None:
            return True
        if not self._is_free(task):
            if not blocking:
                return False
            deadline = None if timeout < 0 else self._run.now + timeout
            self._waiting += 1
            try:
                while not self._is_free(task):
                    if not self._run.block(lambda: self._owner is None, deadline, self._place, is_lock=True):
                        return False
            finally:
                self._waiting -= 1
            self._passed = 0
        self._take(task)
        return True

    def release(self) -> None:
        if self._run.current is None or self._run.is_aborting:
            return
        self._check_release()
        self._count -= 1
        if self._count == 0:
            self._owner = None
            if self._waiting:
                self._passed += 1
                if self._passed > _MOST_PASSED:
                    self._run.give_way()

    def locked(self) -> bool:
        self._run.enter()
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_free(self, task: Task) -> bool:
        del task
        return self._owner is None

    def _take(self, task: Task) -> None:
        self._owner = task
        self._count += 1

    def _check_release(self) -> None:
        if self._owner is None:
            raise RuntimeError("release unlocked lock")


class ControlledRLock(ControlledLock):
    """Replaces `threading.RLock`."""

    def _is_free(self, task: Task) -> bool:
        return self._owner is None or self._owner is task

    def _check_release(self) -> None:
        if self._owner is not self._run.current:
            raise RuntimeError("cannot release un-acquired lock")


class ControlledCondition:
    """Replaces `threading.Condition`.

    Args:
        run: The schedule.
        lock: Its lock; None makes one.
    """

    def __init__(self, run: Run, lock: ControlledLock | None = None) -> None:
        self._run = run
        self._lock = ControlledRLock(run) if lock is None else lock
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        # Those that wait, oldest first; each entry is emptied by a notification.
        self._waiters: deque[list[None]] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        run, lock = self._run, self._lock
        task = run.enter()
        if task is None:
            return True
        if lock._owner is not task:
            raise RuntimeError("cannot wait on un-acquired lock")
        waiter: list[None] = [None]
        self._waiters.append(waiter)
        count, lock._count = lock._count, 0
        lock._owner = None
        deadline = None if timeout is None else run.now + timeout
        was_notified = run.block(lambda: not waiter, deadline, "a notification")
        if not was_notified and waiter in self._waiters:
            self._waiters.remove(waiter)
        while lock._owner is not None:
            run.block(lambda: lock._owner is None, None, "the lock of a condition", is_lock=True)
        lock._owner, lock._count = task, count
        return was_notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._run.now + timeout
        while not predicate():
            if not self.wait(None if deadline is None else deadline - self._run.now):
                return predicate()
        return True

    def notify(self, n: int = 1) -> None:
        self._run.enter()
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft().clear()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class ControlledEvent:
    """Replaces `threading.Event`.

    Args:
        run: The schedule.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._run.enter()
        self._is_set = True

    def clear(self) -> None:
        self._run.enter()
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._run.enter() is None or self._is_set:
            return self._is_set
        return self._run.block(self.is_set, None if timeout is None else self._run.now + timeout, "an event")


class ControlledThread:
    """Replaces `threading.Thread`; a schedule may end before it does.

    Args:
        run: The schedule.
        target: What it runs.
        name: Its name.
    """

    def __init__(
        self,
        run: Run,
        target: Callable[..., object],
        name: str = "thread",
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._run = run
        self._target = lambda: target(*args, **(kwargs or {}))
        self.name = name
        self.daemon = daemon
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    def start(self) -> None:
        self._run.enter()
        self._task = self._run.start_task(self.name, self._target, self)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        if self._run.enter() is not None and self.is_alive():
            deadline = None if timeout is None else self._run.now + timeout
            self._run.block(lambda: not self.is_alive(), deadline, f"the end of {self.name}")


class _Module(types.ModuleType):
    """A module in which some names mean something else."""

    def __init__(self, real: ModuleType, names: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(names)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def controlled(modules: Sequence[ModuleType], carriers: Carriers) -> Iterator[None]:
    """Put the controlled primitives in place of the real ones in some modules.

    Args:
        modules: The modules.
        carriers: The threads that get controlled ones.
    """

    def run() -> Run | None:
        return Run.active if threading.get_ident() in carriers.idents else None

    def choose(real: Any, make: Any) -> Any:
        def make_either(*args: Any, **kwargs: Any) -> Any:
            active = run()
            return real(*args, **kwargs) if active is None else make(active, *args, **kwargs)

        return make_either

    def monotonic() -> float:
        active = run()
        if active is None:
            return time.monotonic()
        return active.now

    def sleep(seconds: float) -> None:
        active = run()
        if active is None:
            time.sleep(seconds)
        elif active.enter() is not None:
            active.block(lambda: False, active.now + seconds, "time")

    def time_left(deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - monotonic())

    def current_thread() -> Any:
        active = run()
        task = None if active is None else active.current
        return threading.current_thread() if task is None or task.owner is None else task.owner

    threads = _Module(
        threading,
        {
            "Lock": choose(threading.Lock, ControlledLock),
            "RLock": choose(threading.RLock, ControlledRLock),
            "Condition": choose(threading.Condition, ControlledCondition),
            "Event": choose(threading.Event, ControlledEvent),
            "Thread": choose(threading.Thread, ControlledThread),
            "current_thread": current_thread,
        },
    )
    clock = _Module(time, {"monotonic": monotonic, "sleep": sleep})
    replacements = [
        ("threading", threading, threads),
        ("time", time, clock),
        ("remaining", remaining, time_left),
        ("Poller", Poller, choose(Poller, ControlledPoller)),
        ("Doorbell", Doorbell, choose(Doorbell, ControlledDoorbell)),
    ]
    undo: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in modules:
            for name, real, ours in replacements:
                if vars(module).get(name) is real:
                    undo.append((module, name, real))
                    setattr(module, name, ours)
        yield
    finally:
        for module, name, real in undo:
            setattr(module, name, real)
