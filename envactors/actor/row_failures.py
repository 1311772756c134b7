"""Settles failed rows of an actor, or has them run again. Everything here runs under the actor's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from envactors.actor.decide import Cause, Failed, Fate, decide
from envactors.actor.requests import Group, Request
from envactors.actor.rows import ActorRows
from envactors.actor.slots import ASKED, Op, Outcome, Slots
from envactors.actor.states import EndReason
from envactors.errors import ActorDiedError, ActorError
from envactors.mailbox.slab import RESET


def begun(rows: ActorRows, reason: EndReason | None) -> list[int]:
    """Return the envs whose requests the process had begun and not completed; the first one has ended it.

    There are two if one was late, ended after all, and the next one began before the process was killed.
    """
    running, process = rows.running(), rows.core.process
    if rows.overdue is not None:
        return [rows.overdue] if running in (None, rows.overdue) else [rows.overdue, running]
    # What a lost node has begun is not known, and nothing that may have run is to run again.
    blames = reason in (EndReason.TIMEOUT, EndReason.ABORT)
    if running is None and (blames or (process is not None and process.worker.loss is not None)):
        running = next((index for index in rows.posted() if not rows.is_complete(index)), None)
    return [] if running is None else [running]


def lose(rows: ActorRows, begun: list[int], error: ActorError, reason: EndReason | None) -> None:
    """Settle the rows that an ended process has left, or queue them again.

    Args:
        rows: The rows.
        begun: The result of `begun`.
        error: How it ended; the error of the first of these requests.
        reason: Why the parent ended it; None if it ended by itself.
    """
    core, slots = rows.core, rows.slots
    left = rows.posted()
    rows.overdue = None
    rows.last = 0
    for index in left:
        # While an env is idle, both numbers in its row are equal.
        slots.slab.posted[index] = slots.slab.completed[index] = slots.numbers[index]
    slots.lose_episodes(rows.first, rows.stop)
    is_innocent = reason is EndReason.DISCARDED
    for index in left:
        cause = Cause.RUNNING if index in begun else Cause.WAITING
        is_blamed = index in begun[:1] and not is_innocent
        failure = error if is_blamed else core.loss_of(rows.request(index))
        fail(rows, index, cause, failure, reason if is_blamed or is_innocent else None)
    core.add_first([index for index in left if rows.is_asked(index)])
    core.reactor.wake(rows.waiter)


def lose_rest(rows: ActorRows) -> None:
    """Settle rows of earlier processes, which an exception in `lose` has left; another process has started."""
    core = rows.core
    rows.keep_complete()
    left = rows.posted()
    if left:
        lose(rows, left, core.loss_of(rows.request(left[0])), None)
    waiting = {index for group in core.table.groups() for index in group.indices}
    core.add_first([index for index in rows.indices if rows.is_asked(index) and index not in waiting])


def fail(
    rows: ActorRows,
    index: int,
    cause: Cause,
    error: BaseException,
    reason: EndReason | None = None,
    *,
    in_reset: bool = False,
) -> Fate:
    """Settle a failed request of an env; if it is to run again, its state is `ASKED` afterwards.

    Args:
        rows: The rows.
        index: The env.
        cause: Why the request has no result.
        error: Its failure.
        reason: See `Failed`.
        in_reset: Whether the env raised in a reset, perhaps within a step.
    """
    core, slots = rows.core, rows.slots
    op = slots.of[index].op or Op("step")
    journal = core.recovery.journal(index)
    # A result that cannot be read: the env has done the step, which the journal has, and would do it again.
    has_run = cause is Cause.RAISED and not slots.infos.failed(index)
    can_retry = core.recovery.replays and not has_run and journal.can_retry(slots, index)
    is_excused = reason in (EndReason.ABORT, EndReason.DISCARDED)
    if cause is Cause.RUNNING and core.recovery.replays and not can_retry and not is_excused:
        inputs = journal.inputs(core.recovery.attach, slots, index)
        if inputs is not None:
            error = core.errors.poison(cast("ActorError", error), inputs)  # env code alone raises others
    failed = Failed(
        cause,
        slots.on_failure,
        slots.autoreset,
        was_reset=in_reset or bool(slots.ops[index] & RESET),
        asked_reset=op.method == "reset",
        is_bound=slots.is_bound(index),
        is_whole=journal.whole,
        can_retry=can_retry,
        reason=reason,
        is_over=core.closing or not core.lives,
        has_last=bool(slots.has_last[index]),
    )
    fate = decide(failed)
    if fate is Fate.REDO and cause is not Cause.WAITING and reason is not EndReason.DISCARDED:
        journal.count_failure()
    _act(rows, index, failed, fate, error)
    return fate


def _act(rows: ActorRows, index: int, failed: Failed, fate: Fate, error: BaseException) -> None:
    """Do with an env's request what was decided."""
    slots, slot = rows.slots, rows.slots.of[index]
    op = slot.op or Op("step")
    if fate in (Fate.FAIL, Fate.RESET, Fate.TRUNCATE):
        slots.lose_episode(index, resets_next=fate is Fate.TRUNCATE and slots.autoreset == "next_step")
        rows.core.recovery.journal(index).forget()
    if failed.cause is Cause.RAISED and fate in (Fate.REDO, Fate.RESET, Fate.TRUNCATE):
        rows.core.discard(slot.incarnation, rows.request(index), error)
    if fate is Fate.REDO:
        slots.states[index] = ASKED
        return
    repeats = fate is Fate.RESET and _repeats(slots, op, error)
    if slots.ops[index] & RESET and failed.cause is not Cause.WAITING and not repeats:
        slot.count_episode()  # the next one has another seed, in case this one's is the cause
    if fate is Fate.RESET:
        # By the next process: with the user's seed once, and the user's options.
        payload = op.payload if op.method == "reset" else None
        slot.op = Op(op.method, True, op.future, op.seed if repeats else None, payload, failure=error)
        slots.states[index] = ASKED
        return
    outcome = Outcome(error, truncates=fate is Fate.TRUNCATE)
    if failed.cause is Cause.RAISED:
        slots.outcomes[index] = outcome  # for the caller, who is reading the row: it arrives no second time
    else:
        rows.settle(index, outcome)


def _repeats(slots: Slots, op: Op, error: BaseException) -> bool:
    """Return whether the next process repeats the reset as the user has requested it."""
    was_aborted = isinstance(error, ActorDiedError) and error.aborted
    # Inputs that have failed twice are not tried a third time.
    tries_again = op.failure is None and (slots.on_failure != "replay" or was_aborted)
    return op.method == "reset" and tries_again


def fail_group(rows: ActorRows, group: Group, error: Callable[[Request], ActorError]) -> None:
    """Fail envs that wait to be posted, and that nothing posts any more."""
    for index in group.indices:
        if rows.is_asked(index):
            fail(rows, index, Cause.WAITING, error(rows.request(index)))


def fail_lost(rows: ActorRows) -> None:
    """Fail waiting requests that need a lost episode."""
    core, slots = rows.core, rows.slots
    for group in core.table.groups():
        for index in tuple(group.indices):
            whole = core.recovery.replays and core.recovery.journal(index).whole
            if whole or not rows.is_lost(index) or not slots.is_bound(index):
                continue
            if fail(rows, index, Cause.WAITING, core.loss_of(rows.request(index))) is not Fate.RESET:
                group.indices.remove(index)


def turn(rows: ActorRows) -> Request:
    """Return what the worker runs, or begins next."""
    process, running = rows.core.process, rows.running()
    assert process is not None, "rows are in flight"
    request = rows.request(rows.posted()[0] if running is None else running)
    # Between two envs, the next one has had its time since the last one began.
    request.started = max(process.page.progress().since, rows.posted_at)
    return request
