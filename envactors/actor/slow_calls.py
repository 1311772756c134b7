"""The warning about a call that takes long. When a worker is looked at is in `envactors.actor.timers`."""

from __future__ import annotations

import functools
import logging
import math
import re

from envactors.actor.core import ActorCore
from envactors.actor.timers import Turn

_log = logging.getLogger("envactors")
# How long a worker may take to write its stacks, in seconds.
_STACKS_PATIENCE = 1.0
_FRAME = re.compile(r"^  File ", re.MULTILINE)
# The modules that call env code. The envs of `envactors.testing` are not among them.
_LIBRARY = re.compile(r"^.*[/\\]envactors[/\\](actor|backends|integrations|mailbox|remote|rollout|vector|worker)[/\\]")


class SlowCalls:
    """Warns of each slow call of one actor once, with the stacks of its worker.

    Args:
        core: The actor's state.

    Attributes:
        seconds: After how many seconds a call is slow; infinity for never.
    """

    def __init__(self, core: ActorCore) -> None:
        self._core = core
        slow = core.config.deadlines.slow
        self.seconds = math.inf if slow is None else slow
        # The call that was warned of last.
        self._reported: Turn | None = None

    def check(self, turn: Turn, now: float) -> None:
        """Warn of what the worker runs, if it is slow and that was not told; under the actor's lock."""
        core, process = self._core, self._core.process
        if now < turn.since + self.seconds or turn == self._reported or process is None:
            return
        self._reported = turn
        stacks = process.worker.ask_stacks()
        text = (
            f"{turn.method} of env {turn.env_id} of actor {core.config.name!r} (pid {core.pid}, incarnation "
            f"{core.incarnation}) has been running for {now - turn.since:.1f} s (Deadlines(slow={self.seconds:g})) and "
            "continues"
        )
        where = {"actor": core.config.name, "incarnation": core.incarnation, "env_id": turn.env_id}

        def tell() -> None:
            evidence = order_stacks(stacks.wait(_STACKS_PATIENCE))
            log = functools.partial(_log.warning, "%s; the stacks of its worker:\n%s", text, evidence, extra=where)
            core.reactor.logs.notices.add(log)

        core.reactor.callbacks.submit(tell)


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
