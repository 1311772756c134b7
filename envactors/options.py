"""Options of an actor, as frozen dataclasses that check their values, and the checks that other modules share.

What the options do is implemented elsewhere: actors enforce deadlines and restarts, vectors take snapshots.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import os
import reprlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

# The environment variables of actors: the same for all, or a function of an actor's index.
EnvVars = Mapping[str, str] | Callable[[int], Mapping[str, str] | None] | None


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """How long a worker may take, in seconds. The parent kills a worker that misses a deadline.

    The time starts when the worker is free to begin the call. None means no deadline. ``slow`` is a warning threshold:
    it changes nothing that env code sees, and works on every backend.

    Attributes:
        start: For starting the process and running the factory, and for making the policy of a rollout.
        call: For every method.
        reset: For ``reset``, including resets by autoreset; overrides ``call``.
        step: For ``step``; overrides ``call``.
        close: For the env's ``close`` and the exit of its process.
        policy: For each call of the policy in a rollout, and for loading its parameters.
        slow: How long a call, step, or reset may run before a warning is logged, once per call; None for never. It has
            the worker's stacks, unless the worker sleeps in a system call, which reading them might interrupt.

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
            object.__setattr__(self, name, as_timeout(value, f"Deadlines({name}=...)"))

    def of(self, method: str) -> float | None:
        """Return the deadline of a method of an env, in seconds; None if it has none."""
        own = self.step if method == "step" else self.reset if method == "reset" else None
        return self.call if own is None else own


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """How often a process that crashed, or was killed at a deadline, is restarted.

    A failed start counts as well. The exception is a factory that raises when the actor starts for the first time: it
    is not called again.

    Attributes:
        max_restarts: How many restarts are allowed within ``window``: 0 means that the actor ends with its process,
            and ``math.inf`` allows any number. Without a backoff, as in-process, at most ten starts in a row, or resets
            for one request, may fail.
        window: The length of the window, in seconds.
        backoff: The delay before the first restart in a window, in seconds; each further restart doubles it.
        backoff_max: The longest delay, in seconds.
        max_lifetime_restarts: How many restarts are allowed in the lifetime of the actor.

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
    """When to replace the process of an env or of a function that leaks.

    A vector checks the limits when it records the end of an episode, so replacing the process interrupts none. If
    the step that ends an episode also resets the env (``autoreset="same_step"``), the process is replaced at the end of
    the next episode that ends in a `VectorEnv.step`: rollouts replace none then. An executor checks them after each
    call.

    Attributes:
        max_steps: How many steps one process of a vector may run; None for no limit.
        max_rss: Another name of ``max_memory``.
        max_calls: How many calls one process of an executor may run; None for no limit.
        max_memory: How much resident memory a process may use, in bytes; None for no limit.

    Raises:
        ValueError: A value is not a positive int.
    """

    max_steps: int | None = None
    max_rss: int | None = None
    max_calls: int | None = None
    max_memory: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not is_int(value):
                raise ValueError(f"RecyclePolicy({name}={value!r}): expected an int > 0, or None for no limit")
        memory = self.max_rss if self.max_memory is None else self.max_memory
        object.__setattr__(self, "max_memory", memory)
        object.__setattr__(self, "max_rss", memory)

    def limit_reached(self, *, steps: int = 0, calls: int = 0, memory: int = 0) -> str:
        """Return which limit a process has reached, for the log; empty if none."""
        if self.max_memory is not None and memory > self.max_memory:
            return f"RSS {memory / 1e6:.0f} MB > {self.max_memory / 1e6:.0f} MB"
        if self.max_steps is not None and steps >= self.max_steps:
            return f"{steps} steps >= {self.max_steps}"
        if self.max_calls is not None and calls >= self.max_calls:
            return f"{calls} calls >= {self.max_calls}"
        return ""


@dataclasses.dataclass(frozen=True)
class SnapshotPolicy:
    """How to capture and restore the state of an env. Both functions run in the worker.

    `envactors.state.gymnasium_snapshot` returns a policy for Gymnasium envs.

    Attributes:
        get: Called with the env; returns its whole state, including that of wrappers and random generators. The state
            must be picklable.
        set: Called with an env from the same factory and such a state; restores it. That env may be new, and may not
            have been reset.
        every: The number of steps of an env between two automatic snapshots.

    Raises:
        TypeError: ``get`` or ``set`` is not callable.
        ValueError: ``every`` is not a positive int.
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
    """Convert an argument ``deadlines``: a number of seconds means ``Deadlines(call=seconds)``.

    Raises:
        ValueError: The value is neither `Deadlines` nor a positive number.
    """
    if isinstance(value, Deadlines):
        return value
    if not value or not _is_number(value):
        expected = "Deadlines, or a number of seconds > 0, where deadlines=10.0 means Deadlines(call=10.0)"
        raise ValueError(f"deadlines is {reprlib.repr(value)}: expected {expected}")
    return Deadlines(call=value)


def as_env_vars(env_vars: EnvVars, index: int) -> dict[str, str]:
    """Return the environment variables of the actor with this index.

    Raises:
        TypeError: ``env_vars`` is not a mapping of strings, nor a function that returns one.
        ValueError: It has names or values that no environment can have.
    """
    given = env_vars(index) if callable(env_vars) else env_vars
    if given is not None and not isinstance(given, Mapping):
        expected = "a mapping of names to values, all strings, or a function of the actor's index that returns one"
        raise TypeError(
            f"env_vars is {given!r}: expected {expected}; vectors also take one mapping per actor in a list"
        )
    checked = dict(given or {})
    for name, value in checked.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env_vars has {name!r}: {value!r}: expected strings")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env_vars has {name!r}: expected a name without '=', and no NUL in the name or the value")
        try:
            os.fsencode(name + value)
        except UnicodeEncodeError as error:
            raise ValueError(f"env_vars has {name!r}: expected text that the system can encode: {error}") from error
    return checked


def check_kind(name: str, value: object, *kinds: type) -> None:
    """Check the class of an option.

    Raises:
        TypeError: The value is of none of these classes.
    """
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__.removesuffix("Type") for kind in kinds)  # for None it is NoneType
        raise TypeError(f"{name} is {reprlib.repr(value)}: expected {expected}")


def is_int(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is an int, of Python or NumPy, of at least ``least``; a bool does not count as an int."""
    try:
        is_bool = isinstance(value, (bool, np.bool_))  # NumPy 1 converts its own bools to ints
        return not is_bool and operator.index(value) >= least  # type: ignore[arg-type] # raises
    except TypeError:
        return False


def as_timeout(value: float | None, what: str, *, may_be_past: bool = False) -> float | None:
    """Check a timeout, and return it as a number of Python: a narrow one of NumPy would round the times it is added to.

    Args:
        value: A number of seconds; None for no limit.
        what: The argument, for the error.
        may_be_past: Whether it may be negative, which means not to wait at all, as for
            `concurrent.futures.Future.result`.

    Raises:
        ValueError: The value is too small, not a number, or an int that is too large for a float.
    """
    if value is None:
        return None
    if not _is_number(value, -math.inf if may_be_past else 0.0):
        expected = "a number of seconds" if may_be_past else "seconds >= 0"
        raise ValueError(f"{what} is {reprlib.repr(value)}: expected {expected}, or None for no limit")
    return value if isinstance(value, (int, float)) else float(value)


def as_seconds(value: float | None, what: str) -> float:
    """Check a timeout that needs a limit, and return it as a number of Python.

    Raises:
        ValueError: The value is negative, or not a number.
    """
    if not _is_number(value):
        raise ValueError(f"{what} is {reprlib.repr(value)}: expected seconds >= 0")
    return float(value)  # type: ignore[arg-type] # it is a number


def deadline_after(timeout: float | None, what: str) -> float | None:
    """Check a timeout and return when it expires (`time.monotonic`); None for no limit.

    Raises:
        ValueError: As for `as_timeout`.
    """
    seconds = as_timeout(timeout, what)
    return None if seconds is None else time.monotonic() + seconds


def _is_number(value: Any, least: float = 0.0, *, huge: bool = False) -> bool:
    """Return whether a value is a real number of at least ``least``; ``huge`` accepts ints too large for a float."""
    try:
        return isinstance(value, (float, numbers.Real)) and not isinstance(value, bool) and float(value) >= least
    except OverflowError:
        return huge and bool(value > 0)
