"""The outcomes of a session, `Completed` and `Failed`.

What happens next, such as a retry, is decided in `envactors.sessions.runs`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from envactors.pools.failure_kinds import FailureKind

_RETRYABLE: frozenset[FailureKind] = frozenset(("start", "timeout", "died", "node"))


@dataclasses.dataclass(frozen=True)
class Completed:
    """A session that ended normally.

    Attributes:
        task: The task of the episode; for `SessionPool.session`, the name of the session.
        value: What the episode returned; for `SessionPool.session`, None.
        seconds: How long the session took. For `SessionPool.run` this includes waiting for an actor, and retries.
    """

    task: Any
    value: Any
    seconds: float


@dataclasses.dataclass(frozen=True)
class Failed:
    """A session that did not end normally. It has no value, so a failure is never mistaken for a result.

    Attributes:
        task: The task of the episode; for `SessionPool.session`, the name of the session.
        kind: What ended the session: ``"start"`` (the process or the factory failed, or the start took too long),
            ``"timeout"`` (a call missed its deadline), ``"died"`` (the process crashed), ``"exception"`` (the episode
            or the env raised), ``"cancelled"``, ``"idle"`` (no call within the idle limit), or ``"node"`` (the node
            was lost).
        error: The exception, with the diagnostics that are available: exit status, stderr, or stacks.
        retryable: Whether another attempt may succeed: True for ``"start"``, ``"timeout"``, ``"died"`` and ``"node"``.
        seconds: How long the session took. For `SessionPool.run` this includes waiting for an actor, and retries.
    """

    task: Any
    kind: FailureKind
    error: BaseException
    retryable: bool
    seconds: float


def failed(task: Any, kind: FailureKind, error: BaseException, seconds: float) -> Failed:
    """Return a `Failed` whose ``retryable`` follows from its kind."""
    return Failed(task, kind, error, kind in _RETRYABLE, seconds)
