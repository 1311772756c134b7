"""Looking at what a worker runs, whether it has passed its deadline or is slow, and the warning about slow calls.

When that happens is in `envactors.actor.timers`; what follows from a deadline, in `envactors.actor.supervisor`.
"""

from __future__ import annotations

import functools
import logging
import math
import re

from envactors.actor import row_failures
from envactors.actor.calls import Calls
from envactors.actor.core import ActorCore
from envactors.actor.process import ActorProcess
from envactors.actor.requests import Request
from envactors.actor.states import LIVE

_log = logging.getLogger("envactors")
# How long a worker may take to write its stacks, in seconds.
_STACKS_PATIENCE = 1.0
_FRAME = re.compile(r"^  File ", re.MULTILINE)
# The modules that call env code. The envs of `envactors.testing` are not among them.
_LIBRARY = re.compile(r"^.*[/\\]envactors[/\\](actor|backends|integrations|mailbox|remote|rollout|vector|worker)[/\\]")


def is_overdue(calls: Calls, now: float) -> bool:
    """Return whether the running request has passed its deadline; if not, set when to look again.

    Called under the lock, once what has come was taken into account.
    """
    core, process = calls.core, calls.core.process
    if core.phase is not LIVE or process is None or not calls.is_busy:
        return False
    if untrue := process.page.find_untrue(len(core.config.start.factories)):
        process.distrust(f"{untrue} on its control page cannot be true")
    if process.untrue:
        return False
    turn = _look(calls, process, now)
    if turn.timeout is None or now < turn.started + turn.timeout:
        return False
    if core.table.running is not None:  # no result of it counts any more
        core.table.running.on_overdue(turn, process.page)
    elif calls.rows is not None:
        calls.rows.overdue = turn.index
    return True


def look_unread(calls: Calls, now: float) -> None:
    """Look at a worker that nothing can end, without reading what has come; not under the lock.

    It does not enter a change: at its end this thread would run the requests of an in-process worker.
    """
    core = calls.core
    with core.lock:
        if core.timers.is_due("call", now):
            core.timers.cancel("call")
            if core.phase is LIVE and core.process is not None and calls.is_busy:
                _look(calls, core.process, now)


def _look(calls: Calls, process: ActorProcess, now: float) -> Request:
    """Return the running request, warn if it is slow, and set when to look again."""
    core, turn = calls.core, what_runs(calls, process)
    slow = math.inf if core.config.deadlines.slow is None else core.config.deadlines.slow
    if now >= turn.started + slow and turn.started != calls.reported:
        calls.reported = turn.started
        _warn(core, process, turn, now - turn.started)
    core.timers.set("call", next_look(turn, now, slow, core.first_look))
    return turn


def next_look(turn: Request, now: float, slow: float, shortest: float) -> float:
    """Return when to look at a worker again whose deadline has not passed.

    Args:
        turn: What the worker runs.
        now: The present time (`time.monotonic`).
        slow: After how many seconds a call is slow.
        shortest: The shortest deadline of whatever may follow, ``slow`` included, in seconds.
    """
    marks = [turn.started + slow, now + shortest]
    if turn.timeout is not None:
        marks.append(turn.started + turn.timeout)
    return min(mark for mark in marks if mark > now)


def _warn(core: ActorCore, process: ActorProcess, turn: Request, seconds: float) -> None:
    stacks, where = process.worker.ask_stacks(), {"actor": core.config.name, "incarnation": core.incarnation}
    text = (
        f"{turn.method} of env {turn.index} of actor {core.config.name!r} (pid {core.pid}, incarnation "
        f"{core.incarnation}) has been running for {seconds:.1f} s (Deadlines(slow={core.config.deadlines.slow:g})) "
        "and continues"
    )

    def tell() -> None:
        evidence, extra = order_stacks(stacks.wait(_STACKS_PATIENCE)), {**where, "env_id": turn.index}
        log = functools.partial(_log.warning, "%s; the stacks of its worker:\n%s", text, evidence, extra=extra)
        core.reactor.logs.notices.add(log)

    core.reactor.callbacks.submit(tell)


def what_runs(calls: Calls, process: ActorProcess) -> Request:
    """Return what a busy worker runs, or begins next; under the lock."""
    call = calls.core.table.running
    if call is not None:
        return call.turn(process.page, calls.core.config.deadlines)
    assert calls.rows is not None, "rows are in flight"
    return row_failures.turn(calls.rows)


def order_stacks(text: str) -> str:
    """Return stacks with the thread that runs the env first, its innermost frame on top, and less of the library.

    Args:
        text: The stacks as a worker has written them; text of another form is returned as it is.
    """
    threads = re.split(r"\n\n(?=.*\(most recent call first\))", text.strip("\n"))
    trimmed = [_trim(thread) for thread in threads]
    trimmed.sort(key=lambda thread: not thread[1])  # stable: the others keep their order
    return "\n\n".join(stack for stack, _ in trimmed)


def _trim(stack: str) -> tuple[str, bool]:
    """Remove the frames that lead to the env from a thread's stack; return it, and whether there were any."""
    head, *frames = _FRAME.split(stack)
    if "most recent call first" not in head:
        frames.reverse()
    ours = [_LIBRARY.match(frame) is not None for frame in frames]
    if not any(ours):
        return stack, False
    end = len(ours) - ours[::-1].index(True)  # those outside of it have started the library
    while end > 0 and ours[end - 1]:
        end -= 1
    kept = frames[:end] or frames  # the library's own thread
    return head + "".join(f"  File {frame.rstrip()}\n" for frame in kept).rstrip(), bool(end)
