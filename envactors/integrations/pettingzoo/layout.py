"""The layout of the few arrays that hold the values of all agents, and that caller and worker exchange.

Adapter and batches write and read these arrays; this module only knows where each agent's values are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envactors.mailbox.specs import OBJECT, ArraySpec, Spec, flatten, leaves, unflatten

# Rows of the flags that follow the observations of a copy: bool, shape (4, agents).
LIVE: Final = 0  # the agent is alive after the step
REPORTED: Final = 1  # the env returned an observation or a reward for the agent
TERMINATED: Final = 2
TRUNCATED: Final = 3
FLAGS: Final = 4
_BYTE: Final = np.dtype(np.uint8)


class AgentLayout:
    """Maps the leaves of each agent's value to positions in arrays. Leaves of equal shape and dtype share an array.

    A step copies each array separately, so one array for all agents is faster than one per agent.

    Args:
        specs: The spec of each agent's value.

    Attributes:
        specs: The spec of each agent's value.
        arrays: The spec of each array. Values that cannot be batched are in a list, whose spec is `OBJECT`.
        is_stack: Whether there is one array, which has the value of each agent along its first axis.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs: tuple[Spec, ...] = tuple(specs)
        array_of: dict[tuple[tuple[int, ...], str], int] = {}
        shared: list[list[ArraySpec]] = []  # the leaves in each array
        self._places: list[list[tuple[int, int]]] = []  # (array, position) of each agent's leaves
        for spec in self.specs:
            places = []
            for leaf in leaves(spec):
                outline = (leaf.shape, leaf.dtype.str) if leaf.batchable else ((), OBJECT.dtype.str)
                array = array_of.setdefault(outline, len(shared))
                if array == len(shared):
                    shared.append([])
                places.append((array, len(shared[array])))
                shared[array].append(leaf)
            self._places.append(places)
        # The place of each agent's value if it is a single array, which avoids flattening the value; else None.
        self._only = [
            places[0] if isinstance(spec, ArraySpec) else None
            for spec, places in zip(self.specs, self._places, strict=True)
        ]
        self._sizes = [len(group) for group in shared]
        self.arrays: tuple[ArraySpec, ...] = tuple(
            ArraySpec((len(group), *group[0].shape), group[0].dtype) if group[0].batchable else OBJECT
            for group in shared
        )

        self.is_stack: bool = None not in self._only and len(self.arrays) == 1 and self.arrays[0].batchable

    def stack(self, values: Mapping[Any, Any], names: Sequence[Any], *envs: int) -> npt.NDArray[Any] | None:
        """Return one array with all values, with the agents along its first axis.

        Args:
            values: The value of each agent, or its values in several envs.
            names: The agents, in order.
            *envs: The number of envs if there are several.

        Returns:
            The array; None unless there `is_stack`, and the values are exactly as their specs say.
        """
        if not self.is_stack or len(values) != len(names):
            return None
        spec = self.arrays[0]
        try:
            array = np.array([values[name] for name in names])
        except (KeyError, ValueError):
            return None
        return array if array.dtype == spec.dtype and array.shape == (len(names), *envs, *spec.shape[1:]) else None

    def make_empty(self, count: int | None = None) -> list[Any]:
        """Return arrays of zeros (lists of None) for one env, or for ``count`` envs along a first axis."""
        made: list[Any] = []
        for spec, size in zip(self.arrays, self._sizes, strict=True):
            if spec.batchable:
                made.append(np.zeros(spec.shape if count is None else (count, *spec.shape), spec.dtype))
            else:
                made.append([None] * size if count is None else [[None] * size for _ in range(count)])
        return made

    def put(self, arrays: Sequence[Any], agent: int, value: Any) -> None:
        """Write the value of an agent, which must conform to its spec, into the arrays of one env."""
        if (only := self._only[agent]) is not None:
            arrays[only[0]][only[1]] = value
            return
        for (array, position), leaf in zip(self._places[agent], flatten(self.specs[agent], value), strict=True):
            arrays[array][position] = leaf

    def writer(self, arrays: Sequence[Any], agent: int) -> Callable[[Any], bool]:
        """Return a function that writes the value of an agent into the arrays of one env, unless `conform` must see it.

        It returns whether it has written the value. A value that is refused may be written in part.
        """
        rows = (
            arrays[array][position, ...] if self.arrays[array].batchable else None
            for array, position in self._places[agent]
        )
        return _writer(self.specs[agent], rows)

    def put_batch(self, arrays: Sequence[Any], agent: int, values: Any) -> None:
        """Write the values of an agent, one per env, into the arrays of several envs."""
        if (only := self._only[agent]) is not None and self.arrays[only[0]].batchable:
            arrays[only[0]][:, only[1]] = values
            return
        for index, value in enumerate(values):
            self.put([each[index] for each in arrays], agent, value)

    def clear(self, arrays: Sequence[Any], agent: int) -> None:
        """Write zeros (None in lists) for an agent into the arrays of one env."""
        for array, position in self._places[agent]:
            arrays[array][position] = 0 if self.arrays[array].batchable else None

    def get(self, arrays: Sequence[Any], agent: int) -> Any:
        """Return the value of an agent from the arrays of one env, as views."""
        if (only := self._only[agent]) is not None:
            return arrays[only[0]][only[1]]
        return unflatten(self.specs[agent], iter([arrays[array][position] for array, position in self._places[agent]]))

    def get_batches(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the values of each agent from the arrays of several envs: views, or lists if not batchable."""
        columns = [
            list(array.swapaxes(0, 1)) if spec.batchable else [[row[i] for row in array] for i in range(size)]
            for spec, size, array in zip(self.arrays, self._sizes, arrays, strict=True)
        ]
        each = zip(self.specs, self._places, strict=True)
        return [unflatten(spec, iter([columns[i][position] for i, position in places])) for spec, places in each]


class Record:
    """The arrays of a layout and the flags as one observation: an array of bytes, or a tuple if some are lists.

    A single array travels several times as fast as a tuple.

    Args:
        layout: The layout of the observations.

    Attributes:
        spec: The spec of the observation.
    """

    def __init__(self, layout: AgentLayout) -> None:
        parts = (*layout.arrays, ArraySpec((FLAGS, len(layout.specs)), np.dtype(np.bool_)))
        fields = [(str(index), part.dtype, part.shape) for index, part in enumerate(parts)]
        self._fields = np.dtype(fields, align=True)
        self._is_array = all(part.batchable for part in parts)
        self.spec: Spec = ArraySpec((self._fields.itemsize,), _BYTE) if self._is_array else parts

    def split(self, obs: Any) -> list[Any]:
        """Return the arrays and the flags of one env, or of several along a first axis, as views."""
        if not self._is_array:
            return list(obs)
        record = obs.view(self._fields)[..., 0]
        return [record[name] for name in self._fields.names or ()]


def _writer(spec: Spec, rows: Iterator[Any]) -> Callable[[Any], bool]:
    """Return a function that writes a value into its rows, in the order of `flatten`; see `AgentLayout.writer`."""
    if isinstance(spec, ArraySpec):
        row, kind, dtype, shape = next(rows), np.ndarray if spec.shape else spec.dtype.type, spec.dtype, spec.shape

        def write_leaf(value: Any) -> bool:
            fits = row is not None and type(value) is kind and value.dtype == dtype and value.shape == shape
            if fits:
                row[...] = value
            return fits

        return write_leaf
    container: Any = type(spec)
    keys: Any = spec.keys() if isinstance(spec, dict) else range(len(spec))
    parts = [(key, _writer(spec[key], rows)) for key in keys]

    def write(value: Any) -> bool:
        if type(value) is not container or (value.keys() != keys if container is dict else len(value) != len(keys)):
            return False
        return False not in [write_part(value[key]) for key, write_part in parts]

    return write
