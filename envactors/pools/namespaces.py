"""The globals of functions that are pickled by value, in a worker: one namespace per module.

Functions of ``__main__`` travel by value, and cloudpickle gives each of them its own globals. Functions of an executor
share those of their module, as in a process that has imported it. Whatever code in the worker assigns to a global name,
such as an initializer, stays: the values that come with later functions do not replace it.
"""

from __future__ import annotations

import dis
import threading
import types
from collections.abc import Iterator
from typing import Any, Final

_MISSING: Final = object()
_GLOBAL_NAMES: Final = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


class Namespace:
    """The globals of one module.

    Args:
        values: Those that every function of the module has, such as ``__name__``.

    Attributes:
        values: The globals.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values: dict[str, Any] = values
        # The values after the last load, and all values that code in this worker has assigned.
        self._known = dict(values)
        self._assigned: dict[str, Any] = {}
        self._is_loading = False

    def begin_load(self) -> None:
        """Note which values were assigned, since a load is about to write others."""
        self.finish_load()
        for name, value in self.values.items():
            if self._known.get(name, _MISSING) is not value:
                self._assigned[name] = value
        self._is_loading = True

    def finish_load(self) -> bool:
        """Put back the values that were assigned, if a load has written others; return whether one has."""
        was_loading, self._is_loading = self._is_loading, False
        if was_loading:
            self.values.update(self._assigned)
            self._known = {**self.values}
        return was_loading


class _Namespaces(threading.local):
    """The namespaces of the calling thread by the names of their modules: in-process workers share nothing."""

    def __init__(self) -> None:
        self.all: dict[str, Namespace] = {}


_namespaces = _Namespaces()


def globals_for_load(module: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of a module, to which a pickle that is being loaded will write. Pickles refer to this."""
    namespace = _namespaces.all.setdefault(module, Namespace(values))
    namespace.begin_load()
    return namespace.values


def finish_loads() -> bool:
    """Put back all values that code in this worker has assigned. Call this after each pickle that was loaded.

    Returns:
        Whether the pickle has written globals.
    """
    was_loading = [namespace.finish_load() for namespace in _namespaces.all.values()]
    return any(was_loading)


def write_globals(function: types.FunctionType, values: dict[str, Any]) -> None:
    """Write the values that came with a function again: another function may have come with others."""
    for namespace in _namespaces.all.values():
        if namespace.values is function.__globals__:
            namespace.begin_load()
            namespace.values.update(values)
            namespace.finish_load()


def global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that code uses, that of nested functions and classes included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_NAMES:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function uses, and those that functions among these use."""
    found: dict[str, Any] = {}
    functions = [function]
    while functions:
        one = functions.pop()
        for name in set(global_names(one.__code__)) - found.keys():
            value = one.__globals__.get(name, _MISSING)
            if value is not _MISSING:
                found[name] = value
                inner = getattr(value, "__wrapped__", value)
                if isinstance(inner, types.FunctionType) and inner.__globals__ is function.__globals__:
                    functions.append(inner)
    return found
