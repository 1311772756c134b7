"""The errors of one actor: what happened, in which call and process, and the end of its stderr.

Methods that use values of users, or their `str` or `repr`, say that they must not be called under the lock.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from envactors import errors
from envactors.actor.actor_process import ActorProcess, EndReason, RestartTracker, is_deliberate, most_failures
from envactors.actor.config import ActorConfig
from envactors.actor.future import LazyOutcome
from envactors.actor.job import Activity
from envactors.backends.base import LaunchRefusedError
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Failure, Fault, Frame, Kind
from envactors.mailbox.pickling import loads, safe_repr, safe_traceback, try_to_read, unpack_failure

# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_FAILED = Kind.FAILED
# What to do about a module that workers cannot import.
_BY_VALUE: Final = "try cloudpickle.register_pickle_by_value(module)"


class ErrorFactory:
    """Builds the errors of one actor.

    Args:
        config: The actor's config.
        get_incarnation: Returns the incarnation of the current process, in which an error happened unless a method is
            told another one.
    """

    def __init__(self, config: ActorConfig, get_incarnation: Callable[[], int]) -> None:
        self._config = config
        self._get_incarnation = get_incarnation

    # Refused before it was sent ------------------------------------------------------------------------

    def unpicklable_arguments(self, activity: Activity, cause: BaseException) -> ActorError:
        """Return the error of arguments that could not be sent. Formats the cause, so not under the lock."""
        who, where = self._locate(activity)
        text = f"{self._sent_for(activity.method)} for {who} cannot be pickled: {safe_repr(cause)}"
        return _caused(errors.SerializationError(text, **where), cause)

    def actor_closed(self, activity: Activity) -> ActorError:
        """Return the error of a call after the actor was closed."""
        who, where = self._locate(activity)
        return errors.ActorClosedError(f"cannot run {activity.method}: {who} is closed", **where)

    def called_by_own_env(self) -> RuntimeError:
        """Return the error of env code that waits for its own actor, which would never end."""
        return RuntimeError(
            f"code of an env of actor {self._config.name!r} waits for a request of the same actor, which can only run "
            "after that code: call the other env directly, or wait outside of the envs"
        )

    def unsupported_operation(self, operation: str) -> ActorError:
        """Return the error of an operation that the backend does not support."""
        who, where = self._locate()
        text = f"{who} lives in {self._config.backend!r}, which cannot {operation}"
        return ActorError(f"{text}: wait for the call, or use backend='process'", **where)

    # The worker has replied, and the reply is an error or cannot be read -------------------------------

    def outcome(self, activity: Activity, frame: Frame, pid: int | None) -> LazyOutcome:
        """Return the outcome of a call, whose reply is not read yet."""
        return LazyOutcome(self._read_reply, activity, frame, pid, is_failure=frame.kind == _FAILED)

    def _read_reply(self, activity: Activity, frame: Frame, pid: int | None) -> tuple[Any, BaseException | None]:
        """Read a reply: return the call's (value, None), or (None, the exception that it ended with)."""
        has_failed = frame.kind == _FAILED
        content, error = try_to_read(lambda: Failure(*loads(frame.payload)) if has_failed else loads(frame.payload))
        if error is not None:
            return None, self.unreadable(activity, frame.incarnation, pid, error)
        return (None, self.raised(activity, frame.incarnation, pid, content)) if has_failed else (content, None)

    def raised(self, activity: Activity, incarnation: int, pid: int | None, failure: Failure) -> BaseException:
        """Return the exception that a call ended with in the worker. Unpickles it, so not under the lock."""
        call = activity.method
        cause = unpack_failure(failure)
        if failure.fault in (Fault.RAISED, Fault.RESET) and cause is not None:
            return cause
        problems = {
            Fault.ARGUMENTS: f"{self._sent_for(call)} cannot be unpickled in the worker",
            Fault.RESULT: f"the result of {call} cannot be pickled",
            Fault.LAST_RESULT: f"the result of {call}, which ended the episode, cannot be pickled",
            Fault.TOO_LARGE: f"{call} is too large for the link to its node",
        }
        problem = problems.get(failure.fault, f"{call} raised an exception that cannot be pickled or unpickled")
        if failure.fault == Fault.ARGUMENTS and isinstance(cause, ImportError):
            problem += f", which cannot import a module: {_BY_VALUE}"
        who, where = self._locate(activity, incarnation, pid)
        text = f"{problem}, {who}{_elapsed(where)}: {failure.text}\n{failure.traceback}".rstrip()
        return _caused(errors.SerializationError(text, **where), cause)

    def unreadable(self, activity: Activity, incarnation: int, pid: int | None, cause: BaseException) -> ActorError:
        """Return the error of a result that cannot be unpickled. Formats the cause, so not under the lock."""
        who, where = self._locate(activity, incarnation, pid)
        lines = "".join(safe_traceback(cause)).rstrip()
        problem = f"the result of {activity.method} cannot be unpickled, {who}{_elapsed(where)}: {safe_repr(cause)}"
        # Without its frames: where rows are read, these refer to memory, which would live as long as the error.
        return _caused(errors.SerializationError(f"{problem}\n{lines}", **where), cause.with_traceback(None))

    def no_memory_for_results(self, activity: Activity, cause: Exception) -> ActorError:
        """Return the error of a step whose results have no room."""
        who, where = self._locate(activity)
        text = f"there is too little shared memory for the results of {activity.method}, {who}: {cause}"
        return _caused(ActorError(text, **where), cause)

    # Its process has ended -----------------------------------------------------------------------------

    def process_ended(self, culprit: Activity | None, process: ActorProcess) -> ActorError:
        """Return the error of an exit: how the process has ended, or why it has not started."""
        if process.end_reason is EndReason.ENV_RAISED and isinstance(process.cause, ActorError):
            return process.cause
        return self.exit_during(culprit, process) if process.has_started else self.start_failed(process)

    def exit_during(self, activity: Activity | None, process: ActorProcess) -> ActorError:
        """Return the error of a process that has ended during an activity, before it, or while idle (None)."""
        who, where = self._locate(activity, process.incarnation, process.pid)
        if activity is None:
            when = "while idle"
        elif activity.started_at == 0.0:
            when = f"before {activity.method}{_call_id(activity)} could run"
        else:
            when = f"in {activity.method}{_call_id(activity)}{_elapsed(where)}"
        when += _evidence(process)

        if process.end_reason is EndReason.TIMEOUT and activity is not None:
            text = f"{who} passed its deadline of {activity.deadline} s {when}"
            return _timeout_error(text, activity.deadline, process, where)
        text = f"{who} {_describe_end(process)} {when}"
        if process.status.loss is not None:
            return errors.NodeLostError(text, **process.status.loss._asdict(), **_end_fields(process), **where)
        return errors.ActorDiedError(text, aborted=is_deliberate(process.end_reason), **_end_fields(process), **where)

    def start_failed(self, process: ActorProcess) -> ActorError:
        """Return the error of a process that could not be started, or ended before its envs were made."""
        # The env that comes next; the last one if all are made.
        activity = Activity("", self._config.indices[: process.envs_made + 1][-1], started_at=process.launched_at)
        who, where = self._locate(activity, process.incarnation, process.pid)
        if process.failed_at:
            where["elapsed"] = process.failed_at - process.launched_at

        text = self._describe_failed_start(process, who, _elapsed(where)) + _evidence(process)
        if process.failure is not None:
            return _caused(errors.ActorStartError(text, stderr_tail=process.stderr_tail, **where), process.cause)
        cause = process.status.refusal
        if process.end_reason is EndReason.TIMEOUT:
            cause = _timeout_error(text, self._config.deadlines.start, process, where)
        return _caused(errors.ActorStartError(text, **_end_fields(process), **where), cause)

    def _describe_failed_start(self, process: ActorProcess, who: str, after: str) -> str:
        """Return why a process has not started: a factory has raised, or it was late, or refused, or it has ended."""
        failure, refusal = process.failure, process.status.refusal
        if failure is not None:
            maker = "initializer" if self._config.is_executor else "factory"
            if process.envs_made == self._config.env_count:
                maker = "snapshot function"
            traceback = f"\n{failure.traceback.rstrip()}" if process.cause is None else ""
            advice = ""
            if isinstance(process.cause, ImportError):
                name = vars(ImportError)["name"].__get__(process.cause)  # past a property of a subclass: code of a user
                is_only_here = type(name) is str and name in sys.modules
                advice = self._config.backend.traits.import_advice or (_BY_VALUE if is_only_here else "")
            return f"the {maker} of {who} raised {failure.text}{after}{traceback}" + (f": {advice}" if advice else "")
        if process.end_reason is EndReason.TIMEOUT:
            why = f" and was ended{after}" if refusal is None else f": {refusal}"
            return f"{who} was not ready within its start deadline of {self._config.deadlines.start} s{why}"
        if refusal is not None:
            why = str(refusal) if isinstance(refusal, LaunchRefusedError) else safe_repr(refusal)
            return f"{who} could not be started: {why}"
        begun = "its initializer had returned" if self._config.is_executor else "its env was made"
        return f"{who} {_describe_end(process)}{after} before {begun}"

    def env_raised(
        self, activity: Activity, incarnation: int, pid: int | None, cause: BaseException, text: str
    ) -> ActorError:
        """Return the error of a process that is replaced because a request failed; ``text`` says what happened."""
        who, where = self._locate(activity, incarnation, pid)
        text = f"{who} was replaced since {text}"
        return _caused(errors.ActorDiedError(text, aborted=True, **where), cause)

    def unblamed(self, activity: Activity, crash: ActorError) -> ActorError:
        """Return the error of a step that had no result when its process ended, and that the exit is not blamed on."""
        _, where = self._locate(activity, crash.incarnation or 0, crash.pid)
        whose = "" if crash.method is None else f" while {crash.method} of env {crash.index} was running"
        text = (
            f"env {activity.index} of actor {self._config.name!r} was lost with its process{whose}, before its own "
            f"{activity.method}{_call_id(activity)} had a result: {crash}"
        )
        kind = errors.NodeLostError if isinstance(crash, errors.NodeLostError) else errors.ActorDiedError
        names = {**errors.ActorDiedError.__annotations__, **kind.__annotations__}
        ending = {name: value for name, value in vars(crash).items() if name in names}
        return _caused(kind(text, bundle=crash.bundle, **ending, **where), copy_error(crash))

    def poison_inputs(self, crash: ActorError, inputs: Callable[[], list[tuple[Any, ...]]]) -> ActorError:
        """Return the error of a step whose inputs have ended two processes."""
        error = copy_error(crash)
        error.args = (f"the same inputs have ended two processes and are not tried again (see .inputs): {crash}",)
        error.read_inputs = inputs
        return error

    # No process will run it ----------------------------------------------------------------------------

    def not_run(self, activity: Activity, reason: EndReason | None, incarnation: int | None = None) -> ActorError:
        """Return the error of an activity that waited for a process, until the parent ended that for a reason."""
        incarnation = self._get_incarnation() if incarnation is None else incarnation
        return self.exit_during(activity, ActorProcess(incarnation, end_reason=reason))

    def process_gone(self, activity: Activity, incarnation: int | None, crash: ActorError | None) -> ActorError:
        """Return the error of a call that only an earlier process may run, given the error of the last exit."""
        return self.not_run(activity, EndReason.ABORT, incarnation) if crash is None else copy_error(crash)

    def closed_by_bug(self, activity: Activity, bug: BaseException) -> ActorError:
        """Return the error of a call whose actor was closed by an error of this library."""
        who, where = self._locate(activity)
        text = f"{activity.method} has failed: {who} was closed by an internal error of envactors: {type(bug).__name__}"
        return _caused(errors.ActorClosedError(f"{text}. Please report it with this traceback", **where), bug)

    def restarts_exhausted(self, tracker: RestartTracker) -> ActorError:
        """Return the error of a dead actor: the restart policy allows no more processes, or none can be started."""
        policy, crashes, failed_starts = self._config.restart, tracker.errors, tracker.failed_starts
        last = crashes[-1]
        # No restart was tried, or none can help.
        is_final = len(crashes) == 1 or isinstance(last.__cause__, LaunchRefusedError)
        if is_final or 0 in (policy.max_restarts, policy.max_lifetime_restarts):
            return last
        who, where = self._locate(pid=last.pid)
        limit, _ = tracker.nearest_limit()
        reached = f"{limit}={getattr(policy, limit)}" + (f", window={policy.window}" if limit == "max_restarts" else "")
        text = (
            f"{who} was lost {len(crashes)} times, and restart=RestartPolicy({reached}) allows no more restarts. If "
            f"such losses are to be expected, raise {limit}, or set it to math.inf for no limit. The last time: {last}"
        )
        if failed_starts >= most_failures(policy):
            zeros = ", ".join(f"{name}=0" for name in ("backoff", "backoff_max") if getattr(policy, name) == 0)
            text = (
                f"{who} failed to start {failed_starts} times in a row, and restart=RestartPolicy({zeros}) does not "
                f"delay the next time. If it may start later, set a backoff above 0. The last time: {last}"
            )
        causes = [copy_error(crash) for crash in crashes]
        return _caused(errors.RestartsExhaustedError(text, causes=causes, bundle=last.bundle, **where), last)

    def actor_dead(self, activity: Activity, final: ActorError) -> ActorError:
        """Return the error of a call to a dead actor, given its `restarts_exhausted`."""
        error = copy_error(final)
        if isinstance(error, errors.RestartsExhaustedError):
            error.index, error.method, error.call_id = activity.index, activity.method, activity.call_id
            error.args = (f"{activity.method} of env {activity.index}{_call_id(activity)} cannot run: {final}",)
        return error

    # Texts ---------------------------------------------------------------------------------------------

    def _sent_for(self, call: str) -> str:
        """Return what travels to the worker for a call."""
        return f"{call} or its arguments" if self._config.is_executor else f"the arguments of {call}"

    def _locate(
        self, activity: Activity | None = None, incarnation: int | None = None, pid: int | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return where an error happened, in which activity if any: in words, and as the attributes of `ActorError`."""
        incarnation = self._get_incarnation() if incarnation is None else incarnation
        at = activity or Activity("", self._config.first_index)
        env = "" if self._config.is_executor or self._config.is_standby else f"env {at.index}, "
        process = "" if pid is None else f"pid {pid}, "
        return f"actor {self._config.name!r} ({env}{process}incarnation {incarnation})", {
            "actor": self._config.name,
            "index": at.index,
            "pid": pid,
            "incarnation": incarnation,
            "method": at.method or None,
            "call_id": at.call_id or None,
            "elapsed": time.monotonic() - at.started_at if at.started_at else None,
        }


def _caused(error: ActorError, cause: BaseException | None) -> ActorError:
    """Return an error, once it has a cause."""
    error.__cause__ = cause
    return error


def _timeout_error(text: str, limit: float | None, process: ActorProcess, where: dict[str, Any]) -> ActorError:
    """Return the error of a deadline that has passed."""
    evidence = {"stacks": process.stacks, "stderr_tail": process.stderr_tail}
    return errors.ActorTimeoutError(text, timeout=limit, **evidence, **where)


def _describe_end(process: ActorProcess) -> str:
    """Return the verb of a sentence whose subject is a process that has ended."""
    if process.end_reason is EndReason.INTERRUPT:
        return "was replaced, since an exception interrupted the caller in the middle of a change,"
    if process.end_reason is EndReason.ENV_RAISED:
        return "was replaced, since an env had raised,"
    status = process.status
    if status.loss is not None:
        return f"was lost with its node {status.loss.node!r}, {status.loss.reason},"
    if process.corruption:
        return f"was killed, since it has overwritten memory that it shares with the caller ({process.corruption}),"
    if is_deliberate(process.end_reason):
        return "was ended on purpose"
    if status.is_helper_lost:
        return "was killed, since its helper process was lost,"
    return errors.describe_end(status.exitcode, status.signal)


def _end_fields(process: ActorProcess) -> dict[str, Any]:
    """Return how a process has ended, as attributes of its error."""
    return {"exitcode": process.status.exitcode, "signal": process.status.signal, "stderr_tail": process.stderr_tail}


def _call_id(activity: Activity) -> str:
    """Return the call id in parentheses; empty if there is none."""
    return f" (call {activity.call_id})" if activity.call_id else ""


def _elapsed(where: dict[str, Any]) -> str:
    """Return how long an activity has run; empty if it has not begun."""
    return "" if where["elapsed"] is None else f" after {where['elapsed']:.3f} s"


def _evidence(process: ActorProcess) -> str:
    """Return the stacks and the end of the stderr of a process, on further lines."""
    stacks = f"\nits stacks:\n{process.stacks.rstrip()}" if process.stacks else ""
    return stacks + (f"\nthe end of its stderr:\n{process.stderr_tail}" if process.stderr_tail else "")
