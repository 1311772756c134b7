"""How a worker comes to be."""

from __future__ import annotations

from envactors.backends.base import Backend


def resolve(backend: str | Backend) -> Backend:
    """Gives the backend that a name stands for.

    Raises:
        ValueError: No such name.
    """
    if not isinstance(backend, str):
        return backend
    if backend == "process":
        from envactors.backends.process import ProcessBackend

        return ProcessBackend()
    raise ValueError(f"backend {backend!r}: expected 'process', or a backend")
