"""The globals of functions that are pickled by value, in a worker: one namespace per module, and one per class.

Functions of ``__main__`` travel by value, and cloudpickle gives each of them its own globals. Functions of an executor
share those of their module, as in a process that has imported it. Whatever code in the worker assigns to a global name
stays, and so does a value that the initializer changes: the values that come with later functions do not replace it.
The same holds for the attributes of the module's classes.
"""

from __future__ import annotations

import dis
import hashlib
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from envactors.mailbox.pickling import CACHED_FUNCTION, ValuePickler, loads, update_class
from envactors.worker.context import current_actor

_MISSING: Final = object()
# The name of a module that workers can import, else an empty one, and an id of its globals; or a class's name and 0.
Key: TypeAlias = tuple[str, int]
# Values whose contents, if they have any, are not of one global alone.
_NO_CONTENTS: Final = (type, types.ModuleType, types.FunctionType)
_GLOBAL_NAMES: Final = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


class Namespace:
    """The globals of one module, or the attributes of one class.

    Args:
        values: The globals, at first those that every function of the module has, such as ``__name__``; or the
            attributes.
        assigned: The names of those that the initializer has assigned in the module itself.
        owner: The class.

    Attributes:
        values: The globals, or a view of the attributes that cannot be written.
        assigned: The names of those that stay, whatever comes with functions.
        owner: The class, if they are its attributes.
    """

    def __init__(self, values: Any, assigned: Iterable[str] = (), owner: type | None = None) -> None:
        self.values: dict[str, Any] = values
        # The values as they were last written, and what was written then.
        self._known: dict[str, Any] = dict(values)
        self._written: dict[str, Any] | None = None
        self.assigned: set[str] = set(assigned)
        self.owner = owner

    def write(self, sent: dict[str, Any]) -> None:
        """Write the values that came with a function, except those that code in this worker has assigned."""
        if sent is self._written:
            return
        known = self._known
        self.assigned.update(name for name, value in self.values.items() if known.get(name, _MISSING) is not value)
        new = {name: value for name, value in sent.items() if name not in self.assigned}
        if self.owner is None:
            self.values.update(new)
        else:
            update_class(self.owner, (new, {}))
        self._known, self._written = dict(self.values), sent


class _Namespaces:
    """The namespaces of one actor: in-process workers share nothing.

    Attributes:
        all: The namespaces.
        assigned: The globals of modules that the initializer has assigned, by the names of the modules.
        sent: The values that came with the function that is being loaded.
    """

    def __init__(self) -> None:
        self.all: dict[Key, Namespace] = {}
        self.assigned: dict[str, dict[str, Any]] = {}
        self.sent: dict[Key, dict[str, Any]] = {}


# By the id of the actor's context; that of None is for loading functions outside a worker.
_by_actor: dict[int, _Namespaces] = {id(None): _Namespaces()}


def _namespaces() -> _Namespaces:
    """Return those of the current actor, whatever thread it runs in."""
    actor = current_actor()
    if id(actor) not in _by_actor:
        weakref.finalize(actor, _by_actor.pop, id(actor))
        _by_actor[id(actor)] = _Namespaces()
    return _by_actor[id(actor)]


def call_initializer(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Call an initializer. Functions of modules that are loaded later see the globals that it assigns there."""
    modules = [(name, vars(module)) for name, module in list(sys.modules.items()) if type(module) is types.ModuleType]
    before = [dict(values) for _, values in modules]
    spaces = _namespaces().all.values()
    # Lists, since to pickle an object sets an attribute of its class.
    sent = [(space, name, _digest_of(value)) for space in spaces for name, value in list(space.values.items())]
    function(*arguments)
    for space, name, digest in sent:
        if digest is None or digest != _digest_of(space.values.get(name)):
            space.assigned.add(name)
    for (name, now), old in zip(modules, before, strict=True):
        _namespaces().assigned[name] = {key: new for key, new in dict(now).items() if old.get(key, _MISSING) is not new}


def globals_for_load(key: Key, values: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of a module, for a function that is being loaded. Pickles refer to this."""
    spaces = _namespaces()
    if key not in spaces.all:
        assigned = spaces.assigned.get(key[0], {})
        spaces.all[key] = Namespace({**values, **assigned}, assigned)
    return spaces.all[key].values


def write_sent(key: Key, sent: dict[str, Any]) -> dict[str, Any]:
    """Write the globals that a function uses; return those that are left to write, which are none."""
    spaces = _namespaces()
    spaces.all[key].write(sent)
    spaces.sent.setdefault(key, {}).update(sent)
    return {}


def write_class(loaded: type, state: tuple[dict[str, Any], str]) -> None:
    """Write the attributes of a class of a module. A new class of the same name replaces the one before."""
    spaces, (sent, name) = _namespaces().all, state
    if (name, 0) not in spaces or spaces[name, 0].owner is not loaded:
        spaces[name, 0] = Namespace(vars(loaded), owner=loaded)
    spaces[name, 0].write(sent)


def load_function(pickled: bytes) -> tuple[types.FunctionType, dict[Key, dict[str, Any]]]:
    """Load a function; return it with the values that have come with it, for `write_again`."""
    spaces = _namespaces()
    spaces.sent = {}
    function = loads(pickled)
    sent, spaces.sent = spaces.sent, {}
    return function, sent


def write_again(parts: dict[Key, dict[str, Any]]) -> None:
    """Write the values that came with a function again, if another function has come with others."""
    spaces = _namespaces()
    for key, sent in parts.items():
        spaces.all[key].write(sent)


def global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that code uses, that of nested functions and classes included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_NAMES:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def has_same_items(items: list[Any], others: list[Any]) -> bool:
    """Return whether two lists have the same objects."""
    return len(items) == len(others) and all(map(operator.is_, items, others))


class _StatePickler(ValuePickler):
    """Pickles the contents of values, also of caches; what is not of one global alone it pickles as ids."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CACHED_FUNCTION):
            return tuple, ((id(obj), *obj.cache_info()),)
        if isinstance(obj, _NO_CONTENTS):
            return abs, (id(obj),)
        return super().reducer_override(obj)


def _digest_of(value: Any) -> bytes | None:
    """Return a digest of the contents of a value; None if they cannot be pickled."""
    digest = hashlib.blake2b()
    try:
        _StatePickler(types.SimpleNamespace(write=digest.update)).dump(value)
    except Exception:
        return None
    return digest.digest()
