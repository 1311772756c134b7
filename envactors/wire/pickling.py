"""Pickling: protocol 5, cloudpickle where that is not enough, exceptions without ``__init__``."""

from __future__ import annotations

import copyreg
import io
import pickle
import traceback
from typing import Any

import cloudpickle

from envactors.errors import RemoteTraceback, VectorStepError, reduce_exception, set_cause
from envactors.wire import bundle
from envactors.wire.messages import Failure, Fault

PROTOCOL = 5

# Arrays from this size on stand behind the pickle rather than in it, so that loading does not copy them. What is
# larger than this is read into memory of its own by `envactors.wire.channel`, so that they can be written to.
_LARGE = 1 << 16


def dumps(value: Any) -> bytes | bytearray:
    """Pickles a value so that the other half can load it.

    What refers to ``__main__`` goes through cloudpickle, which sends it by value: the worker never imports the
    caller's main module, so that a reference into it would only fail there.

    Raises:
        Exception: Whatever the value's own reduction, pickle or cloudpickle raises.
    """
    large: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not in one piece
            return True
        if raw.nbytes < _LARGE or raw.readonly:
            return True
        large.append(raw)
        return False

    try:
        data = pickle.dumps(value, PROTOCOL, buffer_callback=keep)
    except Exception:
        data = b"__main__"
    if b"__main__" in data:
        large.clear()
        data = cloudpickle.dumps(value, PROTOCOL, buffer_callback=keep)
    return bundle.pack(enumerate([data, *large])) if large else data


def dumps_by_value(value: Any) -> bytes:
    """Pickles with cloudpickle: lambdas, local classes and what lives in ``__main__`` travel by value."""
    data: bytes = cloudpickle.dumps(value, PROTOCOL)
    return data


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Loads what `dumps` made; large arrays stay in its memory."""
    if data[0] != bundle.MARK:
        return pickle.loads(data)
    pickled, *large = (part for _, part in bundle.unpack(data))
    return pickle.loads(pickled, buffers=large)


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
