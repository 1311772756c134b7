"""Capture and restore the state of a Gymnasium env with all its wrappers, as bytes.

The state is a pickle of the attributes of the whole chain, from the outermost wrapper to the unwrapped env, so that an
object that several of them share stays one object. Persistent ids stand for the envs and for the objects that each env
keeps, which `envactors.state.kept` defines.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from envactors.mailbox.pickling import has_importable_name
from envactors.options import SnapshotPolicy
from envactors.state.engines import belongs_to_engine
from envactors.state.kept import (
    has_variables,
    identity_of,
    is_file,
    is_kept,
    is_output,
    parts_of,
    read_state,
    write_state,
)

# Attributes in which Gymnasium stores how an env was created. They are equal for all envs from the same factory, so
# they are not part of the state.
_ARGUMENTS = frozenset(["spec", "_cached_spec", "_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"])
_ADVICE = "Use a SnapshotPolicy with your own get and set"


def gymnasium_snapshot(every: int = 1000) -> SnapshotPolicy:
    """Return the snapshot policy for Gymnasium envs: classic control, MuJoCo, ALE, and others written in Python.

    A snapshot contains the attributes of the env and of every wrapper, their random generators and those of the spaces,
    and the state of ALE and MuJoCo. An env from the same factory continues from it bit for bit, even in another
    process.

    The restored env keeps its own windows, renderers, drawing surfaces, locks, and files that are open for writing:
    they cannot be copied, and no step depends on them. Bounds of spaces are assumed to be constant, and so are the
    textures, meshes, and skins of MuJoCo models. State outside the env, such as globals and attributes of classes, is
    not captured.

    ``get`` raises a TypeError that names the attribute if the env holds anything else that cannot be pickled: sockets,
    processes, generators, other envs, or objects of other engines. The same goes for ALE with sticky actions, arrays
    that share memory, views of MuJoCo's memory, closures, and lambdas inside of other objects. Such an env needs a
    custom `SnapshotPolicy`, or ``on_failure="replay"`` without snapshots.

    Args:
        every: The number of steps of an env between two automatic snapshots.

    Raises:
        ValueError: ``every`` is not a positive int.
    """
    return SnapshotPolicy(capture, restore, every)


def capture(env: Any) -> bytes:
    """Return the state of an env and its wrappers.

    Raises:
        TypeError: The env holds an object that cannot be captured.
    """
    chain = _chain_of(env)
    file = io.BytesIO()
    pickler = _StatePickler(file, chain)
    pickler.dump(_names_of(chain))
    for one in chain:
        attributes = {name: value for name, value in vars(one).items() if name not in _ARGUMENTS}
        pickler.dump(list(attributes))
        for name, value in attributes.items():
            is_own = pickler.persistent_id(value) is not None
            try:
                pickler.dump((value, [read_state(part) for part in parts_of(value)] if is_own else []))
            except Exception as error:
                reason = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
                attribute = f"attribute {name!r} of {type(one).__name__} ({type(value).__name__})"
                raise TypeError(f"cannot capture {attribute}: {reason}. {_ADVICE}") from error
    return file.getvalue()


def restore(env: Any, state: bytes) -> None:
    """Restore the state that `capture` returned for an env from the same factory.

    Raises:
        ValueError: The env differs from the captured one.
    """
    chain = _chain_of(env)
    unpickler = _StateUnpickler(io.BytesIO(state), chain)
    names = unpickler.load()
    if names != _names_of(chain):
        raise ValueError(
            f"the snapshot was taken from the env {'<'.join(names)}: expected one from {'<'.join(_names_of(chain))}. "
            "Restore it into an env from the same factory"
        )
    # The env changes only once everything is loaded.
    loaded = [{name: unpickler.load() for name in unpickler.load()} for _ in chain]
    for one, attributes in zip(chain, loaded, strict=True):
        for value, states in attributes.values():
            for part, part_state in zip(parts_of(value), states, strict=False):
                write_state(part, part_state)
        _set_attributes(one, {name: value for name, (value, _) in attributes.items()})


def _chain_of(env: Any) -> list[Any]:
    """Return an env and the envs that it wraps, outermost first.

    Raises:
        TypeError: One of them has ``__slots__``, whose values are not among its attributes.
    """
    chain = [env]
    while (inner := _inner(chain[-1])) is not None and all(inner is not one for one in chain):
        chain.append(inner)
    for one in chain:
        if not hasattr(one, "__dict__") or copyreg._slotnames(type(one)):  # type: ignore[attr-defined] # noqa: SLF001 # as pickle
            raise TypeError(f"cannot capture {type(one).__name__}: it has __slots__. {_ADVICE}")
    return chain


def _inner(env: Any) -> Any:
    """Return the env inside a wrapper of Gymnasium or an adapter of a drop-in; None if there is none."""
    attributes = getattr(env, "__dict__", {})
    return next((attributes[name] for name in ("env", "_env") if hasattr(attributes.get(name), "step")), None)


def _names_of(chain: list[Any]) -> list[str]:
    return [type(one).__qualname__ for one in chain]


def _set_attributes(env: Any, values: dict[str, Any]) -> None:
    live = vars(env)
    # The env also keeps windows and renderers that it opened after the snapshot. Otherwise nobody would close them.
    own = {name for name, value in live.items() if name in _ARGUMENTS or is_output(value)}
    for name in live.keys() - own - values.keys():
        del live[name]
    for name, value in values.items():
        if not (value is None and name in own):
            live[name] = value


class _Place(NamedTuple):
    """The persistent id of an env, or of an object that an env keeps as an attribute.

    Attributes:
        depth: The position of the env in the chain.
        name: The name of the attribute; None for the env itself.
        part: The position among the parts of the attribute; see `parts_of`.
        type_name: The type of the object; None for an output, which another env need not have.
        identity: See `identity_of`.
    """

    depth: int
    name: str | None = None
    part: int = 0
    type_name: str | None = None
    identity: Any = None


class _StatePickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles attributes of envs. Like cloudpickle, it accepts objects of classes that cannot be imported.

    Args:
        file: The file to write to.
        chain: The env and the envs that it wraps.
    """

    def __init__(self, file: io.BytesIO, chain: Sequence[Any]) -> None:
        super().__init__(file, protocol=5)
        self._places = {id(env): _Place(depth) for depth, env in enumerate(chain)}
        for depth, env in enumerate(chain):
            for name, value in vars(env).items():
                for index, part in enumerate(parts_of(value) if is_kept(value) else ()):
                    identity = (None, None) if is_output(part) else (type(part).__name__, identity_of(part))
                    self._places.setdefault(id(part), _Place(depth, name, index, *identity))
        # The pickled arrays by the id of the object that owns their memory.
        self._arrays: dict[int, list[np.ndarray[Any, Any]]] = {}

    def persistent_id(self, value: Any) -> _Place | None:
        """Return the id of an object that is not pickled; None for others."""
        return self._places.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle an object of any type but the built-in ones.

        Raises:
            TypeError: The object would not be copied faithfully.
        """
        if isinstance(value, np.ndarray):
            self._check_memory(value)
        elif isinstance(value, types.FunctionType):
            _check_function(value)
        elif isinstance(value, types.MethodType) and getattr(value.__self__, value.__name__, None) == value:
            return value.__reduce__()
        elif isinstance(value, type):
            return _reduce_class(value, super().reducer_override(value))
        else:
            _check_object(value)
        return super().reducer_override(value)

    def _check_memory(self, array: np.ndarray[Any, Any]) -> None:
        owner: Any = array
        while isinstance(owner, memoryview) or (isinstance(owner, np.ndarray) and owner.base is not None):
            owner = owner.obj if isinstance(owner, memoryview) else owner.base
        # The observations of ALE belong to a `nb_ndarray`, and ALE does not change them.
        if not isinstance(owner, (np.ndarray, bytes, bytearray)) and type(owner).__name__ != "nb_ndarray":
            raise TypeError(f"the memory of an array belongs to a {type(owner).__name__}")
        arrays = self._arrays.setdefault(id(owner), [])
        if any(np.may_share_memory(array, other) for other in arrays):
            raise TypeError("an array shares memory with another one")
        arrays.append(array)


class _StateUnpickler(pickle.Unpickler):
    """Loads what a `_StatePickler` has pickled, for an env from the same factory.

    Args:
        file: The file to read from.
        chain: The env and the envs that it wraps.
    """

    def __init__(self, file: io.BytesIO, chain: Sequence[Any]) -> None:
        super().__init__(file)
        self._chain = chain

    def persistent_load(self, place: _Place) -> Any:
        """Return the env's own object at a place; None if an output is not there.

        Raises:
            ValueError: The env has another object there.
        """
        env = self._chain[place.depth]
        if place.name is None:
            return env
        parts = parts_of(vars(env).get(place.name))
        value = parts[place.part] if place.part < len(parts) else None
        if place.type_name is None:
            return value if is_output(value) else None
        if type(value).__name__ == place.type_name and identity_of(value) == place.identity:
            return value
        raise ValueError(
            f"cannot restore {type(env).__name__}.{place.name}: the snapshot needs the env's own {place.type_name} "
            f"there, but the env has {value!r:.100}. Restore it into an env from the same factory"
        )


def _reduce_class(cls: type, reduced: Any) -> Any:
    """Pickle a class that cannot be imported by itself: the variables of its methods are not state of the env."""
    is_importable = reduced is NotImplemented or reduced[0] is type
    return reduced if is_importable else (pickle.loads, (cloudpickle.dumps(cls),))


def _check_function(function: types.FunctionType) -> None:
    if has_importable_name(function):
        return
    if has_variables(function):
        raise TypeError("a closure, or a function with defaults or attributes, may hold state in them")
    raise TypeError("a function that cannot be imported is inside another object")


def _check_object(value: Any) -> None:
    name, gymnasium = type(value).__name__, sys.modules.get("gymnasium")
    if belongs_to_engine(value):
        raise TypeError(f"the {name} is inside another object, or is a view of an engine")
    if is_file(value):
        raise TypeError("a file that is open for reading has a position, which cannot be captured")
    if gymnasium is not None and isinstance(value, gymnasium.Env):
        raise TypeError(f"{name} is an env that is not in the chain of wrappers")
    if gymnasium is not None and isinstance(value, gymnasium.utils.EzPickle):
        raise TypeError(f"{name} is pickled without its state (EzPickle)")
