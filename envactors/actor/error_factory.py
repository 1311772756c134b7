"""The errors of one actor: what happened, to which call, in which process, with the evidence of that process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from envactors.actor.config import ActorConfig
from envactors.actor.process import ExitReport
from envactors.actor.requests import Request
from envactors.actor.states import EndReason
from envactors.backends.base import LaunchRefusedError
from envactors.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorError,
    ActorStartError,
    ActorTimeoutError,
    NodeLostError,
    RestartsExhaustedError,
    SerializationError,
    copy_error,
    describe_end,
)
from envactors.mailbox.messages import Failure, Fault, Frame, Kind
from envactors.mailbox.pickling import loads, safe_repr, unpack_failure


class ErrorFactory:
    """Builds the errors of one actor.

    Args:
        config: The actor's config.
    """

    def __init__(self, config: ActorConfig) -> None:
        self._config = config

    def unpicklable(self, request: Request, incarnation: int, cause: Exception) -> ActorError:
        """Return the error of arguments that could not be sent."""
        who, where = self._locate(incarnation, request=request)
        text = f"the arguments of {request.method} for {who} cannot be pickled: {safe_repr(cause)}"
        return _caused(SerializationError(text, **where), cause)

    def closed(self, request: Request, incarnation: int) -> ActorError:
        """Return the error of a call after the actor was closed."""
        who, where = self._locate(incarnation, request=request)
        return ActorClosedError(f"cannot run {request.method}: {who} is closed", **where)

    def cannot(self, what: str, incarnation: int) -> ActorError:
        """Return the error of an operation that the backend does not support."""
        who, where = self._locate(incarnation)
        text = f"{who} lives in {self._config.backend!r}, which cannot {what}"
        return ActorError(f"{text}: wait for the call, or use backend='process'", **where)

    def endless(self) -> RuntimeError:
        """Return the error of code of an env that waits for what can only run after it."""
        return RuntimeError(
            f"cannot wait for actor {self._config.name!r} in code of its envs, which runs in this thread: what "
            "is waited for would run after it. Call the other env directly, or wait outside of the envs"
        )

    def outcome(self, call: Request, frame: Frame, pid: int | None) -> tuple[Any, BaseException | None]:
        """Read a reply: return the call's (value, None), or (None, the exception that it ended with)."""
        try:
            content = loads(frame.payload)
            failure = Failure(*content) if frame.kind == Kind.FAILED else None
        except BaseException as error:  # unpickling runs any code; what it raises fails this call alone
            return None, self.unreadable(call, frame.incarnation, pid, error)
        return (content, None) if failure is None else (None, self.raised(call, frame.incarnation, pid, failure))

    def unreadable(self, request: Request, incarnation: int, pid: int | None, cause: BaseException) -> ActorError:
        """Return the error of a result that cannot be unpickled."""
        who, where = self._locate(incarnation, pid, request)
        lines = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__)).rstrip()
        text = f"the result of {request.method} cannot be unpickled, {who}{_after(where)}: {safe_repr(cause)}\n{lines}"
        # Without its frames: where rows are read, these refer to memory, which would live as long as the error.
        return _caused(SerializationError(text, **where), cause.with_traceback(None))

    def raised(self, request: Request, incarnation: int, pid: int | None, failure: Failure) -> BaseException:
        """Return the exception that a call ended with in the worker."""
        call, cause = request.method, unpack_failure(failure)
        if failure.fault in (Fault.RAISED, Fault.RESET) and cause is not None:
            return cause
        raised = f"{call} raised an exception that cannot be pickled or unpickled"
        what = {
            Fault.RAISED: raised,
            Fault.RESET: raised,
            Fault.ARGUMENTS: f"the arguments of {call} cannot be unpickled in the worker",
            Fault.RESULT: f"the result of {call} cannot be pickled",
            Fault.TOO_LARGE: f"{call} is too large for the link to its node",
        }[failure.fault]
        who, where = self._locate(incarnation, pid, request)
        text = f"{what}, {who}{_after(where)}: {failure.text}\n{failure.traceback}".rstrip()
        return _caused(SerializationError(text, **where), cause)

    def start(self, report: ExitReport, incarnation: int, at: Request, reply: Frame | None) -> ActorError:
        """Return the error of a process that could not be started, or ended before its envs were made.

        Args:
            report: What is known of the process.
            incarnation: The number of the process.
            at: What was going on: the env that was being made, and when the start began.
            reply: What a worker has sent whose factory raised; None from others.
        """
        who, where = self._locate(incarnation, report.pid, at)
        cause, seconds, ending = report.refusal, self._config.deadlines.start, _ending(report)
        if reply is not None:
            failure = Failure(*loads(reply.payload))
            cause, ending = unpack_failure(failure), {"stderr_tail": report.stderr_tail}
            text = f"the factory of {who} raised {failure.text}{_after(where)}"
            text += "" if cause is not None else f"\n{failure.traceback.rstrip()}"
            advice = self._config.backend.import_advice if isinstance(cause, ImportError) else ""
            text += f": {advice}" if advice else ""
        elif report.reason is EndReason.TIMEOUT:
            why = f" and was ended{_after(where)}" if cause is None else f": {cause}"
            text = f"{who} was not ready within its start deadline of {seconds} s{why}"
        elif cause is not None:
            text = f"{who} could not be started: {cause if report.is_refused else repr(cause)}"
        else:
            text = f"{who} {_how(report)}{_after(where)} before its env was made"
        text += _appendix(report)
        if report.reason is EndReason.TIMEOUT and reply is None:
            cause = _timeout(text, seconds, report, where)
        return _caused(ActorStartError(text, **ending, **where), cause)

    def death(self, report: ExitReport, incarnation: int, request: Request | None) -> ActorError:
        """Return the error of a process that ended, in a call or while idle."""
        aborted = report.reason not in (None, EndReason.TIMEOUT)
        who, where = self._locate(incarnation, report.pid, request)
        if request is None:
            running = "while idle"
        elif request.started == 0.0:
            running = f"before {request.method} (call {request.call_id}) could run"
        else:
            running = f"in {request.method} (call {request.call_id}){_after(where)}"
        running += _appendix(report)
        if report.reason is EndReason.TIMEOUT and request is not None:
            text = f"{who} passed its deadline of {request.timeout} s {running}"
            return _timeout(text, request.timeout, report, where)
        was_killed = aborted and report.loss is None and not report.untrue
        text = f"{who} {'was ended on purpose' if was_killed else _how(report)} {running}"
        if report.loss is not None:
            return NodeLostError(text, **report.loss._asdict(), **_ending(report), **where)
        return ActorDiedError(text, aborted=aborted, **_ending(report), **where)

    def discarded(self, request: Request, incarnation: int, pid: int | None, cause: BaseException) -> ActorError:
        """Return the error of a process that was ended because an env raised in a request."""
        who, where = self._locate(incarnation, pid, request)
        text = f"{who} was replaced since {request.method} raised {safe_repr(cause)}"
        return _caused(ActorDiedError(text, aborted=True, **where), cause)

    def poison(self, death: ActorError, inputs: Callable[[], list[tuple[Any, ...]]]) -> ActorError:
        """Return the error of a second process that ended at the same point of the same inputs."""
        error = copy_error(death)
        error.args = (f"the same inputs have ended two processes and are not tried again (see .inputs): {death}",)
        error.read_inputs = inputs
        return error

    def loss(self, request: Request, death: ActorError) -> ActorError:
        """Return the error of a call that was lost with its process before it ran."""
        _, where = self._locate(death.incarnation or 0, death.pid, request)
        whose = "" if death.method is None else f" while {death.method} of env {death.index} was running"
        text = (
            f"env {request.index} of actor {self._config.name!r} was lost with its process{whose}, before its own "
            f"{request.method} (call {request.call_id}) could run: {death}"
        )
        kind = NodeLostError if isinstance(death, NodeLostError) else ActorDiedError
        names = {**ActorDiedError.__annotations__, **kind.__annotations__}
        ending = {name: value for name, value in vars(death).items() if name in names}
        return _caused(kind(text, **ending, **where), copy_error(death))

    def exhausted(self, losses: Sequence[ActorError], incarnation: int) -> ActorError:
        """Return the error of every call after the last process that the restart policy allows."""
        policy = self._config.restart
        last = losses[-1]
        # No restart was tried, or none can help.
        final = len(losses) == 1 or isinstance(last.__cause__, LaunchRefusedError)
        if final or 0 in (policy.max_restarts, policy.max_lifetime_restarts):
            return last
        who, where = self._locate(incarnation, last.pid)
        limit, reached = "max_restarts", f"max_restarts={policy.max_restarts}, window={policy.window}"
        if len(losses) > policy.max_lifetime_restarts:
            limit, reached = "max_lifetime_restarts", f"max_lifetime_restarts={policy.max_lifetime_restarts}"
        text = (
            f"{who} was lost {len(losses)} times, and restart=RestartPolicy({reached}) allows no more restarts. If "
            f"such losses are to be expected, raise {limit}, or set it to math.inf for no limit. The last time: {last}"
        )
        return _caused(RestartsExhaustedError(text, causes=[copy_error(loss) for loss in losses], **where), last)

    def after_all(self, final: ActorError, request: Request) -> ActorError:
        """Return the error of a call that is submitted when the actor is dead."""
        error = copy_error(final)
        if isinstance(error, RestartsExhaustedError):
            error.index, error.method, error.call_id = request.index, request.method, request.call_id
            error.args = (f"{request.method} of env {request.index} (call {request.call_id}) cannot run: {final}",)
        return error

    def _locate(
        self, incarnation: int, pid: int | None = None, request: Request | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return where an error happened, in which request if any: in words, and as the attributes of `ActorError`."""
        name, at = self._config.name, request or Request("", self._config.first_index)
        process = "" if pid is None else f"pid {pid}, "
        return f"actor {name!r} (env {at.index}, {process}incarnation {incarnation})", {
            "actor": name,
            "index": at.index,
            "pid": pid,
            "incarnation": incarnation,
            "method": at.method or None,
            "call_id": at.call_id or None,
            "elapsed": time.monotonic() - at.started if at.started else None,
        }


def _caused(error: ActorError, cause: BaseException | None) -> ActorError:
    error.__cause__ = cause
    return error


def _timeout(text: str, seconds: float | None, report: ExitReport, where: dict[str, Any]) -> ActorError:
    evidence = {"stacks": report.stacks, "stderr_tail": report.stderr_tail}
    return ActorTimeoutError(text, timeout=seconds, **evidence, **where)


def _how(report: ExitReport) -> str:
    if report.loss is not None:
        return f"was lost with its node {report.loss.node!r}, {report.loss.reason},"
    if report.untrue:
        return f"was killed, since it has overwritten memory that it shares with the caller ({report.untrue}),"
    return describe_end(*report.status)


def _ending(report: ExitReport) -> dict[str, Any]:
    return {**report.status._asdict(), "stderr_tail": report.stderr_tail}


def _after(where: dict[str, Any]) -> str:
    elapsed = where["elapsed"]
    return "" if elapsed is None else f" after {elapsed:.3f} s"


def _appendix(report: ExitReport) -> str:
    stacks = f"\nits stacks:\n{report.stacks.rstrip()}" if report.stacks else ""
    return stacks + (f"\nthe end of its stderr:\n{report.stderr_tail}" if report.stderr_tail else "")
