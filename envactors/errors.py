"""Every error of the library.

    EnvActorsError(Exception)
    ├── ActorError                    .actor (its name) .index .pid .incarnation .method .call_id .elapsed .bundle
    │   ├── ActorStartError           the factory raised, or the worker did not start in time
    │   ├── ActorDiedError            .exitcode .signal .stderr_tail .aborted
    │   │   └── NodeLostError         .node .reason
    │   ├── ActorTimeoutError         .timeout .stacks .stderr_tail
    │   ├── ActorClosedError
    │   ├── RestartsExhaustedError    .causes
    │   └── SerializationError        arguments or results that cannot be pickled or unpickled
    └── VectorEnvError
        ├── VectorInputError          also a ValueError: raised before anything is sent
        │   └── SpaceMismatchError
        ├── VectorStepError           .failures .batch
        ├── VectorTimeoutError        .env_ids .timeout .future
        ├── AlreadyPendingError
        └── NothingPendingError

Attributes are passed as keyword arguments and stored in ``__dict__``, so that every error pickles with the default
reduction. The functions below copy exceptions and carry them from workers to the parent; deciding which error to raise
is the caller's job.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import copyreg
import shlex
import signal as signals
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 11):
    _AnyTimeoutError = TimeoutError
else:

    class _AnyTimeoutError(concurrent.futures.TimeoutError, TimeoutError):
        """Both timeout errors of Python 3.10, which Python 3.11 merged into one class."""


class EnvActorsError(Exception):
    """The base class of every error that envactors itself raises.

    The constructor takes each attribute that a subclass annotates as a keyword argument. Each error gets its own copy
    of the defaults.
    """

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, EnvActorsError)]
        known = {name: copy.copy(getattr(self, name, None)) for kind in kinds for name in kind.__annotations__}
        if unknown := attributes.keys() - known.keys():
            raise TypeError(f"{type(self).__name__} has no attributes {sorted(unknown)}: expected {sorted(known)}")
        self.__dict__.update(known, **attributes)


class RemoteTraceback(Exception):  # noqa: N818 # it only annotates another error
    """The worker's traceback as text; the ``__cause__`` of an exception that an env raised."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class ActorError(EnvActorsError):
    """The base class of the errors of one actor.

    Attributes:
        actor: The actor's name.
        index: The env's index (0 for a lone actor).
        pid: The process id of the worker, None if there was no process.
        incarnation: The incarnation of the worker: 0 for its first process, 1 for the next one.
        method: The method that was running or requested, None if the actor was idle.
        call_id: The id of that call, None if the actor was idle.
        elapsed: How long the call had been running, or the process had been starting, in seconds; None if neither was
            in progress.
        bundle: The path of its crash bundle, for ``envactors replay``; None without one.
        read_inputs: Returns ``inputs``, which are not unpickled before; None without any.
    """

    actor: str | None = None
    index: int | None = None
    pid: int | None = None
    incarnation: int | None = None
    method: str | None = None
    call_id: int | None = None
    elapsed: float | None = None
    bundle: str | None = None
    read_inputs: Callable[[], list[tuple[Any, ...]]] | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.bundle is None or self.bundle in text else f"{text}\n{describe_bundle(self.bundle)}"

    @property
    def inputs(self) -> list[tuple[Any, ...]] | None:
        """The inputs that have crashed two processes in a row; None if that was not the reason.

        They are everything that the env received since its last seeded reset, including the last call, as tuples such
        as ``("reset", seed, options)``, ``("step", action)``, ``("set", name, value)`` and
        ``("call", method, args, kwargs)``.
        """
        return None if self.read_inputs is None else self.read_inputs()


class ActorStartError(ActorError):
    """The worker did not create the env: the factory raised (see ``__cause__``), crashed, or missed the start deadline.

    Attributes:
        exitcode: The exit code if the process exited, else None.
        signal: The number of the signal that ended the process, None if there was none.
        stderr_tail: The last lines of the worker's stderr.
    """

    exitcode: int | None = None
    signal: int | None = None
    stderr_tail: str = ""


class ActorDiedError(ActorError):
    """The worker's process exited or was killed.

    Attributes:
        exitcode: The exit code if the process exited, else None.
        signal: The number of the signal that ended the process, None if there was none.
        stderr_tail: The last lines of the worker's stderr.
        aborted: True if the caller ended it: with ``kill`` or ``abort``, or because ``close`` timed out.
    """

    exitcode: int | None = None
    signal: int | None = None
    stderr_tail: str = ""
    aborted: bool = False


class NodeLostError(ActorDiedError):
    """The caller lost the node that ran the process: its agent exited, its machine failed, or its link went silent.

    Attributes:
        node: The node's name.
        reason: What happened to the node.
    """

    node: str = ""
    reason: str = ""


class ActorTimeoutError(ActorError, _AnyTimeoutError):
    """The worker missed a deadline, so the parent killed its process.

    Attributes:
        timeout: The deadline, in seconds.
        stacks: The stacks of the worker's threads at the deadline; empty if the worker could not report them.
        stderr_tail: The last lines of the worker's stderr.
    """

    timeout: float | None = None
    stacks: str = ""
    stderr_tail: str = ""


class ActorClosedError(ActorError):
    """The actor was closed or killed, or belongs to another process."""


class RestartsExhaustedError(ActorError):
    """More processes failed than the actor's `RestartPolicy` allows; the message names the limit.

    Attributes:
        causes: The error of each process that failed, in order.
    """

    causes: list[ActorError] = []  # noqa: RUF012 # copied for each error


class SerializationError(ActorError):
    """The arguments or the result of a call cannot be pickled or unpickled; only that call fails."""


class VectorEnvError(EnvActorsError):
    """The base class of the errors of vector envs."""


class VectorInputError(VectorEnvError, ValueError):
    """An argument is invalid; nothing was sent and nothing changed."""


class SpaceMismatchError(VectorInputError):
    """A value does not have the shape or dtype of its spec, or the specs of the envs differ."""


class VectorStepError(VectorEnvError):
    """Some envs failed; ``__cause__`` is the first failure.

    Attributes:
        failures: The exception from each env that failed, by env id.
        batch: The results of the other envs, an `envactors.Batch`.
    """

    failures: dict[int, BaseException] = {}  # noqa: RUF012 # copied for each error
    batch: Any = None


class VectorTimeoutError(VectorEnvError, _AnyTimeoutError):
    """The results did not arrive in time. No process was killed, and ``recv`` returns the results later.

    Attributes:
        env_ids: The envs whose results have not arrived.
        timeout: The timeout that expired, in seconds.
        future: For a rollout, the future of its result; else None. It belongs to this process: copies have None.
    """

    env_ids: list[int] = []  # noqa: RUF012 # copied for each error
    timeout: float | None = None
    future: concurrent.futures.Future[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**vars(self), "future": None}


class AlreadyPendingError(VectorEnvError):
    """A call was made to an env whose previous result has not been received yet."""


class NothingPendingError(VectorEnvError):
    """The caller waited for a result, but no call is pending."""


def describe_end(exitcode: int | None, signal: int | None) -> str:
    """Return in words how a process ended: "ended with exit code 3" or "was killed by signal 9 (SIGKILL)"."""
    if signal is None:
        return "ended with an unknown status" if exitcode is None else f"ended with exit code {exitcode}"
    names = {int(known): known.name for known in signals.Signals}
    return f"was killed by signal {signal} ({names.get(signal, 'a real-time signal')})"


def describe_bundle(path: str) -> str:
    """Return what users do with a crash bundle."""
    return f"to run it again: envactors replay {shlex.quote(path)}"


def name_bundle(error: BaseException, path: str) -> None:
    """Have an exception of env code name its crash bundle, as far as its class allows. Do so once."""
    with contextlib.suppress(Exception):
        if not hasattr(error, "bundle") or isinstance(error, ActorError):
            error.bundle = path  # type: ignore[attr-defined] # of an exception of any class
    note = describe_bundle(path)
    if sys.version_info >= (3, 11) and not isinstance(error, ActorError):
        with contextlib.suppress(Exception):
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)


def copy_error(error: ActorError) -> ActorError:
    """Return a copy of an error, so that no two futures share an exception and its traceback."""
    copied = copy.copy(error).with_traceback(None)  # Dask has copies of exceptions keep it
    copied.__cause__ = error.__cause__
    copied.__context__ = None
    return copied


def raised_by_user_code(error: BaseException) -> BaseException:
    """Return the exception from the factory or env that caused an error, or the error itself if there is none."""
    if isinstance(error, RestartsExhaustedError) and error.causes:
        error = error.causes[-1]
    cause = error.__cause__
    return cause if cause is not None and isinstance(cause_of(cause), RemoteTraceback) else error


def reduce_exception(error: BaseException) -> tuple[Any, ...]:
    """Reduce an exception to parts from which `rebuild_exception` builds an equal one without calling ``__init__``.

    An exception class that defines ``__reduce__`` or ``__reduce_ex__`` in Python keeps its own reduction.

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
        args = error.message, list(error.exceptions)  # the constructor of a subclass may take other arguments
    # The state may refer to the exception itself, so pickle has to restore it after the object.
    return rebuild_exception, (kind, args), (state, slots), None, None, _set_state


def rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Build an exception from its parts.

    The builtin base class sets the fields that C code reads. The ``__init__`` of the exception's own class is not
    called, since its parameters are unknown.
    """
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
        except Exception:  # the class rejects assignments, as a frozen dataclass does
            error.__dict__.update(state)
    for name, value in slots.items():
        object.__setattr__(error, name, value)


def cause_of(error: BaseException) -> BaseException | None:
    """Return ``__cause__``, even if the class raises when it is read."""
    cause: BaseException | None = BaseException.__dict__["__cause__"].__get__(error)
    return cause


def set_cause(error: BaseException, cause: BaseException) -> None:
    """Set ``__cause__``, even if the class rejects assignments."""
    BaseException.__dict__["__cause__"].__set__(error, cause)
