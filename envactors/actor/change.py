"""The lock of an actor or of all actors of a vector, and the rule about interrupted changes.

All state of an actor is changed like this:

    with self.lock, self.lock.change(self):
        self.jobs.enqueue(job)

An exception from a signal handler, an asynchronous exception, or a RecursionError can end a change of the state at any
point. Nobody tries to prevent or to undo that. Instead:

1. Every change is made in ``with lock, lock.change(*actors):``, which names the actors that it concerns. It is short
   and runs no code of users. It raises nothing, except bugs, and refusals at a point where the invariant holds
   (`ChangeLock.end_with`). Waiting, pickling, and copying happen outside.
2. Between changes, the state satisfies an invariant. For an actor, see `envactors.actor.job_queue.JobQueue` and
   `envactors.actor.actor.Actor`; for an env, see `envactors.vector.table.EnvTable`.
3. The next change calls ``repair()`` of the actors that an interrupted change has named. It establishes the invariant
   from any state: jobs that may have been sent fail, envs need a reset, and the process is replaced. So an interrupt
   may come between any two statements of a change.

In-process actors make no changes: their env code runs under the lock alone.

State that the invariant does not mention is changed under the lock alone, without a change: the loan of a channel,
which its timer ends whatever happens, the recording of times, the parameters of policies, and the buffers of
trajectories.

A change, or the repair of one, ends in one of three ways:

===========================  =========================================================================================
it returns, or refuses       done
an exception in a thread     interrupted: the next change first repairs the actors, whose processes are replaced
that runs code of users
an exception in another      a bug of this library, which another process would meet again: the repair closes the
thread of this library       actors with it. If that repair raises, too, it is not made again
===========================  =========================================================================================

An exception while a thread waits does no harm, since waiting changes nothing.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from envactors.threads import runs_library_code_only

if TYPE_CHECKING:
    from envactors.runtime import Runtime

    class RLock:
        """`_thread.RLock`, which type checkers do not know as a class."""

        def __enter__(self) -> bool: ...
        def __exit__(self, *_: object) -> None: ...
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
        def _is_owned(self) -> bool: ...

else:
    from _thread import RLock


AnyError = TypeVar("AnyError", bound=Exception)


class Changeable(Protocol):
    """An actor, as its lock uses it."""

    runtime: Runtime

    @property
    def name(self) -> str: ...

    def repair(self, bug: BaseException | None) -> None:
        """Establish the invariant from any state.

        Args:
            bug: The error of this library that has ended the change; None if it was interrupted.
        """


class ChangeLock(RLock):
    """The lock, with the actors that the current change concerns.

    It is a reentrant lock of `_thread`, which ``with`` enters and leaves in single steps that no exception can
    interrupt. It is reentrant, since code of an in-process env may use other envs. And a signal handler or a finalizer
    that uses an actor in the middle of a change gets an error rather than a deadlock.

    Attributes:
        last_call_id: The last call id that was given to a job of these actors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_call_id: int = 0
        self._actors: tuple[Changeable, ...] = ()
        self._changing_frame: FrameType | None = None  # the frame that makes or repairs the change
        self._bug: BaseException | None = None  # the error of this library that has ended the change
        self._scope = _Scope(self)

    def next_call_id(self) -> int:
        """Return a new call id. Call this under the lock."""
        self.last_call_id += 1
        return self.last_call_id

    def change(self, *actors: Changeable) -> _Scope:
        """Return the context of a change of these actors, once an interrupted change was repaired.

        The lock must be held.

        Raises:
            RuntimeError: A signal handler or a finalizer has interrupted a change, and tries to make another one.
        """
        if self._actors:
            self._repair()
        # One statement, in the middle of which no signal handler runs: it would find half of the record.
        self._actors, self._changing_frame = actors, sys._getframe(1)
        return self._scope

    def end_with(self, error: AnyError) -> AnyError:
        """End the current change, at a point where the invariant holds; return the error to raise there."""
        self._actors, self._changing_frame = (), None
        return error

    def include(self, actor: Changeable) -> None:
        """Have the current change concern another actor, too."""
        self._actors += (actor,)

    def repair_if_interrupted(self) -> None:
        """Repair an interrupted change, if there is one. Threads call this before they wait.

        Raises:
            RuntimeError: A signal handler or a finalizer has interrupted its thread in a place where that holds the
                lock. Everything that the handler would wait for needs the lock, too.
        """
        if self._is_owned():
            raise RuntimeError(
                "cannot wait for an actor in a signal handler or finalizer that has interrupted a look at its state: "
                "let the handler set a flag, and use the actor after it"
            )
        if self._actors:
            with self:
                self._repair()

    def _repair(self) -> None:
        if self.is_within_change():
            names = ", ".join(repr(actor.name) for actor in self._actors)
            raise RuntimeError(
                f"cannot use actor {names} in a signal handler or finalizer that has interrupted a change of its "
                "state: let the handler set a flag, and use the actor after it"
            )
        self._changing_frame = sys._getframe()
        try:
            with self._scope:
                for actor in dict.fromkeys(self._actors):
                    actor.repair(self._bug)
        except Exception:
            if self._bug is None or not runs_library_code_only():
                raise
            self._repair()  # of the bug; the event that waits for it may be the only one of another actor

    def is_held_here(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return self._is_owned()

    def is_within_change(self) -> bool:
        """Return whether this thread is in the middle of a change, which a handler or finalizer has interrupted.

        In contrast to such a change, one that an exception has ended is repaired by the next one.
        """
        frame: FrameType | None = sys._getframe() if self._actors else None
        while frame is not None and frame is not self._changing_frame:
            frame = frame.f_back
        return frame is not None


class _Scope:
    """The context of a change, or of the repair of one."""

    __slots__ = ("_lock",)

    def __init__(self, lock: ChangeLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        lock, is_bug = self._lock, error is not None and runs_library_code_only()
        # The change is done; or `end_with` has refused it; or the repair of a bug has met a bug, so give up.
        if error is None or not lock._actors or (is_bug and lock._bug is not None):
            lock._actors, lock._changing_frame, lock._bug = (), None, None
            return

        lock._changing_frame = None
        lock._bug = error if is_bug else lock._bug
        # Other threads may wait for a result that only the repair provides. Call this here, not deeper in the stack: a
        # RecursionError may have ended the change.
        lock._actors[0].runtime.loop.call_soon(lock.repair_if_interrupted)
