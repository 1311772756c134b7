"""What becomes of the running call when its process has ended. Everything here runs under the actor's lock."""

from __future__ import annotations

from envactors.actor.calls import Calls
from envactors.actor.exit_decision import Fate
from envactors.actor.process import ActorProcess
from envactors.actor.requests import CallRequest
from envactors.actor.states import EndReason
from envactors.errors import ActorError
from envactors.mailbox.messages import Kind


def take_running(calls: Calls, process: ActorProcess | None) -> CallRequest | None:
    """Take out the call that runs; it is queued again if it had not begun."""
    core, table = calls.core, calls.core.table
    if core.is_inconsistent:
        core.forget_uncertain()
    if core.permits is not None:
        core.permits.withdraw(core)
    call = table.interrupt()
    blames = core.reason in (EndReason.TIMEOUT, EndReason.ABORT)
    if call is not None and call.kind is not None and process is not None and not blames:
        began = process.page.progress().call_id == call.call_id
        if not began:
            table.queue.appendleft(call)
            call = None
    table.withdraw_calls(lambda waiting: waiting.kind == Kind.REPLAY)  # the next process gets its own
    return call


def settle_running(calls: Calls, fate: Fate, call: CallRequest, error: ActorError) -> None:
    """Do with the call that was running what was decided; the error is what it fails with, if it does."""
    table = calls.core.table
    if fate is Fate.HOLD:
        table.running = call
    elif fate is Fate.AGAIN:
        call.retries -= 1
        table.queue.appendleft(call)
    elif fate is Fate.FAIL:
        calls.fail(call, error)
