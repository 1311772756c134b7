"""The session object that a user holds during a lease. It calls the actor until the session ends.

The pool decides when a session begins and ends.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

from envactors.actor.calls import Call
from envactors.actor.future import ActorFuture, Outcome, ReadyOutcome
from envactors.actor.handle import ActorHandle, MethodCaller, send_call
from envactors.actor.type_variables import T_co
from envactors.errors import ActorClosedError, ActorDiedError, ActorStartError, ActorTimeoutError
from envactors.mailbox.messages import Kind
from envactors.sessions.outcomes import Completed, Failed

# Errors after which the env of a session no longer exists.
_FATAL = (ActorDiedError, ActorStartError, ActorTimeoutError)


class SessionFuture(ActorFuture[Any]):
    """The future of a session's call, which notifies the session when the call ends."""

    def __init__(self, session: Session[Any]) -> None:
        super().__init__(session._actor, session._lifeline)
        self._session = session

    def set_outcome(self, outcome: Outcome) -> None:
        if not self.done():
            # Errors of the library are ready; an unread outcome is a result or an exception of the env.
            error = outcome.read()[1] if isinstance(outcome, ReadyOutcome) else None
            self._session._note_end(self, error)  # before a thread that waits for the call can end the session
        super().set_outcome(outcome)

    def set_canceled(self) -> None:
        self._session._note_end(self, None)
        super().set_canceled()


class Session(MethodCaller[T_co]):
    """An env that is leased to one user: ``session.method(*args)`` returns a future of the result.

    All calls of a session run in the same process. If that process crashes, they fail instead of running in its
    replacement. Once the session has ended, calls raise `ActorClosedError`.

    Attributes:
        name: The name that was passed to `SessionPool.session`; for `SessionPool.run`, the task.
    """

    __slots__ = ("__weakref__", "_calls", "_ended", "_fatal", "_incarnation", "_last_end", "_started", "name")

    def __init__(self, actor: ActorHandle[T_co], name: Any) -> None:
        super().__init__(actor._actor, actor._lifeline)
        self.name: Any = name
        self._incarnation = actor.incarnation
        # The unfinished calls, oldest first. No lock guards them, since pickling the arguments of a call may block.
        # Instead, each call is added here before it reads the outcome, and the outcome is set before this is read.
        self._calls: dict[SessionFuture, None] = {}
        # The outcome, once there is one. If several threads set it at the same time, ``setdefault`` keeps the first.
        self._ended: dict[None, Completed | Failed] = {}
        # The error that ended the process of the env.
        self._fatal: BaseException | None = None
        self._started = self._last_end = time.monotonic()

    def __repr__(self) -> str:
        state = "open" if self.outcome is None else type(self.outcome).__name__.lower()
        return f"<session {self.name!r} on actor {self._actor.config.name!r}: {state}>"

    @property
    def outcome(self) -> Completed | Failed | None:
        """How the session ended, a `Completed` or a `Failed`; None until then."""
        return self._ended.get(None)

    @property
    def seconds(self) -> float:
        """How long the session has lasted so far, in seconds; its total duration once it has ended."""
        return time.monotonic() - self._started if self.outcome is None else self.outcome.seconds

    def _note_end(self, future: SessionFuture, error: BaseException | None) -> None:
        """Record that a call has ended. This takes no lock, since the caller may hold the lock of the actor."""
        self._calls.pop(future, None)
        self._last_end = time.monotonic()
        if self._fatal is None and isinstance(error, _FATAL):
            self._fatal = error

    def _idle_since(self) -> float | None:
        """Return when the last call ended (`time.monotonic`), or None while a call is running."""
        return None if self._calls else self._last_end

    def _finish(self, outcome: Completed | Failed) -> Completed | Failed:
        """Set the outcome if there is none yet; return the outcome."""
        return self._ended.setdefault(None, outcome)

    def _cancel_calls(self) -> bool:
        """Cancel the calls that have not begun, newest first; return whether any call is still running."""
        unfinished = list(self._calls)
        for future in reversed(unfinished):
            future.cancel()
        return not all(future.done() for future in unfinished)

    def _submit(self, kind: Kind, message: tuple[Any, ...], method: str, **call_fields: Any) -> ActorFuture[Any]:
        future = SessionFuture(self)
        call = Call(method, self._actor.config.first_index, kind, future, incarnation=self._incarnation, **call_fields)
        self._calls[future] = None
        if self.outcome is not None:
            self._calls.pop(future, None)
            self._refuse_call(method, self.outcome)
        try:
            send_call(self._actor, call, message)
        except ActorClosedError:
            self._calls.pop(future, None)
            raise
        except BaseException:
            future.abort()  # after an interrupt, since the call may have been sent
            self._calls.pop(future, None)
            raise
        return future

    def _refuse_call(self, method: str, outcome: Completed | Failed) -> NoReturn:
        how = f"{outcome.kind}: {outcome.error}" if isinstance(outcome, Failed) else "completed"
        error = ActorClosedError(
            f"cannot call {method!r}: the session {self.name!r} has ended ({how}). Lease an actor with pool.session()",
            actor=self._actor.config.name,
            method=method,
        )
        raise error from (outcome.error if isinstance(outcome, Failed) else None)


def fatal_error_of(session: Session[Any]) -> BaseException | None:
    """Return the error that ended the process of the env, or None if no call has reported one."""
    return session._fatal
