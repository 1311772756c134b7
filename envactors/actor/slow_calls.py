"""Warnings about calls that take long."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from envactors.actor.activity import Activity
from envactors.actor.base import ActorBase

_log = logging.getLogger("envactors")
# How long a worker may take to write its stacks, in seconds.
STACKS_PATIENCE = 1.0
_FRAME = re.compile(r"^  File ", re.MULTILINE)
# The modules that call env code.
_LIBRARY = re.compile(
    r"^.*[/\\]envactors[/\\](vector_env\.py|(actor|backends|integrations|mailbox|rollout|vector|worker)[/\\])"
)


def warn(actor: ActorBase, activity: Activity, seconds: float, read_stacks: Callable[[], str]) -> None:
    """Log a warning about a slow activity.

    Args:
        actor: The actor.
        activity: What it runs.
        seconds: How long it has been running.
        read_stacks: Returns the stacks of its worker, perhaps after a while.
    """
    incarnation = actor.incarnation.index
    text = (
        f"{activity.method} of env {activity.env} of actor {actor.name!r} (pid {actor.pid}, incarnation {incarnation}) "
        f"has been running for {seconds:.1f} s (Deadlines(slow={actor.config.deadlines.slow:g})) and continues"
    )

    def log_with_stacks() -> None:
        evidence = order_stacks(read_stacks())
        extra = {"actor": actor.name, "incarnation": incarnation, "env_id": activity.env}
        actor.runtime.log(lambda: _log.warning("%s; the stacks of its worker:\n%s", text, evidence, extra=extra))

    actor.runtime.callbacks.submit(log_with_stacks)


def order_stacks(text: str) -> str:
    """Return stacks with the thread that runs the env first, the innermost frame on top, and less of this library.

    Args:
        text: The stacks as a worker has written them. Text of another form is returned as it is.
    """
    threads = re.split(r"\n\n(?=.*\(most recent call first\))", text.strip("\n"))
    trimmed = [_trim(thread) for thread in threads]
    trimmed.sort(key=lambda thread: not thread[1])  # stable: the others keep their order
    return "\n\n".join(stack for stack, _ in trimmed)


def _trim(stack: str) -> tuple[str, bool]:
    """Remove the frames of this library that lead to the env from a thread's stack; return whether there were any."""
    head, *frames = _FRAME.split(stack)
    if "most recent call first" not in head:
        frames.reverse()
    ours = [_LIBRARY.match(frame) is not None for frame in frames]
    if not any(ours):
        return stack, False
    end = len(ours) - ours[::-1].index(True)  # those after it have started the library
    while end > 0 and ours[end - 1]:
        end -= 1
    kept = frames[:end] or frames
    return head + "".join(f"  File {frame.rstrip()}\n" for frame in kept).rstrip(), bool(end)
