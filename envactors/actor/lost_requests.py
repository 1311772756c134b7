"""What becomes of the requests of a process that has ended; all of it under the actor's lock."""

from __future__ import annotations

from envactors.actor.batch_step import StepRequest
from envactors.actor.calls import Calls
from envactors.actor.core import ActorCore
from envactors.actor.exit_decision import ExitDecision, ExitFacts, Fate, Running
from envactors.actor.process import ActorProcess
from envactors.actor.requests import CallRequest, Entry, Request
from envactors.actor.shm_batch_step import SharedMemoryBatchStep
from envactors.actor.states import EndReason
from envactors.errors import ActorError
from envactors.wire.messages import Kind


def interrupt(core: ActorCore, calls: Calls, process: ActorProcess | None) -> Request | None:
    """Take out what runs: return the request that was running, queue what had not begun."""
    page = None if process is None else process.page
    blame = core.reason in (EndReason.TIMEOUT, EndReason.ABORT)
    current: Request | None = None
    waiting: list[Request] = []
    for entry in core.table.interrupt():
        one, others = entry.split(page, blame=blame)
        if current is None:
            current = one
        elif one is not None:
            waiting.append(one)  # it had begun after the deadline of the first had passed
        waiting += others
        if isinstance(entry, SharedMemoryBatchStep):
            kept = [index for index in entry.envs if index not in entry.failed_envs]
            core.completed += len(kept)
            entry.record(core.recovery, kept)
            core.reactor.wake(entry.waiter)
    if isinstance(current, StepRequest):
        current.timeout = core.config.deadlines.of(current.method)
    for request in reversed(waiting):
        core.table.put_back(calls.as_entry(request))
    core.table.withdraw_all(lambda entry: _what_runs(entry) is Running.REPLAY)  # the next process is asked anew
    return current


def exit_facts(core: ActorCore, running: Request | None, reason: EndReason | None, *, adopting: bool) -> ExitFacts:
    """Return what the decision about the end of a process depends on."""
    return ExitFacts(
        reason=reason,
        closing=core.closing,
        started=core.started,
        adopting=adopting,
        running=_what_runs(running),
        retries=0 if running is None else running.retries,
        replays=core.recovery.replays,
        can_retry=isinstance(running, StepRequest)
        and core.recovery.can_retry(running.index, seeded=running.is_seeded_reset),
    )


def settle_running(core: ActorCore, calls: Calls, decision: ExitDecision, running: Request, error: ActorError) -> None:
    """Do with the request that was running what was decided; the error is what it fails with, if it does."""
    recovery = core.recovery
    if decision.fate in (Fate.HOLD, Fate.AGAIN):
        entry = calls.as_entry(running)
        entry.started = running.started
        if decision.fate is Fate.HOLD:
            core.table.running = [entry]
            return
        running.retries -= decision.spends_retry
        if decision.counts_against_inputs:
            recovery.count_failure(running.index)
        core.table.put_back(entry)
    elif decision.fate is Fate.FAIL:
        inputs = None
        if isinstance(running, StepRequest) and not decision.aborted:
            inputs = recovery.inputs(running)
        if decision.forgets_env:
            recovery.forget(running.index)
        calls.fail(running, error if inputs is None else core.errors.poison(error, inputs))


def _what_runs(running: Entry | Request | None) -> Running:
    if running is None:
        return Running.NOTHING
    if not isinstance(running, CallRequest):
        return Running.STEP
    special = {None: Running.RENEWAL, Kind.REPLAY: Running.REPLAY}
    return special.get(running.kind, Running.CALL)
