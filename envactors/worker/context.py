"""Who is running: what env code can ask about itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextvars import ContextVar


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """The actor whose code is running.

    Attributes:
        name: The actor's name.
        index: The index of the env whose code is running.
        incarnation: 0 for the first process, one more for each further one.
    """

    name: str
    index: int
    incarnation: int


_current: ContextVar[ActorContext | None] = ContextVar("envactors_current_actor", default=None)
# What env code's own threads see; only in a process that is one actor's alone.
_process_wide: ActorContext | None = None
_is_worker_process = False
_is_forked_copy = False


def current_actor() -> ActorContext | None:
    """The actor whose code is running; None outside a worker."""
    return _current.get() or _process_wide


def own_process() -> None:
    """Says that this process is one actor's alone."""
    global _is_worker_process
    _is_worker_process = True
    os.register_at_fork(after_in_child=_note_copy)


def _note_copy() -> None:
    global _is_forked_copy
    _is_forked_copy = True


def is_forked_copy() -> bool:
    """Whether this process is a copy that env code has made of its worker."""
    return _is_forked_copy


def enter(context: ActorContext) -> None:
    """Says whose code runs from here on."""
    global _process_wide
    if _is_worker_process:
        _process_wide = context
    else:
        _current.set(context)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Puts back afterwards who was running before."""
    before = _current.get()
    try:
        yield
    finally:
        _current.set(before)
