"""Backends: how workers start and end."""

from __future__ import annotations

from envactors.backends.base import Backend

_NAMES = "process", "thread", "inline"


def resolve(backend: str | Backend) -> Backend:
    """Return the backend of a name, or the argument itself if it is a backend.

    Raises:
        ValueError: There is no backend of that name.
    """
    if not isinstance(backend, str):
        return backend
    if backend == "process":
        from envactors.backends.process import ProcessBackend

        return ProcessBackend()
    if backend == "thread":
        from envactors.backends.thread import ThreadBackend

        return ThreadBackend()
    if backend == "inline":
        from envactors.backends.inline import InlineBackend

        return InlineBackend()
    raise ValueError(f"backend {backend!r}: expected one of {_NAMES}, or a backend")
