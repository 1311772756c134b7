"""The errors of one actor: what happened, to which call, in which process, and what it left as evidence."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from envactors.actor.incarnation import Obituary
from envactors.actor.requests import Request
from envactors.actor.states import Plan
from envactors.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorError,
    ActorStartError,
    ActorTimeoutError,
    RestartsExhaustedError,
    SerializationError,
    describe_status,
    twin,
)
from envactors.wire.messages import Failure, Fault, Frame, Kind
from envactors.wire.pickling import loads, unpack_failure


class Failures:
    """Makes the errors of an actor.

    Args:
        plan: What the actor is made of.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._first = plan.start.first

    def unpicklable(self, request: tuple[int, str], incarnation: int, cause: Exception) -> ActorError:
        """Arguments that could not be sent; the request is (env's index, method)."""
        index, method = request
        who, where = self._where(index, None, incarnation)
        where["method"] = method
        error = SerializationError(f"the arguments of {method} for {who} cannot be pickled: {cause!r}", **where)
        error.__cause__ = cause
        return error

    def closed(self, request: Request, incarnation: int) -> ActorError:
        """A call after the end."""
        who, where = self._where(request.index, None, incarnation)
        where["method"] = request.method
        return ActorClosedError(f"{request.method} was asked of {who}, which is closed", **where)

    def cannot(self, what: str, incarnation: int) -> ActorError:
        """Something that the backend is unable to do."""
        who, where = self._where(self._first, None, incarnation)
        backend = self._plan.backend
        return ActorError(
            f"{who} lives in {backend!r}, which cannot {what}: wait for the call, or use backend='process'", **where
        )

    def outcome(self, request: Request, frame: Frame, pid: int | None) -> tuple[Any, BaseException | None]:
        """Reads a reply: the call's value, or the exception that it ended with."""
        try:
            content = loads(frame.payload)
            if frame.kind == Kind.RESULT:
                return content, None
            return None, self._remote(request, frame, pid, Failure(*content))
        except BaseException as error:  # unpickling runs any code; what it raises is this call's affair alone
            call = request.method
            who, where = self._where(request.index, pid, frame.incarnation, request)
            lost = SerializationError(
                f"the result of {call} from {who} cannot be unpickled{_after(where)}: {error!r}", **where
            )
            lost.__cause__ = error
            return None, lost

    def _remote(self, request: Request, frame: Frame, pid: int | None, failure: Failure) -> BaseException:
        cause = unpack_failure(failure)
        if failure.fault == Fault.RAISED and cause is not None:
            return cause
        call = request.method
        who, where = self._where(request.index, pid, frame.incarnation, request)
        what = {
            Fault.RAISED: f"{call} raised an exception that cannot be pickled or unpickled",
            Fault.ARGUMENTS: f"the arguments of {call} cannot be unpickled in the worker",
            Fault.RESULT: f"the result of {call} cannot be pickled",
        }[failure.fault]
        mangled = SerializationError(f"{what}, {who}{_after(where)}: {failure.text}\n{failure.traceback}", **where)
        mangled.__cause__ = cause
        return mangled

    def factory(self, frame: Frame, obituary: Obituary, begun: tuple[int, float]) -> ActorStartError:
        """A factory that raised; for ``begun`` see `start`."""
        failure = Failure(*loads(frame.payload))
        cause = unpack_failure(failure)
        who, where = self._where(self._first + begun[0], obituary.pid, frame.incarnation, since=begun[1])
        text = "" if cause is not None else f"\n{failure.traceback.rstrip()}"
        error = ActorStartError(
            f"the factory of {who} raised {failure.text}{_after(where)}{text}{_appendix(obituary)}",
            stderr_tail=obituary.stderr_tail,
            **where,
        )
        error.__cause__ = cause
        return error

    def start(
        self, obituary: Obituary, incarnation: int, begun: tuple[int, float], *, timed_out: bool
    ) -> ActorStartError:
        """A process that ended, or never was, before its envs were made.

        Args:
            obituary: What is known of it.
            incarnation: Which one it was.
            begun: How many envs were made, and when the start began (`time.monotonic`).
            timed_out: Whether it was ended for its deadline.
        """
        who, where = self._where(self._first + begun[0], obituary.pid, incarnation, since=begun[1])
        evidence = _appendix(obituary)
        cause: BaseException | None = obituary.refusal
        if timed_out:
            seconds = self._plan.deadlines.start
            what = f"was not ready within its start deadline of {seconds} s and was ended{_after(where)}"
            cause = ActorTimeoutError(
                f"{who} {what}{evidence}",
                timeout=seconds,
                stacks=obituary.stacks,
                stderr_tail=obituary.stderr_tail,
                **where,
            )
        elif obituary.refusal is not None:
            what = f"could not be started: {obituary.refusal!r}"
        else:
            what = f"died with {describe_status(*obituary.status)}{_after(where)}, before its env was made"
        error = ActorStartError(
            f"{who} {what}{evidence}",
            exitcode=obituary.status.exitcode,
            signal=obituary.status.signal,
            stderr_tail=obituary.stderr_tail,
            **where,
        )
        error.__cause__ = cause
        return error

    def death(
        self,
        obituary: Obituary,
        incarnation: int,
        request: Request | None,
        *,
        aborted: bool = False,
        timed_out: bool = False,
    ) -> ActorError:
        """The end of a process, in a call or while idle."""
        if request is None:
            who, where = self._where(self._first, obituary.pid, incarnation)
            running = "while idle"
        else:
            call, call_id = request.method, request.call_id
            who, where = self._where(request.index, obituary.pid, incarnation, request)
            if request.started == 0.0:
                running = f"before {call} (call {call_id}) could run"
            else:
                running = f"in {call} (call {call_id}){_after(where)}"
        if timed_out and request is not None:
            return ActorTimeoutError(
                f"{who} passed its deadline of {request.timeout} s {running}{_appendix(obituary)}",
                timeout=request.timeout,
                stacks=obituary.stacks,
                stderr_tail=obituary.stderr_tail,
                **where,
            )
        ended = "was ended on purpose" if aborted else f"died with {describe_status(*obituary.status)}"
        return ActorDiedError(
            f"{who} {ended} {running}{_appendix(obituary)}",
            exitcode=obituary.status.exitcode,
            signal=obituary.status.signal,
            stderr_tail=obituary.stderr_tail,
            aborted=aborted,
            **where,
        )

    def condemned(
        self, request: tuple[int, str], incarnation: int, pid: int | None, cause: BaseException
    ) -> ActorError:
        """The end of a process for what an env of it has raised; the request is (env's index, method)."""
        index, method = request
        who, where = self._where(index, pid, incarnation)
        where["method"] = method
        error = ActorDiedError(
            f"{who} was replaced since {method} raised {type(cause).__name__}: {cause}", aborted=True, **where
        )
        error.__cause__ = cause
        return error

    def poison(self, death: ActorError, inputs: list[tuple[Any, ...]]) -> ActorError:
        """The end of a second process at the same point of the same inputs."""
        error = twin(death)
        error.args = (f"the same inputs have ended two processes and are not tried again (see .inputs): {death}",)
        error.inputs = inputs
        return error

    def loss(self, request: Request, death: ActorError) -> ActorError:
        """A call that was lost with its process, though another one was running, or none."""
        _, where = self._where(request.index, death.pid, death.incarnation or 0, request)
        whose = "" if death.method is None else f" while {death.method} of env {death.index} was running"
        error = ActorDiedError(
            f"env {request.index} of actor {self._plan.name!r} was lost with its process{whose}, before its own "
            f"{request.method} (call {request.call_id}) could run: {death}",
            exitcode=getattr(death, "exitcode", None),
            signal=getattr(death, "signal", None),
            stderr_tail=getattr(death, "stderr_tail", ""),
            aborted=getattr(death, "aborted", False),
            **where,
        )
        error.__cause__ = twin(death)
        return error

    def exhausted(self, losses: Sequence[ActorError], incarnation: int) -> ActorError:
        """The error of all that comes after the last process that was allowed."""
        policy = self._plan.restart
        last = losses[-1]
        if 0 in (policy.max_restarts, policy.max_lifetime_restarts):
            return last
        who, where = self._where(self._first, last.pid, incarnation)
        ever = policy.max_lifetime_restarts
        error = RestartsExhaustedError(
            f"{who} was lost {len(losses)} times, and {policy.max_restarts} restarts within {policy.window} s"
            f"{'' if ever == math.inf else f', {ever} in its life,'} are allowed; the last time: {last}",
            causes=[twin(loss) for loss in losses],
            **where,
        )
        error.__cause__ = last
        return error

    def after_all(self, final: ActorError, request: Request) -> ActorError:
        """The error of a call that finds the actor dead."""
        error = twin(final)
        if isinstance(error, RestartsExhaustedError):
            error.index, error.method, error.call_id = request.index, request.method, request.call_id
            error.args = (f"{request.method} of env {request.index} (call {request.call_id}) cannot run: {final}",)
        return error

    def _where(
        self, index: int, pid: int | None, incarnation: int, request: Request | None = None, since: float = 0.0
    ) -> tuple[str, dict[str, Any]]:
        """Where it happened, to which call, and how long after that, or ``since``, in words and as attributes."""
        name = self._plan.name
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


def _appendix(obituary: Obituary) -> str:
    stacks = f"\nits stacks:\n{obituary.stacks.rstrip()}" if obituary.stacks else ""
    return stacks + (f"\nthe end of its stderr:\n{obituary.stderr_tail}" if obituary.stderr_tail else "")
