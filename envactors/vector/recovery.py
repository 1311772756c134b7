"""What becomes of a step or reset that has failed: facts, a pure decision, and its effects.

                         raise              renew                               replay
    its process ended    raised; the env    the last observation, truncated     the same again, in a process that was
    while it ran         needs a reset      (next_step), or a reset             brought to the same point; else as renew
    the env raised       raised             its process is replaced, then       likewise, once
                                            as after the end of a process

The columns are the values of ``on_failure``. A request that the worker had not begun runs in the next process, unless
it needs an episode that no replay can bring back. Nothing here starts or ends processes.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import NamedTuple

from envactors.actor.error_factory import ErrorFactory
from envactors.actor.exits import Step
from envactors.actor.future import Outcome, ReadyOutcome
from envactors.actor.states import EndReason
from envactors.errors import ActorError
from envactors.mailbox import messages
from envactors.mailbox.messages import Fault
from envactors.mailbox.slab import RESET
from envactors.vector.episodes import NO_RESULT, Episodes
from envactors.vector.options import Autoreset, OnFailure
from envactors.vector.results import RowOutcome, RowReader
from envactors.vector.table import EnvRequest, EnvTable


class Cause(enum.Enum):
    """Why a request has no result."""

    RUNNING = enum.auto()  # its process ended while it ran
    WAITING = enum.auto()  # its process ended before it began
    RAISED = enum.auto()  # the env raised, or its result cannot be read


class RaisedOutcome:
    """The exception that an env raised, not unpickled yet; see `envactors.actor.future.Outcome`.

    Args:
        errors: Makes the errors of its actor.
        step: The step or reset.
        incarnation: The process.
        pid: Its process id.
        failure: What the worker has sent.
    """

    is_failure = True

    def __init__(
        self, errors: ErrorFactory, step: Step, incarnation: int, pid: int | None, failure: messages.Failure
    ) -> None:
        self._read: Callable[[], BaseException] = functools.partial(errors.raised, step, incarnation, pid, failure)
        self._error: BaseException | None = None

    def read(self) -> tuple[None, BaseException]:
        """Return the exception, the same one each time. Runs code of users, without the lock."""
        if self._error is None:
            self._error = self._read()
        return None, self._error


class Failure(NamedTuple):
    """A step or reset without a result.

    Attributes:
        cause: Why it has none.
        error: The error.
        incarnation: The process in which it failed, or whose end it did not survive.
        text: Description of an exception that an env raised.
        reason: Why the parent ended the process, if that concerns the request.
        in_reset: Whether the env raised in a reset, perhaps within a step.
        has_run: Whether the env has made the step, and only its result cannot be read.
    """

    cause: Cause
    error: Outcome
    incarnation: int
    text: str = ""
    reason: EndReason | None = None
    in_reset: bool = False
    has_run: bool = False


def raised(errors: ErrorFactory, step: Step, incarnation: int, pid: int | None, failure: messages.Failure) -> Failure:
    """Return the failure of a step or reset in which the env has raised; see `RaisedOutcome`."""
    error = RaisedOutcome(errors, step, incarnation, pid, failure)
    return Failure(Cause.RAISED, error, incarnation, failure.text, in_reset=failure.fault == Fault.RESET)


class Facts(NamedTuple):
    """The facts that a decision depends on.

    Attributes:
        cause: Why the request has no result.
        on_failure, autoreset: The options of the vector.
        reason: Why the parent ended the process, if that concerns the request.
        was_reset: Whether the worker ran a reset, for the user or for autoreset.
        asked_reset: Whether the user asked for a reset.
        needs_episode: Whether the request needs the episode that the env had.
        can_replay: Whether a replay brings the env to where it was.
        can_retry: Whether the same inputs may be tried once more after a replay.
        has_process: Whether the actor has a process now, or will have another one.
        has_last: Whether the env has an earlier result.
    """

    cause: Cause
    on_failure: OnFailure
    autoreset: Autoreset
    reason: EndReason | None
    was_reset: bool
    asked_reset: bool
    needs_episode: bool
    can_replay: bool
    can_retry: bool
    has_process: bool
    has_last: bool


class EnvFate(enum.Enum):
    """What becomes of the request."""

    FAIL = enum.auto()  # the error is the outcome, and the episode is lost
    REPORT = enum.auto()  # the error is the outcome, and the episode continues
    REDO = enum.auto()  # it runs again, ahead of everything that waits
    RESET = enum.auto()  # the next process resets the env, and the result contains the failure
    TRUNCATE = enum.auto()  # the last observation is the result, truncated; the env is reset later


class Decision(NamedTuple):
    """A decision about a failed request.

    Attributes:
        fate: What becomes of it.
        error: The error to report.
        repeats_reset: Whether the next process repeats a reset as the user has requested it.
        replaces_process: Whether the env raised and its process is not fit for use any more.
    """

    fate: EnvFate
    error: Outcome
    repeats_reset: bool
    replaces_process: bool


def decide(facts: Facts) -> EnvFate:
    """Decide what becomes of a failed request."""
    replays = facts.on_failure == "replay"
    if not facts.has_process:
        return EnvFate.FAIL
    if facts.cause is Cause.WAITING and (not facts.needs_episode or (replays and facts.can_replay)):
        return EnvFate.REDO
    if replays and facts.reason is EndReason.DISCARD and facts.can_replay:
        return EnvFate.REDO
    if replays and facts.can_retry and facts.cause is not Cause.WAITING and facts.reason is not EndReason.ABORT:
        return EnvFate.REDO
    if facts.on_failure == "raise":
        return EnvFate.REPORT if facts.cause is Cause.RAISED and not facts.was_reset else EnvFate.FAIL
    if facts.asked_reset or facts.autoreset == "same_step" or not facts.has_last:
        return EnvFate.RESET
    return EnvFate.TRUNCATE


def lose_episode(episodes: Episodes, index: int, fate: EnvFate) -> None:
    """Record that a failure has ended an env's episode, if it has."""
    if fate in (EnvFate.FAIL, EnvFate.RESET, EnvFate.TRUNCATE):
        resets_next = fate is EnvFate.TRUNCATE and episodes.autoreset == "next_step"
        episodes.lose(index, resets_next=resets_next)


def recover(table: EnvTable, errors: ErrorFactory, index: int, failure: Failure, *, has_process: bool) -> Decision:
    """Decide about a failed step or reset, and record what follows for the episode and the journal of the env.

    Args:
        table: The envs of the vector.
        errors: Makes the errors of its actor.
        index: The env.
        failure: The failure.
        has_process: Whether the actor has a process now, or will have another one.
    """
    journal, episodes, error = table.journals[index], table.episodes, failure.error
    request, op, reason = table.requests.get(index), int(table.ops[index]), failure.reason
    cause, replays = failure.cause, table.replays
    posted = table.posted_request(index)
    can_retry = replays and not failure.has_run and journal.can_retry(posted)
    is_excused = reason in (EndReason.ABORT, EndReason.DISCARD, EndReason.INTERRUPT)
    if cause is Cause.RUNNING and replays and not can_retry and not is_excused:
        inputs = journal.inputs(table.slab, index, posted, table.attach)
        crash = error.read()[1]
        if inputs is not None and isinstance(crash, ActorError):
            error = ReadyOutcome(None, errors.poison(crash, inputs))
    fate = decide(
        Facts(
            cause,
            table.on_failure,
            table.autoreset,
            reason,
            was_reset=failure.in_reset or bool(op & RESET),
            asked_reset=request is not None and request.method == "reset",
            needs_episode=table.needs_episode(index),
            can_replay=journal.can_replay,
            can_retry=can_retry,
            has_process=has_process,
            has_last=not episodes.flags[index] & NO_RESULT,
        )
    )
    if fate is EnvFate.REDO and cause is not Cause.WAITING and reason is not EndReason.DISCARD:
        journal.count_crash()
    lose_episode(episodes, index, fate)
    if fate in (EnvFate.FAIL, EnvFate.RESET, EnvFate.TRUNCATE):
        journal.forget()
    repeats = fate is EnvFate.RESET and _repeats_reset(table.on_failure, request, reason)
    if op & RESET and fate is not EnvFate.REDO and cause is not Cause.WAITING and not repeats:
        episodes.advance(index)  # the next episode has another seed, in case this one's is the cause
    continues = fate in (EnvFate.REDO, EnvFate.RESET, EnvFate.TRUNCATE)
    return Decision(fate, error, repeats, cause is Cause.RAISED and continues)


def apply_to_row(
    table: EnvTable,
    reader: RowReader,
    index: int,
    decision: Decision,
    incarnation: int,
    unreadable: Callable[[BaseException], ActorError],
) -> bool:
    """Apply a decision to the request of an env; return whether it runs again, and its env must be queued.

    Args:
        table: The envs of the vector.
        reader: Reads their results.
        index: The env.
        decision: The decision.
        incarnation: The process in which the request failed.
        unreadable: Makes the error of a result of this env that cannot be unpickled.
    """
    fate, error = decision.fate, decision.error
    request = table.requests.get(index) or EnvRequest("step")
    if fate is EnvFate.REDO:
        return True
    if fate is EnvFate.RESET:
        # With the user's seed once more, and with the user's options.
        seed = request.seed if decision.repeats_reset else None
        payload = request.payload if request.method == "reset" else None
        table.requests[index] = EnvRequest(request.method, True, request.future, seed, payload, failure=error)
        return True
    if fate is EnvFate.TRUNCATE and (last := reader.copy_last(index, has_info=False)) is not None:
        failed = EnvRequest("step", failure=error)
        table.complete(index, RowOutcome(reader, last, failed, None, unreadable, incarnation + 1))
    else:
        table.complete(index, error)
    return False


def _repeats_reset(on_failure: OnFailure, request: EnvRequest | None, reason: EndReason | None) -> bool:
    """Return whether the next process repeats a reset as the user has requested it."""
    was_aborted = reason not in (None, EndReason.TIMEOUT)
    # Inputs that have failed twice are not tried a third time.
    is_first = request is not None and request.method == "reset" and request.failure is None
    return is_first and (on_failure != "replay" or was_aborted)
