"""The outcomes of a session, `Completed` and `Failed`, and the kind of failure that each exception maps to.

What happens next, such as a retry, is decided in `envactors.sessions.runs`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from typing import Any, Literal, get_args

from envactors.errors import ActorDiedError, ActorStartError, ActorTimeoutError, NodeLostError

FailureKind = Literal["start", "timeout", "died", "exception", "cancelled", "idle", "node"]
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
_RETRYABLE: frozenset[FailureKind] = frozenset(("start", "timeout", "died", "node"))
# The first match wins, so subclasses come before their base classes.
_KIND_OF_ERROR: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (ActorStartError, "start"),
    (ActorTimeoutError, "timeout"),
    (NodeLostError, "node"),
    (ActorDiedError, "died"),
    (asyncio.CancelledError, "cancelled"),
    (concurrent.futures.CancelledError, "cancelled"),
)


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


def kind_of(error: BaseException) -> FailureKind:
    """Return the kind of failure that an exception maps to."""
    if isinstance(error, ActorDiedError) and error.aborted:
        return "cancelled"
    return next((kind for cls, kind in _KIND_OF_ERROR if isinstance(error, cls)), "exception")


def failed(task: Any, kind: FailureKind, error: BaseException, seconds: float) -> Failed:
    """Return a `Failed` whose ``retryable`` follows from its kind."""
    return Failed(task, kind, error, kind in _RETRYABLE, seconds)
