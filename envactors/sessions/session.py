"""What the user of a lease holds: calls to an actor that end with the session."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, Caller
from envactors.actor.requests import CallRequest
from envactors.actor.type_variables import T_co
from envactors.errors import ActorClosedError, ActorDiedError, ActorStartError, ActorTimeoutError
from envactors.mailbox.messages import Kind
from envactors.sessions.outcomes import Completed, Failed

# Once one of these has reached a session, the env that it was using is gone.
_FATAL = (ActorDiedError, ActorStartError, ActorTimeoutError)


class SessionFuture(ActorFuture[Any]):
    """The future of a call of a session, which it tells when the call has ended."""

    def __init__(self, session: Session[Any]) -> None:
        super().__init__(session._supervisor, session._lifeline)
        self._session = session

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        if not self.settled():
            self._session.note_end(self, error)  # before a thread that waits for the call can end the session
        super().settle(value, error, incarnation)

    def mark_cancelled(self) -> None:
        self._session.note_end(self, None)
        super().mark_cancelled()


class Session(Caller[T_co]):
    """An env that is leased to one user: ``session.method(*args)`` returns a future of the result.

    Its calls run in one process, and never in the one after it. Once the session has ended, they raise
    `ActorClosedError`.

    Attributes:
        name: The name that `SessionPool.session` was given; the task for `SessionPool.run`.
    """

    __slots__ = ("_calls", "_ended", "_fatal", "_incarnation", "_last_end", "_started", "name")

    def __init__(self, actor: ActorHandle[T_co], name: Any) -> None:
        super().__init__(actor._supervisor, actor._lifeline)
        self.name: Any = name
        self._incarnation = actor.incarnation
        # The calls that have not ended, oldest first. No lock guards them: pickling the arguments of a call may block.
        # A call enters here before it looks at the outcome, and the outcome is set before these are looked at.
        self._calls: dict[SessionFuture, None] = {}
        # The outcome, once there is one: of several that are set at the same time, ``setdefault`` keeps the first.
        self._ended: dict[None, Completed | Failed] = {}
        # The error that says that the env is gone.
        self._fatal: BaseException | None = None
        self._started = self._last_end = time.monotonic()

    def __repr__(self) -> str:
        state = "open" if self.outcome is None else type(self.outcome).__name__.lower()
        return f"<session {self.name!r} on actor {self._supervisor.config.name!r}: {state}>"

    @property
    def outcome(self) -> Completed | Failed | None:
        """How the session ended, a `Completed` or a `Failed`; None until then."""
        return self._ended.get(None)

    @property
    def seconds(self) -> float:
        """The age of the session, in seconds; once it has ended, how long it took."""
        return time.monotonic() - self._started if self.outcome is None else self.outcome.seconds

    def note_end(self, future: SessionFuture, error: BaseException | None) -> None:
        """Note that a call has ended. Takes no lock: it may run under the actor's."""
        self._calls.pop(future, None)
        self._last_end = time.monotonic()
        if self._fatal is None and isinstance(error, _FATAL):
            self._fatal = error

    def idle_since(self) -> float | None:
        """Return when the last call ended (`time.monotonic`), None while a call is unfinished."""
        return None if self._calls else self._last_end

    def fatal_error(self) -> BaseException | None:
        """Return the error that says that the env of the session is gone, None while it is not known to be."""
        return self._fatal

    def finish(self, outcome: Completed | Failed) -> Completed | Failed:
        """Set the outcome unless there is one; return the one that counts."""
        return self._ended.setdefault(None, outcome)

    def cancel_calls(self) -> bool:
        """Cancel the calls that have not begun, last one first; return whether others are unfinished."""
        unfinished = list(self._calls)
        for future in reversed(unfinished):
            future.cancel()
        return not all(future.settled() for future in unfinished)

    def _submit(self, kind: Kind, message: tuple[Any, ...], method: str, bound: int | None = None) -> ActorFuture[Any]:
        del bound  # every call of a session is bound to its process
        future = SessionFuture(self)
        request = CallRequest(
            method, self._supervisor.config.first_index, future=future, bound=self._incarnation, kind=kind
        )
        self._calls[future] = None
        if self.outcome is not None:
            self._calls.pop(future, None)
            self._refuse_call(method, self.outcome)
        try:
            self._supervisor.submit_call(request, message)
        except ActorClosedError:
            self._calls.pop(future, None)
            raise
        except BaseException:
            future.abort()  # an interrupt: it may have been sent
            self._calls.pop(future, None)
            raise
        return future

    def _refuse_call(self, method: str, outcome: Completed | Failed) -> NoReturn:
        how = f"{outcome.kind}: {outcome.error}" if isinstance(outcome, Failed) else "completed"
        error = ActorClosedError(
            f"cannot call {method!r}: the session {self.name!r} has ended ({how}). Lease an actor with pool.session()",
            actor=self._supervisor.config.name,
            method=method,
        )
        raise error from (outcome.error if isinstance(outcome, Failed) else None)
