"""The threads of a schedule, each carried by a real thread that is used again for the next schedule."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol


class Aborted(BaseException):
    """Raised in the threads that are left when a schedule is over."""


class Interruption(BaseException):
    """Raised at a line of a thread that may be interrupted, as a signal handler may do."""


class Task:
    """One thread of a schedule.

    Args:
        name: Its name in messages.
        function: What it runs.
        go: A lock that is released when the thread may run.
        is_daemon: Whether the schedule may end before the thread does.

    Attributes:
        blocked_on: Returns whether the thread can continue; None while nothing keeps it from running.
        deadline: When it continues in any case (virtual time); None for never.
        place: What it is blocked on, for messages.
        is_at_lock: Whether that is a lock, which its owner should release.
        condition: What it waits for, if it has said so with `Run.waiting_for`.
        interruptible: The ids of the code at whose lines it may be interrupted; empty once it was.
        seen: The lines of this code that it has come to, by frame.
        ran_at: The step at which it was last switched to.
        is_fresh: Whether it has been at a switch point since it last used a primitive.
        ended: Whether it has ended.
        error: What it raised.
        aborts: How many times `Aborted` was raised in it.
        ident: The id of the thread.
        owner: The `simulation.primitives.Thread` that it runs for, if any.
    """

    def __init__(self, name: str, function: Callable[[], object], go: Any, *, is_daemon: bool) -> None:
        self.name = name
        self.function = function
        self.go = go
        self.is_daemon = is_daemon
        self.blocked_on: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.place = ""
        self.is_at_lock = False
        self.condition: Callable[[], bool] | None = None
        self.interruptible: frozenset[int] = frozenset()
        self.seen: set[tuple[FrameType, int]] = set()
        self.ran_at = -1
        self.is_fresh = False
        self.ended = False
        self.error: BaseException | None = None
        self.aborts = 0
        self.ident = 0
        self.owner: object = None

    @property
    def can_run(self) -> bool:
        """Whether it has something to do now."""
        return not self.ended and (self.blocked_on is None or self.blocked_on())


class TaskRunner(Protocol):
    """What a thread needs of the schedule that it belongs to.

    Attributes:
        is_aborting: Whether the schedule is over and what is left of it ends.
    """

    is_aborting: bool

    def begin_tracing(self) -> None:
        """Trace the current thread from here on."""

    def end(self, task: Task) -> None:
        """Let another thread run once a task has ended."""


class Carriers:
    """Real threads that run tasks and are used again: starting one takes longer than most schedules."""

    def __init__(self) -> None:
        self._idle: list[_Carrier] = []
        # The ids of all of them: threads with other ids use the real primitives.
        self.idents: set[int] = set()

    def assign(self, run: TaskRunner, name: str, function: Callable[[], object], *, is_daemon: bool) -> Task:
        """Make a task of an idle thread or a new one."""
        carrier = self._idle.pop() if self._idle else _Carrier(self)
        task = Task(name, function, carrier.go, is_daemon=is_daemon)
        task.ident = carrier.ident
        self.idents.add(carrier.ident)
        carrier.work = (run, task)
        return task

    def put_back(self, carrier: _Carrier) -> None:
        self._idle.append(carrier)

    def close(self) -> None:
        """End the threads that are idle; others are blocked for good."""
        for carrier in self._idle:
            carrier.work = None
            carrier.go.release()
            carrier.join()


class _Carrier:
    """A real thread that runs one task after the other."""

    def __init__(self, carriers: Carriers) -> None:
        self._carriers = carriers
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.work: tuple[TaskRunner, Task] | None = None
        self._thread = threading.Thread(target=self._main, name="explored", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None, "it has started"
        self.ident = self._thread.ident

    def join(self) -> None:
        self._thread.join()

    def _main(self) -> None:
        self.go.acquire()
        while self.work is not None:
            run, task = self.work
            try:
                if not run.is_aborting:
                    run.begin_tracing()
                    task.function()
            except Aborted:
                pass
            except BaseException as error:
                task.error = error
            finally:
                sys.settrace(None)
            self.work = None
            del task.function
            self._carriers.put_back(self)
            run.end(task)
            del run, task
            self.go.acquire()
