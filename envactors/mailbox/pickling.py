"""Pickle or copy the values that pass between caller and worker.

Between processes values are pickled: with protocol 5, with cloudpickle where pickle fails, and exceptions so that their
``__init__`` is not called again. Within one process they are copied, so that neither side changes the other's value.
The messages that carry them are in `envactors.mailbox.messages`.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import gc
import io
import operator
import pickle
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

import cloudpickle
import numpy as np
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID, _class_setstate

from envactors.errors import RemoteTraceback, SerializationError, VectorStepError, reduce_exception, set_cause
from envactors.mailbox import packing
from envactors.mailbox.channel import ChannelCorruptError
from envactors.mailbox.messages import Failure, Fault, Pickled

PROTOCOL = 5

# Values of exactly these types; their subclasses may have mutable state.
IMMUTABLE: Final = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, type, type(...)),
        *(np.dtype(code).type for code in "?bhilqBHILQefd"),
    ]
)

# In bytes. Larger arrays are placed after the pickle rather than in it, so that loading does not copy them. They are
# writable, since `envactors.mailbox.channel` reads each large frame into a new buffer.
_LARGE = 1 << 16

# In bytes. Other threads would wait while a longer pickle is loaded in one piece.
_HUGE = 1 << 24

# The names of the caller's main module: a child process of `multiprocessing` that was not forked has the second one.
MAIN_NAMES: Final = ("__main__", "__mp_main__")

# The byte of a pickle that refers to a class or function. As an int it is found in a tenth of the time.
_REFERENCE: Final = pickle.STACK_GLOBAL[0]

# The type of the wrappers of `functools.lru_cache`, and what that sets on each.
CACHED_FUNCTION: Final = type(functools.cache(lambda: None))
_OF_WRAPPERS: Final = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"}

# What code of users may raise in place of a text or a reduction.
_BROKEN: Final = (Exception, SystemExit)
# An attempt that has taken longer, in seconds, is not repeated.
_QUICK: Final = 0.5


# The classes that came from another process, which has the latest attributes of each.
_loaded_classes: weakref.WeakSet[type] = weakref.WeakSet()

Message = TypeVar("Message")
# Makes a pickler of a file, the protocol, and a callback for buffers: a class like `ValuePickler`.
PicklerClass: TypeAlias = Callable[..., Any]


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no annotations
    """Pickles what cloudpickle does not pickle well: code, classes, and what `functools` makes of functions.

    Code has the tag of the interpreters that can run it; others would run it as other code. It keeps the name of its
    file for tracebacks, in place of ``<dynamic-code>``. A class that another process sends back keeps its attributes.
    Functions wrapped by `functools.lru_cache` are pickled by value where functions are; cloudpickle pickles them by
    name. Until Python 3.12, a `functools.cached_property` has a lock. A function wrapped by `functools.singledispatch`
    has a weak dict.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CACHED_FUNCTION) and not has_importable_name(obj):
            if not any(each is obj.__wrapped__ for each in gc.get_referents(obj)):
                text = f"{obj!r} does not call its __wrapped__: apply functools.wraps first, then functools.lru_cache"
                raise pickle.PicklingError(text)
            parameters = obj.cache_parameters()
            state = {name: value for name, value in vars(obj).items() if name not in _OF_WRAPPERS}
            return _cache_function, (obj.__wrapped__, parameters["maxsize"], parameters["typed"]), state
        if isinstance(obj, functools.cached_property):
            return type(obj), (obj.func,), {"attrname": obj.attrname}  # nobody calls `__set_name__` again
        if isinstance(obj, weakref.WeakKeyDictionary):
            return type(obj), (dict(obj),)
        if isinstance(obj, types.CodeType):
            _, arguments = self.dispatch_table[types.CodeType](obj)
            place = f"{obj.co_name} ({obj.co_filename}:{obj.co_firstlineno})"
            return load_code_by_value, (sys.implementation.cache_tag, place, obj.co_filename, arguments)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and reduced is not NotImplemented and reduced[-1] is _class_setstate:
            return load_class, reduced[:2], *reduced[2:5], update_class
        return reduced


def has_importable_name(obj: Any) -> bool:
    """Return whether a worker finds an object by its name: workers never import the caller's main module."""
    module = sys.modules.get(obj.__module__ or "")
    if module is None or module.__name__ in MAIN_NAMES:
        return False
    by_value = cloudpickle.list_registry_pickle_by_value()
    if any(f"{module.__name__}.".startswith(f"{name}.") for name in by_value):
        return False
    return is_global(obj)


def is_global(obj: Any) -> bool:
    """Return whether the module of a function or class has it under its name."""
    try:
        return bool(operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj)
    except (AttributeError, KeyError):  # it is local to a function
        return False


def _cache_function(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def load_code_by_value(tag: str, place: str, filename: str, arguments: tuple[Any, ...]) -> types.CodeType:
    """Rebuild code that was pickled by value.

    Raises:
        TypeError: Another version of Python has pickled it.
    """
    if tag != sys.implementation.cache_tag:
        raise TypeError(
            f"{place} was pickled by value, as code of {tag}, but {sys.executable} runs code of "
            f"{sys.implementation.cache_tag}: put it into a module that both sides can import"
        )
    return types.CodeType(*arguments).replace(co_filename=filename)


def load_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Return the class that was pickled by value if this process has it, else a new one, still without attributes."""
    found: type | None = _DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    if found is None:
        found = make(*arguments)
        _loaded_classes.add(found)
    return found


def update_class(loaded: type, state: Any) -> None:
    """Set the attributes of a class that was pickled by value, but leave those of this process's own as they are."""
    if loaded in _loaded_classes:
        _class_setstate(loaded, state)


def has_code(pickled: bytes) -> bool:
    """Return whether a pickle contains code, which only interpreters of this version can load."""
    return load_code_by_value.__name__.encode() in pickled


class _PlainUnpickler(pickle.Unpickler):
    """Loads plain values, and those of classes of this library and of NumPy."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ("envactors", "numpy"):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong to it")
        return super().find_class(module, name)


def load_plain(payload: bytes | bytearray | memoryview) -> Any:
    """Load what a worker has pickled without running code of users.

    Raises:
        Exception: It contains objects of users, or cannot be unpickled.
    """
    return _PlainUnpickler(io.BytesIO(payload)).load()


def load_message(kind: Callable[..., Message], payload: bytes | bytearray | memoryview) -> Message:
    """Load the fields of a message from a worker without running code of users.

    Raises:
        ChannelCorruptError: They are something else, since env code has written into the channel.
    """
    try:
        return kind(*load_plain(payload))
    except Exception as error:
        raise ChannelCorruptError(f"a message cannot be read: {safe_repr(error)}") from None


def dumps(value: Any, pickler: PicklerClass = ValuePickler) -> bytes | bytearray:
    """Pickle a value so that the other process can load it.

    Values that refer to the caller's main module, which workers never import, or to one that is registered to be
    pickled by value, are pickled with cloudpickle.

    Args:
        value: The value.
        pickler: Pickles it where pickle fails, or refers to the main module.

    Raises:
        Exception: Whatever the value's own reduction, pickle or cloudpickle raises.
    """
    large: list[memoryview] = []

    def pickle_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not in one piece
            return True
        if raw.nbytes < _LARGE or raw.readonly:
            return True
        large.append(raw)
        return False

    try:
        data = pickle.dumps(value, PROTOCOL, buffer_callback=pickle_in_band)
        is_complete = _REFERENCE not in data or not any(name in data for name in _by_value())
    except Exception as error:
        was_raised_by_python = error.__traceback__.tb_next is not None  # type: ignore[union-attr] # it was raised here
        if was_raised_by_python and _succeeds(lambda: pickle.dumps(value, PROTOCOL, buffer_callback=pickle_in_band)):
            raise  # a signal handler has raised it
        is_complete = False
    if not is_complete:
        large.clear()
        data = _dump(pickler, value, pickle_in_band)
    return packing.pack(enumerate([data, *large])) if large else data


def _by_value() -> list[bytes]:
    """Return the modules to which no pickle may refer: the end of each of `MAIN_NAMES`, and the registered ones."""
    return [b"_main__", *map(str.encode, cloudpickle.list_registry_pickle_by_value())]


def dumps_by_value(value: Any) -> bytes:
    """Pickle with cloudpickle, which pickles lambdas, local classes, and everything of ``__main__`` by value."""
    return _dump(ValuePickler, value)


def pickle_argument(what: str, value: Any, pickle_it: Callable[[Any], Any] = dumps_by_value, **where: Any) -> Any:
    """Pickle an argument of the user.

    Args:
        what: The argument, for the error.
        value: Its value.
        pickle_it: Pickles it.
        **where: Attributes of the error.

    Raises:
        SerializationError: It cannot be pickled.
    """
    pickled, error = try_to_pickle(lambda: pickle_it(value))
    if error is not None:
        advice = "; make the object inside instead of capturing it" if callable(value) else ""
        raise SerializationError(f"{what} cannot be pickled: {safe_repr(error)}{advice}", **where) from error
    return pickled


def _dump(pickler: PicklerClass, value: Any, place_buffer: Callable[[Any], bool] | None = None) -> bytes:
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(main)  # cloudpickle knows only the other name
    buffer = io.BytesIO()
    pickler(buffer, PROTOCOL, place_buffer).dump(value)
    return buffer.getvalue()


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Load what `dumps` has pickled; large arrays are writable views of ``data``, or of a copy if that is constant."""
    if data[0] != packing.MARK:
        return pickle.loads(data) if len(data) < _HUGE else pickle.Unpickler(_BytesReader(data)).load()
    pickled, *large = (part for _, part in packing.unpack(bytearray(data) if memoryview(data).readonly else data))
    return pickle.loads(pickled, buffers=large)


class _BytesReader(io.RawIOBase):
    """A file of bytes. It copies many without the GIL, so that other threads run while large `bytes` are loaded."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        super().__init__()
        self._left = memoryview(data)

    def readinto(self, target: Any) -> int:
        """Fill a buffer with the next bytes; return how many there were."""
        filled = min(len(self._left), len(target))
        np.copyto(np.asarray(memoryview(target)[:filled]), np.asarray(self._left[:filled]))
        self._left = self._left[filled:]
        return filled


def try_to_read(
    read: Callable[[], object],
    is_current: Callable[[], bool] = lambda: True,
    kinds: tuple[type[BaseException], ...] = _BROKEN,
) -> tuple[Any, BaseException | None]:
    """Read bytes from a worker, which may run code of users.

    An exception of a signal handler, or one that another thread raises here, is not about the bytes. Since these can be
    read at the next attempt, the exception is raised. After a long attempt there is no other one, which might hang.

    Args:
        read: Reads the bytes.
        is_current: Returns whether they are still the same.
        kinds: The kinds of exceptions that may be about the bytes; others are raised.

    Returns:
        The value and None, or None and the exception that says why it cannot be read.
    """
    began = time.monotonic()
    try:
        return read(), None
    except kinds as error:
        if time.monotonic() - began < _QUICK and is_current() and _succeeds(read, kinds):
            raise
        return None, error


def try_to_pickle(pickle_it: Callable[[], object]) -> tuple[Any, BaseException | None]:
    """Run the reductions of users' values, like `try_to_read`; their exceptions may be of any kind."""
    return try_to_read(pickle_it, kinds=(Exception,))


def _succeeds(attempt: Callable[[], object], kinds: tuple[type[BaseException], ...] = (Exception,)) -> bool:
    try:
        attempt()
    except kinds:
        return False
    return True


class _ExceptionPickler(ValuePickler):
    """Pickles each exception in a value as its class, arguments, and state."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return reduce_exception(obj)
        return super().reducer_override(obj)


# A plain pickle may fail on the exceptions from envs that it contains.
copyreg.pickle(VectorStepError, lambda error: (loads, (_dump(_ExceptionPickler, error),)))


def pack_failure(error: BaseException, fault: Fault) -> Failure:
    """Return an exception as a `Failure`, as text only if it does not pickle."""
    text = "".join(safe_traceback(error))
    try:
        pickled = _dump(_ExceptionPickler, error)
    except _BROKEN:
        pickled = None
    return Failure(fault, pickled, safe_repr(error), text)


def unpack_failure(failure: Failure) -> BaseException | None:
    """Rebuild the exception of a failure, with a `RemoteTraceback` as its cause; None if it cannot be rebuilt."""

    def rebuild() -> BaseException:
        error: BaseException = pickle.loads(failure.pickled or b"")
        set_cause(error, RemoteTraceback(failure.traceback))
        return error

    error: BaseException | None = try_to_read(rebuild, kinds=(BaseException,))[0]
    return error


def safe_repr(value: object) -> str:
    """Return the repr of a value of a user's class, or a substitute if that raises."""
    try:
        return str.__str__(repr(value))  # without a subclass, which the other process may not load
    except _BROKEN:
        return f"<{type(value).__name__} whose repr raises>"


def safe_traceback(error: BaseException) -> list[str]:
    """Return the lines of a traceback, or only its frames and the exception if the class of that is broken."""
    frames = BaseException.__dict__["__traceback__"].__get__(error)
    try:
        return traceback.format_exception(type(error), error, frames)
    except _BROKEN:
        return [*traceback.format_tb(frames), safe_repr(error)]


def safe_str(error: BaseException) -> str:
    """Return the type and the text of an exception of a user's class, or substitutes if that raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except _BROKEN:
        return f"{type(error).__name__} whose str raises"


class Sealed:
    """Wraps a value inside a message that arrives as `Pickled`, so that reading the message runs no code of users."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return Pickled, (bytes(dumps(self._value)),)


def content_of(value: Any) -> Any:
    """Return a value of a message after unpickling it if it is `Pickled`."""
    return loads(value.content) if isinstance(value, Pickled) else value


def copy_value(value: Any) -> Any:
    """Return a copy of a value that shares nothing mutable with it.

    Raises:
        Exception: Whatever `dumps` raises for a value that can be neither copied nor pickled.
    """
    try:
        return _copy(value)
    # The value contains itself, or something that `copy.deepcopy` refuses, such as a module or a view of a dict.
    except (RuntimeError, TypeError):
        return loads(dumps(value))


def _copy(value: Any) -> Any:
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy("K")
    if kind is dict:
        return {key: content if type(content) in IMMUTABLE else _copy(content) for key, content in value.items()}
    if kind is list:
        return [_copy(content) for content in value]
    if kind is tuple:
        return tuple([_copy(content) for content in value])
    return copy.deepcopy(value)
