"""Values of all agents of a copy in few arrays, as caller and worker exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from envactors.mailbox.specs import OBJECT, ArraySpec, Spec, flatten, leaves, unflatten

# Rows of the flags that follow the observations of a copy: shape (4, agents), bool.
LIVE: Final = 0  # the agent is alive after the step
REPORTED: Final = 1  # the copy has returned something for it
TERMINATED: Final = 2
TRUNCATED: Final = 3
FLAGS: Final = 4


class AgentLayout:
    """Where the leaves of each agent's value are: leaves of one shape and dtype share an array, agents along its axis.

    A step copies one array per leaf of a spec, so one array for all agents is faster than one per agent.

    Args:
        specs: The spec of each agent's value.

    Attributes:
        specs: The same.
        arrays: The spec of each array. What cannot be batched is in a list, whose spec is `OBJECT`.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs: tuple[Spec, ...] = tuple(specs)
        numbers: dict[tuple[tuple[int, ...], str], int] = {}
        shared: list[list[ArraySpec]] = []  # the leaves in each array
        self._places: list[list[tuple[int, int]]] = []  # (array, position) of each agent's leaves
        for spec in self.specs:
            places = []
            for leaf in leaves(spec):
                outline = (leaf.shape, leaf.dtype.str) if leaf.batchable else ((), OBJECT.dtype.str)
                number = numbers.setdefault(outline, len(shared))
                if number == len(shared):
                    shared.append([])
                places.append((number, len(shared[number])))
                shared[number].append(leaf)
            self._places.append(places)
        # The only place of an agent's value, which saves the walk through a nested one; None if there are others.
        self._only = [
            places[0] if isinstance(spec, ArraySpec) else None
            for spec, places in zip(self.specs, self._places, strict=True)
        ]
        self._sizes = [len(group) for group in shared]
        self.arrays: tuple[ArraySpec, ...] = tuple(
            ArraySpec((len(group), *group[0].shape), group[0].dtype) if group[0].batchable else OBJECT
            for group in shared
        )

    def make_empty(self, count: int | None = None) -> list[Any]:
        """Return the arrays of one env, or of ``count`` envs along a first axis, with zeros (None in lists)."""
        made: list[Any] = []
        for spec, size in zip(self.arrays, self._sizes, strict=True):
            if spec.batchable:
                made.append(np.zeros(spec.shape if count is None else (count, *spec.shape), spec.dtype))
            else:
                made.append([None] * size if count is None else [[None] * size for _ in range(count)])
        return made

    def put(self, arrays: Sequence[Any], agent: int, value: Any) -> None:
        """Write a conforming value of an agent into the arrays of one env."""
        if (only := self._only[agent]) is not None:
            arrays[only[0]][only[1]] = value
            return
        for (array, position), leaf in zip(self._places[agent], flatten(self.specs[agent], value), strict=True):
            arrays[array][position] = leaf

    def put_batch(self, arrays: Sequence[Any], agent: int, values: Any) -> None:
        """Write one conforming value per env into the arrays of several envs."""
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

    def get_batch(self, arrays: Sequence[Any], agent: int) -> Any:
        """Return the values of an agent from the arrays of several envs: a view per leaf, a list if not batchable."""
        found = (
            arrays[array][:, position] if self.arrays[array].batchable else [row[position] for row in arrays[array]]
            for array, position in self._places[agent]
        )
        return unflatten(self.specs[agent], found)
