"""Why a step or reset has no result: the losses of requests, and the errors that users get for them.

`envactors.vector.fates` decides what follows from a loss, and `EnvRecovery` applies that.
"""

from __future__ import annotations

from envactors.actor.activity import Activity
from envactors.actor.actor import Actor
from envactors.actor.future import LazyOutcome, Outcome, ReadyOutcome
from envactors.actor.job import ErrorOf, ProcessExit
from envactors.actor.states import EndReason, is_crash
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Failure, Fault
from envactors.vector.fates import Cause, RequestLoss
from envactors.vector.table import EnvTable


def raised_loss(table: EnvTable, actor: Actor, activity: Activity, report: Failure) -> RequestLoss:
    """Return the loss of a request in which the env raised, without unpickling the exception."""
    incarnation, pid = table.posted_in[activity.env], actor.pid
    error = LazyOutcome(lambda: (None, actor.errors.raised(activity, incarnation, pid, report)), is_failure=True)
    ended = report.fault is Fault.LAST_RESULT
    return RequestLoss(Cause.ERROR, error, incarnation, activity, actor.is_usable, report, ended_episode=ended)


def unreadable_loss(table: EnvTable, actor: Actor, index: int, error: BaseException) -> RequestLoss:
    """Return the loss of a result that cannot be unpickled."""
    where = table.posted_in[index], table.activity(index), actor.is_usable
    ended = table.slab.ends_episode(index, table.ops[index])
    return RequestLoss(Cause.ERROR, ReadyOutcome(None, error), *where, ended_episode=ended, is_recorded=True)


def exit_loss(actor: Actor, activity: Activity, ended: ProcessExit) -> RequestLoss:
    """Return the loss of a request that an ended process has not completed."""
    culprit = ended.culprit if ended.culprit is not None and ended.culprit.env == activity.env else None
    # The worker may have finished a step after its deadline, and begun the next one: then both have begun.
    begun = [each.env for each in (ended.culprit, ended.remainder.running) if each is not None]
    is_discard = ended.reason is EndReason.DISCARD
    is_blamed = culprit is not None and not is_discard
    error = ended.error if is_blamed else unfinished_error(actor, ended.error, activity)
    return RequestLoss(
        cause=Cause.RUNNING if activity.env in begun else Cause.NOT_BEGUN,
        error=ReadyOutcome(None, error),
        incarnation=ended.process.incarnation,
        activity=culprit or activity,
        may_continue=ended.plan.has_process,
        reason=ended.reason if is_blamed or is_discard else None,
        may_blame_inputs=is_crash(ended.reason),
    )


def queued_request_loss(table: EnvTable, actor: Actor, index: int, error_of: ErrorOf) -> RequestLoss:
    """Return the loss of a queued request that no process will run."""
    activity = table.activity(index)
    # A closing actor reports the error that led to the retry, rather than that it is closed.
    earlier = table.request(index).earlier_error if actor.is_closing else None
    error = earlier or ReadyOutcome(None, error_of(activity))
    return RequestLoss(Cause.NOT_BEGUN, error, actor.process.incarnation, activity, may_continue=False)


def lost_episode_loss(actor: Actor, activity: Activity) -> RequestLoss:
    """Return the loss of a request that continues an episode which ended with an earlier process."""
    last = actor.last_exit_error
    incarnation = actor.process.incarnation if last is None or last.incarnation is None else last.incarnation
    error = ReadyOutcome(None, unfinished_error(actor, last, activity))
    return RequestLoss(Cause.NOT_BEGUN, error, incarnation, activity, actor.is_usable)


# Errors --------------------------------------------------------------------------------------------------


def unfinished_error(actor: Actor, exit_error: ActorError | None, activity: Activity) -> ActorError:
    """Return the error of a request that its process has not completed: the error of the exit, or one that names it.

    Args:
        actor: The actor.
        exit_error: The error of the exit; None if no process of the actor has ended.
        activity: The request.
    """
    if exit_error is None:
        return actor.errors.ended_because(activity, EndReason.ABORT)
    if (exit_error.call_id, exit_error.index) == (activity.call_id, activity.env):
        return copy_error(exit_error)
    return actor.errors.not_begun(activity, exit_error)


def discard_error(actor: Actor, loss: RequestLoss, reported: Outcome, pid: int | None) -> ActorError:
    """Return the error of a process that is discarded since an env raised. Runs code of users, without the lock.

    Args:
        actor: The actor.
        loss: The loss of the request.
        reported: The error of the request, as it is reported.
        pid: The process.
    """
    cause = reported.read()[1]
    assert cause is not None, "the env has raised"
    text = type(cause).__name__ if loss.report is None else loss.report.text
    error = actor.errors.discarded(loss.activity, loss.incarnation, pid, cause, text)
    error.bundle = getattr(reported, "bundle", None)
    return error
