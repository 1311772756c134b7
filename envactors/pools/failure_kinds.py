"""The kinds of failures that statistics and outcomes tell apart."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Literal, get_args

from envactors.errors import ActorDiedError, ActorStartError, ActorTimeoutError, NodeLostError

FailureKind = Literal["start", "timeout", "died", "exception", "cancelled", "idle", "node"]
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
# The first match wins, so subclasses come before their base classes.
_KIND_OF_ERROR: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (ActorStartError, "start"),
    (ActorTimeoutError, "timeout"),
    (NodeLostError, "node"),
    (ActorDiedError, "died"),
    (asyncio.CancelledError, "cancelled"),
    (concurrent.futures.CancelledError, "cancelled"),
)


def kind_of(error: BaseException) -> FailureKind:
    """Return the kind of failure that an exception maps to."""
    if isinstance(error, ActorDiedError) and error.aborted:
        return "cancelled"
    return next((kind for cls, kind in _KIND_OF_ERROR if isinstance(error, cls)), "exception")
