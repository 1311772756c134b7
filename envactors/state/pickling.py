"""Pickle the attributes of an env without the objects that the env keeps, and load them into another env.

`envactors.state.kinds` decides which objects an env keeps, and `envactors.state.places` finds them.
"""

from __future__ import annotations

import inspect
import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np

from envactors.state import kinds
from envactors.state.kinds import Kind, kind_of
from envactors.state.mujoco import is_engine_memory
from envactors.state.places import Place, Places, at, describe

PROTOCOL = 5

_NOTHING = object()


class StatePickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles the attributes of envs. Like cloudpickle, it accepts objects of classes that cannot be imported.

    Args:
        file: The file to write to.
        chain: The env and the envs that it wraps; the pickle refers to them and does not copy them.
        found_at: The places of the objects that the envs hold.
        shared: Ids of arrays whose memory other arrays use; those others are pickled as views.
    """

    def __init__(self, file: io.BytesIO, chain: Sequence[Any], found_at: Places, shared: set[int]) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._depths = {id(env): depth for depth, env in enumerate(chain)}
        self._places = found_at
        self._shared = shared
        # Arrays that were pickled as a whole: the number of views into each array, by its id, and the ids of the arrays
        # that own their memory.
        self._views: dict[int, int] = {}
        self._owners: set[int] = set()

    def found_shared(self) -> set[int]:
        """Return the ids of arrays that share memory with others, but would not do so after loading this pickle."""
        return {owner for owner, count in self._views.items() if count > 1 or owner in self._owners}

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle an object of any type but the built-in ones."""
        depth = self._depths.get(id(value))
        if depth is not None:
            return env_at, (depth,)
        if type(value) is np.ndarray:
            return self._reduce_array(value)
        if type(value) is types.MethodType:
            return _reduce_method(value)
        if isinstance(value, type):
            return super().reducer_override(value)
        kind = kind_of(value)
        return NotImplemented if kind is None else self._reduce_kept(value, kind)

    def _reduce_kept(self, value: Any, kind: Kind) -> Any:
        place = self._places.of(value)
        if place is not None:
            args = place, type(value).__name__, kind.name, kind.describe(value)
            state = kind.capture(value)
            return (own_at, args) if state is None else (own_at, args, state, None, None, apply)
        if not kind.required:
            return type(None), ()
        if kind is kinds.FUNCTION:
            return super().reducer_override(value)
        if kind is kinds.SPACE:
            return NotImplemented
        raise TypeError(f"the {type(value).__name__} is inside an object whose parts Python code cannot inspect")

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        # The memory may belong to MuJoCo, or to the bytes that an array was unpickled from.
        is_foreign = owner.base is not None and not isinstance(owner.base, (bytes, bytearray))
        if is_foreign and any(is_engine_memory(array, engine) for engine in self._places.engines()):
            return self._reduce_kept(array, kinds.VIEW)
        if owner is array or array.dtype.hasobject:
            self._owners.add(id(array))
        elif id(owner) in self._shared:
            offset = array.ctypes.data - owner.ctypes.data
            return view, (owner, array.shape, array.dtype, offset, array.strides, array.flags.writeable)
        else:
            self._views[id(owner)] = self._views.get(id(owner), 0) + 1
        return NotImplemented


class StateUnpickler(pickle.Unpickler):
    """Loads the pickle of a `StatePickler` for an env from the same factory.

    Args:
        file: The file to read from.
        chain: The env and the envs that it wraps.
    """

    def __init__(self, file: io.BytesIO, chain: Sequence[Any]) -> None:
        super().__init__(file)
        self._chain = chain
        # The kinds of the objects that the env keeps, by id.
        self._kinds: dict[int, Kind] = {}
        # These objects with their states. They are applied only once everything is loaded, so that a pickle that cannot
        # be loaded leaves the env unchanged.
        self._states: list[tuple[Any, Any]] = []
        self._own = {"env_at": self._chain.__getitem__, "own_at": self._own_at, "apply": self._apply}

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a name in the pickle refers to."""
        return self._own[name] if module == __name__ and name in self._own else super().find_class(module, name)

    def apply_states(self) -> None:
        """Restore the states of the objects that the env keeps."""
        for value, state in self._states:
            self._kinds[id(value)].restore(value, state)

    def _own_at(self, place: Place, type_name: str, kind_name: str, description: Any) -> Any:
        kind = kinds.KINDS[kind_name]
        try:
            value = at(self._chain, place)
        except LookupError:
            value = _NOTHING
        if type(value).__name__ == type_name and kind.describe(value) == description:
            self._kinds[id(value)] = kind
            return value
        if not kind.required:
            return None
        what = "nothing" if value is _NOTHING else f"{value!r:.100}"
        raise ValueError(
            f"cannot restore {describe(self._chain, place)}: the snapshot needs the env's own {type_name} there, but "
            f"the env has {what}. Restore it into an env from the same factory"
        )

    def _apply(self, value: Any, state: Any) -> None:
        self._states.append((value, state))


def env_at(*_args: Any) -> Any:
    """Provide the name by which pickles refer to the method of `StateUnpickler` that returns an env of the chain."""
    raise AssertionError("loaded without a StateUnpickler")


def own_at(*_args: Any) -> Any:
    """Provide the name of the method that returns the object that the env keeps at a place."""
    raise AssertionError("loaded without a StateUnpickler")


def apply(*_args: Any) -> None:
    """Provide the name of the method that collects the state of such an object."""
    raise AssertionError("loaded without a StateUnpickler")


def view(owner: Any, shape: Any, dtype: Any, offset: int, strides: Any, writeable: bool) -> np.ndarray[Any, Any]:
    """Return an array that uses the memory of another array."""
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, owner.ravel(order="K"), offset, strides)
    array.flags.writeable = writeable
    return array


def method(value: Any, name: str) -> types.MethodType:
    """Return a method of an object's class, even if an attribute of the object hides it."""
    return types.MethodType(inspect.getattr_static(type(value), name), value)


def _reduce_method(value: types.MethodType) -> Any:
    name = value.__func__.__name__
    if inspect.getattr_static(type(value.__self__), name, None) is value.__func__:
        return method, (value.__self__, name)
    return types.MethodType, (value.__func__, value.__self__)
