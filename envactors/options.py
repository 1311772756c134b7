"""Options of an actor: frozen dataclasses that check their values when they are made."""

from __future__ import annotations

import dataclasses
import math
import numbers
import reprlib
import time
from collections.abc import Callable
from typing import Any, TypeGuard


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long a worker may take, in seconds; the parent enforces it by ending the process.

    A deadline counts from the moment the worker could start the call. None means no deadline.
    ``slow`` is no deadline: it ends nothing, and works on every backend.

    Attributes:
        start: For starting the process and running the factory.
        call: For every method.
        reset: For ``reset`` (also one done by autoreset), in place of ``call``.
        step: For ``step``, in place of ``call``.
        close: For the env's ``close`` and the end of its process.
        policy: For each call of the policy in a rollout, and for loading its parameters.
        slow: After so many seconds in one call, step, or reset, a warning with the worker's stacks is logged, once per
            call; None for never.

    Raises:
        ValueError: A deadline is negative or not a number.
    """

    start: float | None = 60.0
    call: float | None = None
    reset: float | None = None
    step: float | None = None
    close: float | None = 5.0
    policy: float | None = None
    slow: float | None = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_timeout(value, f"Deadlines({name}=...)")

    def of(self, method: str) -> float | None:
        """Return the deadline of a method in seconds; None if it has none."""
        if method == "policy":
            return self.policy
        own = self.step if method == "step" else self.reset if method == "reset" else None
        return self.call if own is None else own


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """When a lost process is replaced.

    A failed start counts as well, except that a factory that raises at the actor's first start is not called again.

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
            if not _is_number(value, huge=name in ("max_restarts", "max_lifetime_restarts")):
                raise ValueError(f"RestartPolicy({name}={reprlib.repr(value)}): expected a number >= 0")


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
            if value is not None and not is_int(value):
                raise ValueError(f"RecyclePolicy({name}={value!r}): expected an int > 0, or None for no limit")


@dataclasses.dataclass(frozen=True)
class SnapshotPolicy:
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
                raise TypeError(f"SnapshotPolicy({name}={value!r}): expected a function")
        if not is_int(self.every):
            raise ValueError(f"SnapshotPolicy(every={self.every!r}): expected an int > 0")


def as_deadlines(value: Deadlines | float) -> Deadlines:
    """Return what an argument ``deadlines`` stands for: a number of seconds is ``Deadlines(call=seconds)``.

    Raises:
        ValueError: It is neither `Deadlines` nor a number above 0.
    """
    if isinstance(value, Deadlines):
        return value
    if not value or not _is_number(value):
        raise ValueError(
            f"deadlines is {reprlib.repr(value)}: expected Deadlines, or a number of seconds > 0, where deadlines=10.0 "
            "means Deadlines(call=10.0)"
        )
    return Deadlines(call=value)


def is_int(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is an int, and no bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_timeout(value: float | None, what: str) -> None:
    """Check that a value is a time-out: seconds, or None.

    Raises:
        ValueError: It is negative, not a number, or an int that is too large for a float.
    """
    if value is not None and not _is_number(value):
        raise ValueError(f"{what} is {reprlib.repr(value)}: expected seconds >= 0, or None for no limit")


def check_patience(value: float | None, what: str) -> None:
    """Check how long to wait, in seconds, where a negative number does not wait at all; None waits as long as it takes.

    Raises:
        ValueError: It is not a number, or an int that is too large for a float.
    """
    if value is not None and not _is_number(value, -math.inf):
        raise ValueError(f"{what} is {reprlib.repr(value)}: expected a number of seconds, or None for no limit")


def deadline_after(timeout: float | None, what: str) -> float | None:
    """Check a time-out and return when it ends (`time.monotonic`); None if there is none.

    Raises:
        ValueError: As for `check_timeout`.
    """
    check_timeout(timeout, what)
    return None if timeout is None else time.monotonic() + timeout


def _is_number(value: Any, least: float = 0.0, *, huge: bool = False) -> bool:
    """Return whether a value is a real number of at least ``least``; ``huge``: also an int that no float can hold."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) >= least
    except OverflowError:
        return huge and bool(value > 0)
