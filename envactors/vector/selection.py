"""Selections of the envs of a vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from envactors.actor.actor import Actor


@dataclasses.dataclass(slots=True, eq=False)
class Selection:
    """Some envs of a vector.

    Attributes:
        ids: Their ids, in the user's order.
        array_index: The same as an index into arrays with one entry per env: ``...`` for all, an array, or a list.
        is_all: Whether this is `Engine.all_envs`. Another selection of all envs does not count.
        by_group: The `EnvGroup` of each actor, with its ids in ascending order; empty for in-process envs. Methods of
            `EnvTable` do not use it.
        actors: The actors of the groups.
    """

    ids: list[int]
    array_index: Any
    is_all: bool = False
    by_group: Sequence[tuple[Any, list[int]]] = ()
    actors: Sequence[Actor] = ()
