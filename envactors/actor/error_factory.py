"""The errors of one actor: what happened, to which call, in which process, with the evidence of that process."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from envactors.actor.config import ActorConfig
from envactors.actor.process import ExitReport
from envactors.actor.requests import Answer, Request
from envactors.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorError,
    ActorStartError,
    ActorTimeoutError,
    RestartsExhaustedError,
    SerializationError,
    copy_error,
    describe_status,
)
from envactors.wire.messages import Failure, Fault, Frame
from envactors.wire.pickling import loads, unpack_failure


class ErrorFactory:
    """Builds the errors of one actor.

    Args:
        config: The actor's config.
    """

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        # The index of the actor's first env; errors that concern the whole actor name it.
        self._first_index = config.first_index

    def unpicklable(self, request: tuple[int, str], incarnation: int, cause: Exception) -> ActorError:
        """Return the error of arguments that could not be sent; the request is (env's index, method)."""
        index, method = request
        who, where = self._locate(index, None, incarnation)
        where["method"] = method
        error = SerializationError(f"the arguments of {method} for {who} cannot be pickled: {cause!r}", **where)
        error.__cause__ = cause
        return error

    def closed(self, request: Request, incarnation: int) -> ActorError:
        """Return the error of a call after the actor was closed."""
        who, where = self._locate(request.index, None, incarnation)
        where["method"] = request.method
        return ActorClosedError(f"{request.method} was asked of {who}, which is closed", **where)

    def cannot(self, what: str, incarnation: int) -> ActorError:
        """Return the error of an operation that the backend does not support."""
        who, where = self._locate(self._first_index, None, incarnation)
        backend = self._config.backend
        return ActorError(
            f"{who} lives in {backend!r}, which cannot {what}: wait for the call, or use backend='process'", **where
        )

    def outcome(self, answer: Answer, incarnation: int, pid: int | None) -> tuple[Any, BaseException | None]:
        """Read a reply: return the call's (value, None), or (None, the exception that it ended with)."""
        request = answer.request
        try:
            content = answer.content if isinstance(answer.content, tuple) else loads(answer.content)
            if not answer.failed:
                return content, None
            return None, self._remote(request, incarnation, pid, Failure(*content))
        except BaseException as error:  # unpickling runs any code; what it raises fails this call alone
            who, where = self._locate(request.index, pid, incarnation, request)
            unreadable = SerializationError(
                f"the result of {request.method} from {who} cannot be unpickled{_after(where)}: {error!r}", **where
            )
            unreadable.__cause__ = error
            return None, unreadable

    def _remote(self, request: Request, incarnation: int, pid: int | None, failure: Failure) -> BaseException:
        cause = unpack_failure(failure)
        if failure.fault == Fault.RAISED and cause is not None:
            return cause
        call = request.method
        who, where = self._locate(request.index, pid, incarnation, request)
        what = {
            Fault.RAISED: f"{call} raised an exception that cannot be pickled or unpickled",
            Fault.ARGUMENTS: f"the arguments of {call} cannot be unpickled in the worker",
            Fault.RESULT: f"the result of {call} cannot be pickled",
        }[failure.fault]
        error = SerializationError(f"{what}, {who}{_after(where)}: {failure.text}\n{failure.traceback}", **where)
        error.__cause__ = cause
        return error

    def factory(self, frame: Frame, report: ExitReport, begun: tuple[int, float]) -> ActorStartError:
        """Return the error of a factory that raised; for ``begun`` see `start`."""
        failure = Failure(*loads(frame.payload))
        cause = unpack_failure(failure)
        who, where = self._locate(self._first_index + begun[0], report.pid, frame.incarnation, since=begun[1])
        text = "" if cause is not None else f"\n{failure.traceback.rstrip()}"
        error = ActorStartError(
            f"the factory of {who} raised {failure.text}{_after(where)}{text}{_appendix(report)}",
            stderr_tail=report.stderr_tail,
            **where,
        )
        error.__cause__ = cause
        return error

    def start(
        self, report: ExitReport, incarnation: int, begun: tuple[int, float], *, timed_out: bool
    ) -> ActorStartError:
        """Return the error of a process that could not be started, or ended before its envs were made.

        Args:
            report: What is known of the process.
            incarnation: The number of the process.
            begun: How many envs were made, and when the start began (`time.monotonic`).
            timed_out: Whether it was ended because of the start deadline.
        """
        who, where = self._locate(self._first_index + begun[0], report.pid, incarnation, since=begun[1])
        evidence = _appendix(report)
        cause: BaseException | None = report.refusal
        if timed_out:
            seconds = self._config.deadlines.start
            what = f"was not ready within its start deadline of {seconds} s and was ended{_after(where)}"
            cause = ActorTimeoutError(
                f"{who} {what}{evidence}",
                timeout=seconds,
                stacks=report.stacks,
                stderr_tail=report.stderr_tail,
                **where,
            )
        elif report.refusal is not None:
            what = f"could not be started: {report.refusal!r}"
        else:
            what = f"died with {describe_status(*report.status)}{_after(where)}, before its env was made"
        error = ActorStartError(
            f"{who} {what}{evidence}",
            exitcode=report.status.exitcode,
            signal=report.status.signal,
            stderr_tail=report.stderr_tail,
            **where,
        )
        error.__cause__ = cause
        return error

    def death(
        self,
        report: ExitReport,
        incarnation: int,
        request: Request | None,
        *,
        aborted: bool = False,
        timed_out: bool = False,
    ) -> ActorError:
        """Return the error of a process that ended, in a call or while idle."""
        if request is None:
            who, where = self._locate(self._first_index, report.pid, incarnation)
            running = "while idle"
        else:
            call, call_id = request.method, request.call_id
            who, where = self._locate(request.index, report.pid, incarnation, request)
            if request.started == 0.0:
                running = f"before {call} (call {call_id}) could run"
            else:
                running = f"in {call} (call {call_id}){_after(where)}"
        if timed_out and request is not None:
            return ActorTimeoutError(
                f"{who} passed its deadline of {request.timeout} s {running}{_appendix(report)}",
                timeout=request.timeout,
                stacks=report.stacks,
                stderr_tail=report.stderr_tail,
                **where,
            )
        ended = "was ended on purpose" if aborted else f"died with {describe_status(*report.status)}"
        return ActorDiedError(
            f"{who} {ended} {running}{_appendix(report)}",
            exitcode=report.status.exitcode,
            signal=report.status.signal,
            stderr_tail=report.stderr_tail,
            aborted=aborted,
            **where,
        )

    def discarded(
        self, request: tuple[int, str], incarnation: int, pid: int | None, cause: BaseException
    ) -> ActorError:
        """Return the error of a process that was ended because an env raised; the request is (env's index, method)."""
        index, method = request
        who, where = self._locate(index, pid, incarnation)
        where["method"] = method
        error = ActorDiedError(
            f"{who} was replaced since {method} raised {type(cause).__name__}: {cause}", aborted=True, **where
        )
        error.__cause__ = cause
        return error

    def poison(self, death: ActorError, inputs: list[tuple[Any, ...]]) -> ActorError:
        """Return the error of a second process that ended at the same point of the same inputs."""
        error = copy_error(death)
        error.args = (f"the same inputs have ended two processes and are not tried again (see .inputs): {death}",)
        error.inputs = inputs
        return error

    def loss(self, request: Request, death: ActorError) -> ActorError:
        """Return the error of a call that was lost with its process before it ran."""
        _, where = self._locate(request.index, death.pid, death.incarnation or 0, request)
        whose = "" if death.method is None else f" while {death.method} of env {death.index} was running"
        error = ActorDiedError(
            f"env {request.index} of actor {self._config.name!r} was lost with its process{whose}, before its own "
            f"{request.method} (call {request.call_id}) could run: {death}",
            exitcode=getattr(death, "exitcode", None),
            signal=getattr(death, "signal", None),
            stderr_tail=getattr(death, "stderr_tail", ""),
            aborted=getattr(death, "aborted", False),
            **where,
        )
        error.__cause__ = copy_error(death)
        return error

    def exhausted(self, losses: Sequence[ActorError], incarnation: int) -> ActorError:
        """Return the error of every call after the last process that the restart policy allows."""
        policy = self._config.restart
        last = losses[-1]
        if 0 in (policy.max_restarts, policy.max_lifetime_restarts):
            return last
        who, where = self._locate(self._first_index, last.pid, incarnation)
        ever = policy.max_lifetime_restarts
        error = RestartsExhaustedError(
            f"{who} was lost {len(losses)} times, and {policy.max_restarts} restarts within {policy.window} s"
            f"{'' if ever == math.inf else f', {ever} in its life,'} are allowed; the last time: {last}",
            causes=[copy_error(loss) for loss in losses],
            **where,
        )
        error.__cause__ = last
        return error

    def after_all(self, final: ActorError, request: Request) -> ActorError:
        """Return the error of a call that is submitted when the actor is dead."""
        error = copy_error(final)
        if isinstance(error, RestartsExhaustedError):
            error.index, error.method, error.call_id = request.index, request.method, request.call_id
            error.args = (f"{request.method} of env {request.index} (call {request.call_id}) cannot run: {final}",)
        return error

    def _locate(
        self, index: int, pid: int | None, incarnation: int, request: Request | None = None, since: float = 0.0
    ) -> tuple[str, dict[str, Any]]:
        """Return where an error happened: in words, and as the attributes of `ActorError`.

        Its ``elapsed`` counts from the start of the request, or from ``since`` if there is no request.
        """
        name = self._config.name
        process = "" if pid is None else f"pid {pid}, "
        since = since if request is None else request.started
        return f"actor {name!r} (env {index}, {process}incarnation {incarnation})", {
            "actor": name,
            "index": index,
            "pid": pid,
            "incarnation": incarnation,
            "method": None if request is None else request.method,
            "call_id": None if request is None else request.call_id,
            "elapsed": time.monotonic() - since if since else None,
        }


def _after(where: dict[str, Any]) -> str:
    elapsed = where["elapsed"]
    return "" if elapsed is None else f" after {elapsed:.3f} s"


def _appendix(report: ExitReport) -> str:
    stacks = f"\nits stacks:\n{report.stacks.rstrip()}" if report.stacks else ""
    return stacks + (f"\nthe end of its stderr:\n{report.stderr_tail}" if report.stderr_tail else "")
