"""The worker's half of a replay: repeats everything that was requested of an env since its last seeded reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envactors.arrays.slab import RESET
from envactors.arrays.specs import reader
from envactors.wire.control_page import METHOD_RESET, METHOD_STEP, ControlPage
from envactors.wire.messages import REQUESTS, Kind, RecordedSteps, Replay, Set
from envactors.wire.pickling import loads
from envactors.worker.host import Host, HostedEnv


def replay(host: Host, page: ControlPage, message: Replay) -> bool:
    """Repeat the journal of an env whose process was lost.

    Args:
        host: The env's host.
        page: The control page. Each entry is recorded there, since each has a deadline of its own.
        message: The journal.

    Returns:
        Whether the env has returned the same observations.
    """
    hosted = host.hosted_envs[message.env]
    for payload in message.attributes:
        host.set(Set(*loads(payload)))
    if not message.entries:
        return True
    for entry in message.entries:
        if isinstance(entry, RecordedSteps):
            _repeat_steps(hosted, page, message, entry)
        else:
            _repeat(host, hosted, page, *entry)
    same = hosted.check == message.check
    # If they differ, the env counts as new, so that its next reset is seeded as after a renewal.
    hosted.was_reset = same
    return same


def _repeat_steps(hosted: HostedEnv, page: ControlPage, message: Replay, recorded: RecordedSteps) -> None:
    assert message.action is not None, "steps in shared memory have actions of a known spec"
    for row, operation in enumerate(recorded.ops):
        if operation == RESET:
            page.record_env(METHOD_RESET, hosted.position)
            hosted.reset(None, None, None)
        else:
            action = reader(message.action, recorded.actions, row)()
            page.record_env(METHOD_STEP, hosted.position)
            hosted.step(action, message.autoreset, None)


def _repeat(host: Host, hosted: HostedEnv, page: ControlPage, kind: int, payload: bytes) -> None:
    content = REQUESTS[kind](*loads(payload))
    if kind == Kind.RESET:
        page.record_env(METHOD_RESET, hosted.position)
        hosted.reset(content.seed, content.options, content.root_seed)
    elif kind == Kind.STEP:
        page.record_env(METHOD_STEP, hosted.position)
        hosted.step(content.action, content.autoreset, content.root_seed)
    else:
        handlers: dict[int, Callable[[Any], Any]] = {Kind.CALL: host.call, Kind.SET: host.set}
        try:
            handlers[kind](content)  # records on the page what runs
        except Exception:
            if kind != Kind.CALL:  # the call may have raised the first time, too
                raise
