"""Selections of the envs of a vector, and the envs of one actor, as other modules see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from envactors.actor.actor import Actor
from envactors.actor.job import ErrorOf
from envactors.crashes.inputs import Inputs


class EnvsOfActor(Protocol):
    """The envs of one actor, as their jobs and waiting threads use them: an `envactors.vector.env_group.EnvGroup`.

    Attributes:
        actor: The actor.
        rows_job: Its running job while rows are posted, a `RowsJob`.
        queued_in: The `QueuedRows` job in which each env was queued last.
    """

    actor: Actor
    rows_job: Any
    queued_in: dict[int, Any]

    def collect_completed(self) -> None:
        """Record the results of complete rows."""

    def count_missing(self) -> int:
        """Return how many outcomes of its envs are missing."""

    def check_memory(self, finished: int) -> str:
        """Return a text if the worker claims to have finished rows which are not complete."""

    def fail_queued(self, ids: Sequence[int], error_of: ErrorOf) -> None:
        """Fail the requests of queued envs, which no process will run."""

    def inputs_of_row(self, index: int) -> Inputs:
        """Return the posted request of an env, and the requests before it."""


class Selection(NamedTuple):
    """Some envs of a vector.

    Attributes:
        ids: Their ids, in the user's order.
        array_index: The same as an index into arrays with one entry per env: a slice of all, an array, or a list.
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
