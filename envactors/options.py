"""Options of an actor: frozen dataclasses that check their values when they are made."""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long a worker may take, in seconds; the parent enforces it by ending the process.

    A deadline counts from the moment the worker could start the call. None means no deadline.

    Attributes:
        start: For starting the process and running the factory.
        call: For every method.
        reset: For ``reset`` (also one done by autoreset), in place of ``call``.
        step: For ``step``, in place of ``call``.
        close: For the env's ``close`` and the end of its process.

    Raises:
        ValueError: A deadline is negative or not a number.
    """

    start: float | None = 60.0
    call: float | None = None
    reset: float | None = None
    step: float | None = None
    close: float | None = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_timeout(value, f"Deadlines({name}=...)")

    def of(self, method: str) -> float | None:
        """Return the deadline of a method in seconds; None if it has none."""
        own = self.step if method == "step" else self.reset if method == "reset" else None
        return self.call if own is None else own


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """When a lost process is replaced.

    Attributes:
        max_restarts: How many restarts are allowed in any ``window``. With 0 the actor ends with its process, with
            ``math.inf`` there is no limit.
        window: The length of the window, in seconds.
        backoff: The wait before the first restart in a window, in seconds; each further restart doubles it.
        backoff_max: The longest wait, in seconds.
        max_lifetime_restarts: How many restarts are allowed in the whole life of the actor, whatever the window.

    Raises:
        ValueError: A value is negative or not a number.
    """

    max_restarts: float = 3
    window: float = 600.0
    backoff: float = 0.1
    backoff_max: float = 30.0
    max_lifetime_restarts: float = math.inf

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not _is_number(value):
                raise ValueError(f"RestartPolicy({name}={value!r}): expected a number >= 0")


@dataclasses.dataclass(frozen=True)
class RecyclePolicy:
    """When the process of an env that leaks is replaced, between two episodes.

    The limits are checked when an episode ends. If the step that ends it also resets (``autoreset="same_step"``), the
    process is replaced at the end of the next episode.

    Attributes:
        max_steps: The most steps that one process runs; None for no limit.
        max_rss: The most resident memory that it may have, in bytes; None for no limit.

    Raises:
        ValueError: A value is no int above 0.
    """

    max_steps: int | None = None
    max_rss: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"RecyclePolicy({name}={value!r}): expected an int > 0, or None for no limit")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """How the state of an env is captured and restored. Both functions run in the worker.

    `envactors.state.gymnasium_snapshot` is one for Gymnasium envs.

    Attributes:
        get: Called with the env; returns its whole state, which must pickle: that of wrappers and of random generators
            too.
        set: Called with an env of the same factory and such a state; puts the env into it. That env may be new, and
            may not have been reset.
        every: How many steps of an env lie between two automatic snapshots.

    Raises:
        TypeError: ``get`` or ``set`` cannot be called.
        ValueError: ``every`` is no int above 0.
    """

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]
    every: int = 1000

    def __post_init__(self) -> None:
        for name in ("get", "set"):
            if not callable(value := getattr(self, name)):
                raise TypeError(f"Snapshot({name}={value!r}): expected a function")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Snapshot(every={self.every!r}): expected an int > 0")


def check_timeout(value: float | None, what: str) -> None:
    """Check that a value is a time-out: seconds, or None.

    Raises:
        ValueError: It is negative or not a number.
    """
    if value is not None and not _is_number(value):
        raise ValueError(f"{what} is {value!r}: expected seconds >= 0, or None for no limit")


def deadline_after(timeout: float | None, what: str) -> float | None:
    """Check a time-out and return when it ends (`time.monotonic`); None if there is none.

    Raises:
        ValueError: It is negative or not a number.
    """
    check_timeout(timeout, what)
    return None if timeout is None else time.monotonic() + timeout


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(value >= 0)  # type: ignore[operator]
