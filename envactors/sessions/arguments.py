"""Check the arguments of a pool of sessions and of its runs. The pool itself checks no argument but timeouts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from envactors import backends
from envactors.backends.base import Backend
from envactors.options import is_int

FRESH = ("process", "reset")


def check_options(size: int, fresh: str, standbys: int, backend: str | Backend) -> Backend:
    """Return the backend; raise ValueError if an option of a pool is invalid."""
    if not is_int(size):
        raise ValueError(f"SessionPool(size={size!r}): expected an int >= 1, the number of sessions at a time")
    if fresh not in FRESH:
        raise ValueError(f"SessionPool(fresh={fresh!r}): expected one of {', '.join(map(repr, FRESH))}")
    if not is_int(standbys, 0):
        raise ValueError(f"SessionPool(standbys={standbys!r}): expected an int >= 0")
    resolved = backends.resolve(backend)
    if not resolved.traits.can_kill:
        raise ValueError(
            f"SessionPool(backend={backend!r}): expected a backend that can kill a hung env. Use 'process', or a "
            "RemoteBackend"
        )
    return resolved


def check_run(episode: Callable[..., Any], tasks: Iterable[Any], retries: int) -> None:
    """Raise if the arguments of a run are invalid."""
    is_generator = inspect.isgeneratorfunction(episode) or inspect.isasyncgenfunction(episode)
    if not callable(episode) or is_generator:  # a call of a generator function runs nothing
        raise TypeError(
            f"episode is {episode!r}: expected a function or coroutine function of (env, task), without yield"
        )
    if not hasattr(tasks, "__iter__") and not hasattr(tasks, "__getitem__"):
        raise TypeError(f"tasks is {tasks!r}: expected an iterable, such as a list or a generator, but no async one")
    if not is_int(retries, 0):
        raise ValueError(f"retries is {retries!r}: expected an int >= 0")
