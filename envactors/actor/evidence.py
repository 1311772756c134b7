"""The evidence of why env code crashed, hangs, or raised: stacks and tracebacks, with the frames of users first."""

from __future__ import annotations

import re
from pathlib import Path

from envactors.errors import ActorDiedError, ActorError, ActorTimeoutError, RemoteTraceback, cause_of
from envactors.mailbox.pickling import safe_traceback

_FRAME = re.compile(r"^  File ", re.MULTILINE)
# The stacks of threads as `faulthandler` writes them.
_STACKS = re.compile(r"(?:^.*\(most recent call first\):(?:\n  .*)*\n*)+", re.MULTILINE)
# The most lines of stderr that errors contain, and of the stacks of a fatal error.
_MOST_LINES, _MOST_LINES_OF_STACKS = 50, 30
# The modules that call env code. They may have other directories, as those of workers on nodes have.
_LIBRARY = re.compile(
    r"^.*[/\\]envactors[/\\]((?:vector_env|"
    r"(?:actor|backends|integrations|mailbox|pools|reruns|rollout|state|vector|worker)[/\\][\w/\\]{1,80})\.py)"
)


def evidence_of(error: ActorError) -> str:
    """Return what shows where env code was when its process ended; empty if nothing does. Runs code of users.

    These are the stacks of a process that missed a deadline, the traceback of an env that raised, or the last output of
    a process that crashed.
    """
    if isinstance(error, ActorTimeoutError):
        return order_stacks(error.stacks or "")
    raised = cause_of(error.__cause__) if error.__cause__ is not None else None
    if isinstance(raised, RemoteTraceback):
        return _without_library(str(raised))
    if isinstance(error, ActorDiedError) and error.__cause__ is not None:  # the env has raised in this process
        return _without_library("".join(safe_traceback(error.__cause__)))
    return str(getattr(error, "stderr_tail", ""))


def _without_library(traceback: str) -> str:
    """Return a traceback from the first frame of a user on."""
    head, *frames = _FRAME.split(traceback.strip("\n"))
    while len(frames) > 1 and _is_of_library(frames[0]):
        del frames[0]
    return head + "".join(f"  File {frame}" for frame in frames)


def _is_of_library(frame: str) -> bool:
    """Return whether a frame is of this library: this package has a module of its path, too."""
    found = _LIBRARY.match(frame)
    return found is not None and (Path(__file__).parents[1] / found[1].replace("\\", "/")).is_file()


def order_fatal_error(stderr: str) -> str:
    """Return the last lines of stderr, in which the stacks of a fatal error begin with the thread that failed.

    Args:
        stderr: What the process has written. Stacks are ordered and cut, so that some of the lines around them stay.
    """

    def order(found: re.Match[str]) -> str:
        stacks = found[0].rstrip("\n")
        lines = order_stacks(stacks, "Current thread 0").split("\n")[:_MOST_LINES_OF_STACKS]
        return "\n".join(lines) + found[0][len(stacks) :]

    return "\n".join(_STACKS.sub(order, stderr).split("\n")[-_MOST_LINES:])


def order_stacks(text: str, first: str = "") -> str:
    """Return stacks with the thread that runs the env first, the innermost frame on top, and less of this library.

    Args:
        text: The stacks as a worker has written them. Text of another form is returned as it is.
        first: How the stack begins that comes even before that of the env.
    """
    threads = re.split(r"\n\n(?=.*\(most recent call first\))", text.strip("\n"))
    trimmed = [_trim(thread) for thread in threads]
    # Stable: the others keep their order.
    trimmed.sort(key=lambda thread: (not thread[0].startswith(first), not thread[1]))
    return "\n\n".join(stack for stack, _ in trimmed)


def _trim(stack: str) -> tuple[str, bool]:
    """Remove the frames of this library that lead to the env from a thread's stack; return whether there were any."""
    head, *frames = _FRAME.split(stack)
    if "most recent call first" not in head:
        frames.reverse()
    ours = [_is_of_library(frame) for frame in frames]
    if not any(ours):
        return stack, False
    end = len(ours) - ours[::-1].index(True)  # those after it have started the library
    while end > 0 and ours[end - 1]:
        end -= 1
    return head + "".join(f"  File {frame.rstrip()}\n" for frame in frames[:end] or frames).rstrip(), bool(end)
