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
from envactors.actor.states import LIVE
from envactors.actor.timers import Turn, next_look

_log = logging.getLogger("envactors")
# How long a worker may take to write its stacks, in seconds.
_STACKS_PATIENCE = 1.0
_FRAME = re.compile(r"^  File ", re.MULTILINE)
# The modules that call env code. The envs of `envactors.testing` are not among them.
_LIBRARY = re.compile(r"^.*[/\\]envactors[/\\](actor|backends|integrations|mailbox|remote|rollout|vector|worker)[/\\]")


class Watch:
    """Looks at what the worker of one actor runs. Everything here runs under the actor's lock.

    Args:
        core: The actor's state.
        calls: Its requests.
    """

    def __init__(self, core: ActorCore, calls: Calls) -> None:
        self._core = core
        self._calls = calls
        slow = core.config.deadlines.slow
        self._slow = math.inf if slow is None else slow
        # The call that was warned of last.
        self._reported: Turn | None = None

    def is_overdue(self, now: float) -> bool:
        """Return whether the running request has passed its deadline; if not, set when to look again.

        The caller has taken into account what has come.
        """
        core, process = self._core, self._core.process
        if core.phase is not LIVE or process is None or not self._calls.is_busy:
            return False
        if untrue := process.page.find_untrue(len(core.config.start.factories)):
            process.distrust(f"{untrue} on its control page cannot be true")
        if process.untrue:
            return False
        turn = self._look(process, now)
        if turn.limit is None or now < turn.since + turn.limit:
            return False
        if core.table.running is not None:  # no result of it counts any more
            core.table.running.on_overdue(turn, process.page)
        elif self._calls.rows is not None:
            self._calls.rows.overdue = turn.env_id
        return True

    def look_unread(self, now: float) -> None:
        """Look at a worker that nothing can end, without reading what has come; not under the lock.

        It does not enter a change: at its end this thread would run the requests of an in-process worker.
        """
        core = self._core
        with core.lock:
            if core.timers.when.get("call", math.inf) <= now:
                core.timers.cancel("call")
                if core.phase is LIVE and core.process is not None and self._calls.is_busy:
                    self._look(core.process, now)

    def _look(self, process: ActorProcess, now: float) -> Turn:
        """Return the running request, warn if it is slow, and set when to look again."""
        turn = what_runs(self._calls, process)
        if now >= turn.since + self._slow and turn != self._reported:
            self._reported = turn
            self._warn(process, turn, now - turn.since)
        self._core.timers.set("call", next_look(turn, now, self._slow, self._core.first_look))
        return turn

    def _warn(self, process: ActorProcess, turn: Turn, seconds: float) -> None:
        core, stacks = self._core, process.worker.ask_stacks()
        text = (
            f"{turn.method} of env {turn.env_id} of actor {core.config.name!r} (pid {core.pid}, incarnation "
            f"{core.incarnation}) has been running for {seconds:.1f} s (Deadlines(slow={self._slow:g})) and continues"
        )
        where = {"actor": core.config.name, "incarnation": core.incarnation, "env_id": turn.env_id}

        def tell() -> None:
            evidence = order_stacks(stacks.wait(_STACKS_PATIENCE))
            log = functools.partial(_log.warning, "%s; the stacks of its worker:\n%s", text, evidence, extra=where)
            core.reactor.logs.notices.add(log)

        core.reactor.callbacks.submit(tell)


def what_runs(calls: Calls, process: ActorProcess) -> Turn:
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
