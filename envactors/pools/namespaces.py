"""The globals of functions that are pickled by value, in a worker: one namespace per module.

Functions of ``__main__`` travel by value, and cloudpickle gives each of them its own globals. Functions of an executor
share those of their module, as in a process that has imported it. Whatever code in the worker assigns to a global name,
such as an initializer, stays: the values that come with later functions do not replace it.
"""

from __future__ import annotations

import dis
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

_MISSING: Final = object()
# The name of a module that workers can import, else an empty one, and an id of its globals.
Key: TypeAlias = tuple[str, int]
_GLOBAL_NAMES: Final = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


class Namespace:
    """The globals of one module.

    Args:
        values: Those that every function of the module has, such as ``__name__``.
        assigned: Those that the initializer has assigned in the module itself.

    Attributes:
        values: The globals.
    """

    def __init__(self, values: dict[str, Any], assigned: dict[str, Any]) -> None:
        self.values: dict[str, Any] = {**values, **assigned}
        # The globals as they were last written, what was written then, and the names that code has assigned.
        self._known = dict(self.values)
        self._written: dict[str, Any] | None = None
        self._assigned = set(assigned)

    def write(self, sent: dict[str, Any]) -> None:
        """Write the values that came with a function, except those that code in this worker has assigned."""
        if sent is self._written:
            return
        known = self._known
        self._assigned.update(name for name, value in self.values.items() if known.get(name, _MISSING) is not value)
        self.values.update((name, value) for name, value in sent.items() if name not in self._assigned)
        self._known, self._written = dict(self.values), sent


class _Namespaces(threading.local):
    """The namespaces of the calling thread: in-process workers share nothing.

    Attributes:
        all: The namespaces.
        assigned: The globals of modules that the initializer has assigned, by the names of the modules.
    """

    def __init__(self) -> None:
        self.all: dict[Key, Namespace] = {}
        self.assigned: dict[str, dict[str, Any]] = {}


_namespaces = _Namespaces()


def call_initializer(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Call an initializer. Functions of modules that are loaded later see the globals that it assigns there."""
    modules = [(name, vars(module)) for name, module in list(sys.modules.items()) if type(module) is types.ModuleType]
    before = [dict(values) for _, values in modules]
    function(*arguments)
    for (name, now), old in zip(modules, before, strict=True):
        _namespaces.assigned[name] = {key: new for key, new in dict(now).items() if old.get(key, _MISSING) is not new}


def globals_for_load(key: Key, values: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of a module, for a function that is being loaded. Pickles refer to this."""
    if key not in _namespaces.all:
        _namespaces.all[key] = Namespace(values, _namespaces.assigned.get(key[0], {}))
    return _namespaces.all[key].values


def write_sent(key: Key, sent: dict[str, Any]) -> dict[str, Any]:
    """Write the globals that a function uses; return those that are left to write, which are none."""
    _namespaces.all[key].write(sent)
    return {}


def write_again(function: types.FunctionType, sent: dict[str, Any]) -> None:
    """Write the values that came with a function again, if another function has come with others."""
    for namespace in _namespaces.all.values():
        if namespace.values is function.__globals__:
            namespace.write(sent)


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
