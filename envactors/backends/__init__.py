"""Backends: the ways in which workers start and end."""

from __future__ import annotations

from collections.abc import Callable

from envactors.backends.base import Backend
from envactors.backends.inline import InlineBackend
from envactors.backends.process import ProcessBackend
from envactors.backends.thread import ThreadBackend

_BACKENDS: dict[str, Callable[[], Backend]] = {
    "process": ProcessBackend,
    "thread": ThreadBackend,
    "inline": InlineBackend,
}


def resolve(backend: str | Backend) -> Backend:
    """Return the backend of this name, or the argument itself if it is a backend.

    Raises:
        ValueError: No backend has this name, or the argument is something else.
    """
    if isinstance(backend, str) and backend in _BACKENDS:
        return _BACKENDS[backend]()
    if not isinstance(backend, Backend):
        raise ValueError(f"backend {backend!r}: expected one of {tuple(_BACKENDS)}, or a backend")
    return backend
