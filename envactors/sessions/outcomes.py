"""How a session ended: `Completed` or `Failed`, and how an exception maps to a kind of failure."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from typing import Any, Literal, get_args

from envactors.errors import ActorDiedError, ActorStartError, ActorTimeoutError, NodeLostError

FailureKind = Literal["start", "timeout", "died", "exception", "cancelled", "idle", "node"]
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
_RETRYABLE: frozenset[FailureKind] = frozenset(("start", "timeout", "died", "node"))
# The first class that matches decides: the later ones are base classes of earlier ones.
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
        task: The task that the session was for; the session's name if `SessionPool.session` began it.
        value: What the episode returned; None for a session of `SessionPool.session`.
        seconds: How long it took. For `SessionPool.run` that includes waiting for an actor, and retries.
    """

    task: Any
    value: Any
    seconds: float


@dataclasses.dataclass(frozen=True)
class Failed:
    """A session that did not end normally. It has no value, so a failure is never mistaken for a result.

    Attributes:
        task: The task that the session was for; the session's name if `SessionPool.session` began it.
        kind: What ended it: ``"start"`` (the process or the factory failed, or the start took too long),
            ``"timeout"`` (a call missed its deadline), ``"died"`` (the process crashed), ``"exception"`` (the episode
            or the env raised), ``"cancelled"``, ``"idle"`` (no call within the idle limit), or ``"node"`` (the node
            was lost).
        error: The exception. It carries the evidence: exit status, stderr, or stacks.
        retryable: Whether another attempt may succeed: True for ``"start"``, ``"timeout"``, ``"died"`` and ``"node"``.
        seconds: How long it took. For `SessionPool.run` that includes waiting for an actor, and retries.
    """

    task: Any
    kind: FailureKind
    error: BaseException
    retryable: bool
    seconds: float


def kind_of(error: BaseException) -> FailureKind:
    """Return the kind of failure that an exception stands for."""
    if isinstance(error, ActorDiedError) and error.aborted:
        return "cancelled"
    return next((kind for cls, kind in _KIND_OF_ERROR if isinstance(error, cls)), "exception")


def failed(task: Any, kind: FailureKind, error: BaseException, seconds: float) -> Failed:
    """Return a `Failed` whose ``retryable`` follows from its kind."""
    return Failed(task, kind, error, kind in _RETRYABLE, seconds)
