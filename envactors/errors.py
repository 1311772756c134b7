"""Every error of the library.

    EnvActorsError(Exception)
    ├── ActorError                    .actor (its name) .index .pid .incarnation .method .call_id .elapsed
    │   ├── ActorStartError           the factory raised, or the start deadline passed
    │   ├── ActorDiedError            .exitcode .signal .stderr_tail .aborted
    │   │   └── NodeLostError         .node .reason
    │   ├── ActorTimeoutError         .timeout .stacks .stderr_tail
    │   ├── ActorClosedError
    │   ├── RestartsExhaustedError    .causes
    │   └── SerializationError        arguments or results that cannot be pickled or unpickled
    └── VectorEnvError
        ├── VectorInputError          also a ValueError: refused before anything was sent
        │   └── SpaceMismatchError
        ├── VectorStepError           .failures .batch
        ├── VectorTimeoutError        .env_ids .timeout .future
        ├── AlreadyPendingError
        └── NothingPendingError

The attributes are keyword arguments too, and stored in ``__dict__``, so that every error pickles with the default
reduction.
"""

from __future__ import annotations

import concurrent.futures
import copy
import copyreg
import signal as signals
import sys
from typing import Any

if sys.version_info >= (3, 11):
    _AnyTimeoutError = TimeoutError
else:

    class _AnyTimeoutError(concurrent.futures.TimeoutError, TimeoutError):
        """Both time-out errors of Python 3.10, which are one class since 3.11."""


class EnvActorsError(Exception):
    """The root of every error raised by envactors itself.

    The attributes that a subclass annotates are keyword arguments; each error gets its own copy of the defaults.
    """

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, EnvActorsError)]
        known = {name: copy.copy(getattr(self, name, None)) for kind in kinds for name in kind.__annotations__}
        if unknown := attributes.keys() - known.keys():
            raise TypeError(f"{type(self).__name__} has no attributes {sorted(unknown)}: expected {sorted(known)}")
        self.__dict__.update(known, **attributes)


class RemoteTraceback(Exception):  # noqa: N818 # it is no error of its own
    """The worker's traceback as text; the ``__cause__`` of an exception that an env raised."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class ActorError(EnvActorsError):
    """Something happened to one actor.

    Attributes:
        actor: The actor's name.
        index: The env's index (0 for a lone actor).
        pid: The process id of the incarnation it happened to, None where there was no process.
        incarnation: The incarnation it happened to.
        method: The call that was running or asked for, None when the actor was idle.
        call_id: That call's id, None when the actor was idle.
        elapsed: How long the call had been running, or the process had been starting, in seconds; None if neither was
            in progress.
        inputs: If the same inputs have ended two processes: the env's inputs since its last seeded reset, the last call
            included, as tuples such as ``("reset", seed, options)``, ``("step", action)``, ``("set", name, value)`` and
            ``("call", method, args, kwargs)``; else None.
    """

    actor: str | None = None
    index: int | None = None
    pid: int | None = None
    incarnation: int | None = None
    method: str | None = None
    call_id: int | None = None
    elapsed: float | None = None
    inputs: list[tuple[Any, ...]] | None = None


class ActorStartError(ActorError):
    """No env was made: the factory raised (see ``__cause__``), died, or took longer than the start deadline.

    Attributes:
        exitcode: The exit code where the process ended by itself.
        signal: The signal's number where one ended the process.
        stderr_tail: The last lines of the worker's stderr.
    """

    exitcode: int | None = None
    signal: int | None = None
    stderr_tail: str = ""


class ActorDiedError(ActorError):
    """The process ended.

    Attributes:
        exitcode: The exit code where the process ended by itself.
        signal: The signal's number where one ended the process.
        stderr_tail: The last lines of the worker's stderr.
        aborted: True when it was ended on purpose (``kill``, ``abort``, the end of ``close``'s patience).
    """

    exitcode: int | None = None
    signal: int | None = None
    stderr_tail: str = ""
    aborted: bool = False


class NodeLostError(ActorDiedError):
    """The node that the process ran on was lost: its agent died, its machine vanished, or the link was silent.

    Attributes:
        node: The node's name.
        reason: How it was lost.
    """

    node: str = ""
    reason: str = ""


class ActorTimeoutError(ActorError, _AnyTimeoutError):
    """A deadline passed, and the process was ended because of it.

    Attributes:
        timeout: The deadline that passed, in seconds.
        stacks: The stacks of the worker's threads when it passed; empty if the worker could not report them.
        stderr_tail: The last lines of the worker's stderr.
    """

    timeout: float | None = None
    stacks: str = ""
    stderr_tail: str = ""


class ActorClosedError(ActorError):
    """The actor was closed or killed, or belongs to another process."""


class RestartsExhaustedError(ActorError):
    """More processes were lost than the actor's `RestartPolicy` allows; the message names the limit.

    Attributes:
        causes: The error of each process that was lost, in order.
    """

    causes: list[ActorError] = []  # noqa: RUF012 # copied for each error


class SerializationError(ActorError):
    """Arguments or a result that cannot be pickled or unpickled; only that call fails."""


class VectorEnvError(EnvActorsError):
    """Something happened to a vector env."""


class VectorInputError(VectorEnvError, ValueError):
    """An argument is invalid; nothing was sent and nothing changed."""


class SpaceMismatchError(VectorInputError):
    """Values that do not have the shape or dtype of their spec, or envs whose specs differ."""


class VectorStepError(VectorEnvError):
    """Some envs failed; raised from the first failure.

    Attributes:
        failures: The exception of each env that failed, by env id.
        batch: The other envs' results, an `envactors.Batch`.
    """

    failures: dict[int, BaseException] = {}  # noqa: RUF012 # copied for each error
    batch: Any = None


class VectorTimeoutError(VectorEnvError, _AnyTimeoutError):
    """The results did not come in time. Nothing was killed and nothing is lost: ``recv`` returns them later.

    Attributes:
        env_ids: The envs whose results have not come.
        timeout: The time-out that has passed, in seconds.
        future: Of a rollout: gets it once it has ended.
    """

    env_ids: list[int] = []  # noqa: RUF012 # copied for each error
    timeout: float | None = None
    future: concurrent.futures.Future[Any] | None = None


class AlreadyPendingError(VectorEnvError):
    """A result was requested from an env that has one pending."""


class NothingPendingError(VectorEnvError):
    """A result was requested while none was pending."""


def describe_status(exitcode: int | None, signal: int | None) -> str:
    """Return in words how a process ended, such as "exit code 3" or "signal 9 (SIGKILL)"."""
    if signal is None:
        return "an unknown status" if exitcode is None else f"exit code {exitcode}"
    names = {int(known): known.name for known in signals.Signals}
    return f"signal {signal} ({names.get(signal, 'a real-time signal')})"


def copy_error(error: ActorError) -> ActorError:
    """Return a copy of an error, so that no two futures share an exception and its traceback."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


def raised_by_user_code(error: BaseException) -> BaseException:
    """Return the exception of a factory or an env that an error was made from, or the error itself if there is none."""
    if isinstance(error, RestartsExhaustedError) and error.causes:
        error = error.causes[-1]
    cause = error.__cause__
    return cause if cause is not None and isinstance(cause.__cause__, RemoteTraceback) else error


def reduce_exception(error: BaseException) -> tuple[Any, ...]:
    """Reduce an exception to parts from which `rebuild_exception` makes an equal one without calling ``__init__``.

    If the exception's class has a reduction of its own (``__reduce__`` or ``__reduce_ex__`` written in Python), that
    one is used.

    Returns:
        A reduction in the form that `pickle` expects.
    """
    kind = type(error)
    for name in ("__reduce__", "__reduce_ex__"):
        if next(base for base in kind.__mro__ if name in vars(base)).__module__ != "builtins":
            reduced = error.__reduce_ex__(5)
            return reduced if isinstance(reduced, tuple) else (kind, error.args)
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple), "builtin exceptions reduce to tuples"
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined] # as pickle itself does
    slots = {name: getattr(error, name) for name in names if hasattr(error, name)}
    state = reduced[2] if len(reduced) > 2 else None
    args = reduced[1]
    if sys.version_info >= (3, 11) and isinstance(error, BaseExceptionGroup):  # noqa: F821 # of Python 3.11
        args = error.message, list(error.exceptions)  # a subclass may have been called with others
    # pickle rebuilds the state after the object, since the state may refer to the object.
    return rebuild_exception, (kind, args), (state, slots), None, None, _set_state


def rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Build an exception from its parts; its builtin base sets the C fields, its class's ``__init__`` is not called."""
    builtin: Any = kind
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)
    return error


def _set_state(error: BaseException, states: tuple[dict[str, Any] | None, dict[str, Any]]) -> None:
    state, slots = states
    if state:
        try:
            error.__setstate__(state)
        except Exception:  # the class refuses assignments, as a frozen dataclass does
            error.__dict__.update(state)
    for name, value in slots.items():
        object.__setattr__(error, name, value)


def set_cause(error: BaseException, cause: BaseException) -> None:
    """Set ``__cause__``, even if the class refuses assignments."""
    BaseException.__dict__["__cause__"].__set__(error, cause)
