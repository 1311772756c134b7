"""Find the place of an object in an env, and the object at that place in another env from the same factory.

`envactors.state.kinds` defines what happens to the objects that are found.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# The depth of an env in its chain, the name of an attribute, and the keys below it: (1, "func"), (0, "rewards", 2).
Place = tuple[Any, ...]

_ATOMS = (int, float, complex, str, bytes, bytearray, np.ndarray, np.generic, np.dtype, type, types.ModuleType)
_NOTHING = object()


class Places:
    """The places of the objects of an env.

    Args:
        chain: The env and the envs that it wraps.
    """

    def __init__(self, chain: Sequence[Any]) -> None:
        self._chain = chain
        # The place of each object, by its id. Nearly all objects that `of` looks up are attributes of an env.
        self._attributes: dict[int, Place] = {}
        for depth, env in enumerate(chain):
            for name, value in vars(env).items():
                self._attributes.setdefault(id(value), (depth, name))
        # Likewise for everything below the attributes; computed on first use.
        self._below: dict[int, Place] | None = None
        self._engines: list[Any] = []

    def of(self, value: Any) -> Place | None:
        """Return the place of an object; None if it has none."""
        place = self._attributes.get(id(value))
        if place is not None:
            return place
        if self._below is None:
            self._below = self._search()
        return self._below.get(id(value))

    def engines(self) -> list[Any]:
        """Return the MuJoCo models and data that the envs hold."""
        self._below = self._below or self._search()
        return self._engines

    def _search(self) -> dict[int, Place]:
        found = {id(env): (depth,) for depth, env in enumerate(self._chain)}
        queue: collections.deque[tuple[Place, Any]] = collections.deque(
            ((depth, name), value) for depth, env in enumerate(self._chain) for name, value in vars(env).items()
        )
        # Breadth first: the shorter a place, the less it depends on the state.
        while queue:
            place, value = queue.popleft()
            if id(value) not in found:
                found[id(value)] = place
                if type(value).__name__ in ("MjModel", "MjData"):
                    self._engines.append(value)
                queue.extend(((*place, key), child) for key, child in _children(value) if _is_worth(child))
        return found


def at(chain: Sequence[Any], place: Place) -> Any:
    """Return the object at a place.

    Raises:
        LookupError: The place does not exist.
    """
    depth, *keys = place
    value = chain[depth]
    for key in keys:
        value = next((child for name, child in _children(value) if name == key), _NOTHING)
        if value is _NOTHING:
            raise LookupError(place)
    return value


def describe(chain: Sequence[Any], place: Place) -> str:
    """Return a place as text for errors, such as ``TimeLimit.func``."""
    depth, *keys = place
    return ".".join([type(chain[depth]).__name__, *map(str, keys)])


def _is_worth(value: Any) -> bool:
    """Return whether `of` may look up an object or one below it; arrays are looked up only if an engine owns them."""
    if isinstance(value, np.ndarray):
        return value.base is not None
    return value is not None and not isinstance(value, _ATOMS)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and objects below an object. Keys are strings and ints, since places are pickled."""
    if isinstance(value, _ATOMS):
        return
    if isinstance(value, dict):
        yield from ((key, child) for key, child in value.items() if isinstance(key, (str, int)))
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from enumerate(value)
    elif isinstance(value, types.FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            try:
                yield index, cell.cell_contents
            except ValueError:  # the cell is empty
                continue
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("func", value.__func__), ("self", value.__self__))
    if hasattr(value, "__dict__"):
        yield from vars(value).items()
