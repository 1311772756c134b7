"""How an executor pickles functions.

Importable functions are pickled by name, in the message of each call. Other functions are pickled by value, which takes
a hundred times as long. A function whose pickle can only change if one of its globals is assigned is pickled once, and
each worker loads it once.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import cloudpickle

from envactors.mailbox.pickling import CACHED_FUNCTION, IMMUTABLE, ValuePickler, dumps, has_importable_name, is_global
from envactors.pools.namespaces import Key, global_names, globals_for_load, has_same_items, write_class, write_sent

# How many functions stay pickled.
_MOST_FUNCTIONS = 256
_MISSING: Final = object()
# The types of values that are pickled by name, and never change.
_NAMED: Final = (types.FunctionType, types.BuiltinFunctionType, CACHED_FUNCTION, type)


class _Globals(dict[str, Any]):
    """Globals of functions in a pickle: a function of `envactors.pools.namespaces` loads them."""

    def __init__(self, load: Callable[..., dict[str, Any]], key: Key, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._load, self._key = load, key

    def __reduce__(self) -> tuple[Any, ...]:
        return self._load, (self._key, dict(self))


class FunctionPickler(ValuePickler):
    """Pickles functions of one module so that they share their globals; see `envactors.pools.namespaces`."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        # A class that is pickled by value has six parts: the last one sets its attributes.
        if isinstance(obj, type) and reduced is not NotImplemented and len(reduced) == 6 and is_global(obj):
            name = f"{obj.__module__}.{obj.__qualname__}"
            return *reduced[:2], (reduced[2][0], name), None, None, write_class
        return reduced

    def _dynamic_function_reduce(self, func: types.FunctionType) -> tuple[Any, ...]:
        values = func.__globals__
        key = _module_of(values), id(values)
        self.globals_ref.setdefault(id(values), _Globals(globals_for_load, key, {}))  # cloudpickle adds its name
        reduced: tuple[Any, ...] = super()._dynamic_function_reduce(func)
        parts = reduced[2][1]
        parts["__globals__"] = _Globals(write_sent, key, parts["__globals__"])
        return reduced


def _module_of(values: dict[str, Any]) -> str:
    """Return the name of the module whose globals these are; an empty one if it is pickled by value."""
    name: str = values.get("__name__", "")
    is_by_value = name == "__main__" or name in cloudpickle.list_registry_pickle_by_value()
    return "" if is_by_value or getattr(sys.modules.get(name), "__dict__", None) is not values else name


class Functions:
    """The functions of an executor, as its messages have them. Usable from any thread."""

    def __init__(self) -> None:
        self._pickles: OrderedDict[Callable[..., Any], _Pickle] = OrderedDict()

    def encode(self, function: Callable[..., Any]) -> Callable[..., Any] | bytes:
        """Return a function as a message has it: itself, or its pickle, which a worker loads once.

        Raises:
            Exception: Whatever its reduction raises.
        """
        if type(function) is not types.FunctionType or function.__closure__ or has_importable_name(function):
            return function
        known = self._pickles.get(function)
        if known is not None and known.is_current():
            return known.pickled
        pickle = _Pickle(function)
        if not pickle.is_current():
            return function
        self._pickles[function] = pickle
        while len(self._pickles) > _MOST_FUNCTIONS:
            self._pickles.popitem(last=False)
        return pickle.pickled


class _Pickle:
    """The pickle of a function, with everything that it depends on.

    Args:
        function: The function.

    Attributes:
        pickled: The pickle, compressed; empty if it depends on something that may change without notice.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._functions: list[tuple[types.FunctionType, list[Any]]] = []
        is_constant = self._add(function)
        # Compressed, since `dumps` looks for ``__main__`` in the bytes of a message: it would pickle it by value.
        self.pickled: bytes = zlib.compress(dumps(function, FunctionPickler)) if is_constant else b""

    def is_current(self) -> bool:
        """Return whether a new pickle would be the same."""
        for values, name, value in self._globals:
            if values.get(name, _MISSING) is not value:
                return False
        for function, parts in self._functions:
            if not has_same_items(_parts(function), parts):
                return False
        return bool(self.pickled)

    def _add(self, function: types.FunctionType) -> bool:
        """Add what a function depends on; return False if that may change without notice."""
        if any(function is known for known, _ in self._functions):
            return True
        self._functions.append((function, _parts(function)))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if function.__closure__ or vars(function) or not all(map(self._is_constant, defaults)):
            return False
        names = set(global_names(function.__code__))
        found = [(name, function.__globals__.get(name, _MISSING)) for name in names]
        self._globals += [(function.__globals__, name, value) for name, value in found]
        return all(self._is_constant(value) for _, value in found)

    def _is_constant(self, value: Any) -> bool:
        if isinstance(value, types.ModuleType):
            name = value.__name__
            return sys.modules.get(name) is value and name not in cloudpickle.list_registry_pickle_by_value()
        if isinstance(value, _NAMED) and has_importable_name(value):
            return True
        if value is _MISSING or (type(value) in IMMUTABLE and not isinstance(value, type)):
            return True
        inner = value.__wrapped__ if isinstance(value, CACHED_FUNCTION) else value
        return isinstance(inner, types.FunctionType) and self._add(inner)


def _parts(function: types.FunctionType) -> list[Any]:
    """Return the parts of a function that can be replaced, and whether it has attributes."""
    return [function.__code__, bool(vars(function)), function.__defaults__, *(function.__kwdefaults__ or {}).values()]
