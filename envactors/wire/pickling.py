"""Pickling: protocol 5, cloudpickle where that is not enough, exceptions without ``__init__``."""

from __future__ import annotations

import copyreg
import io
import pickle
import traceback
from typing import Any

import cloudpickle

from envactors.errors import RemoteTraceback, VectorStepError, reduce_exception, set_cause
from envactors.wire.messages import Failure, Fault

PROTOCOL = 5


def dumps(value: Any) -> bytes:
    """Pickles a value so that the other half can load it.

    What refers to ``__main__`` goes through cloudpickle, which sends it by value: the worker never imports the
    caller's main module, so that a reference into it would only fail there.

    Raises:
        Exception: Whatever the value's own reduction, pickle or cloudpickle raises.
    """
    try:
        data = pickle.dumps(value, PROTOCOL)
    except Exception:
        return dumps_by_value(value)
    return dumps_by_value(value) if b"__main__" in data else data


def dumps_by_value(value: Any) -> bytes:
    """Pickles with cloudpickle: lambdas, local classes and what lives in ``__main__`` travel by value."""
    data: bytes = cloudpickle.dumps(value, PROTOCOL)
    return data


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Loads what `dumps` made."""
    return pickle.loads(data)


class _ExceptionPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no annotations
    """Pickles every exception in a value as its class, arguments and state."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return reduce_exception(obj)
        return super().reducer_override(obj)


def dump_exception(value: Any) -> bytes:
    """Pickles a value in which every exception goes as class, arguments and state."""
    buffer = io.BytesIO()
    _ExceptionPickler(buffer, PROTOCOL).dump(value)
    return buffer.getvalue()


def _reduce_step_error(error: VectorStepError) -> tuple[Any, ...]:
    # Its failures are the envs' own exceptions, which need not survive pickle's own way.
    state = {**error.__dict__, "failures": None}
    return _rebuild_step_error, (error.args, dump_exception(error.failures), state)


def _rebuild_step_error(args: tuple[Any, ...], failures: bytes, state: dict[str, Any]) -> VectorStepError:
    error = VectorStepError(*args)
    error.__dict__.update(state)
    error.failures = pickle.loads(failures)
    return error


copyreg.pickle(VectorStepError, _reduce_step_error)


def pack_failure(error: BaseException, fault: Fault) -> Failure:
    """Makes of an exception what can travel; a part that cannot is left out, the text never is."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled = dump_exception(error)
    except Exception:
        pickled = None
    return Failure(fault, pickled, _safe_repr(error), text)


def unpack_failure(failure: Failure) -> BaseException | None:
    """Rebuilds the exception of a failure, its `RemoteTraceback` as the cause; None where it cannot be rebuilt."""
    if failure.pickled is None:
        return None
    try:
        error = pickle.loads(failure.pickled)
    except BaseException:  # unpickling runs any code
        return None
    if not isinstance(error, BaseException):
        return None
    set_cause(error, RemoteTraceback(failure.traceback))
    return error


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__} whose repr raises>"
