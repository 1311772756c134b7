"""Requests of envs in workers, results out of their rows, and selections of the envs of a vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from envactors.actor.actor import Actor
from envactors.actor.future import ActorFuture, Outcome


class RowResult(NamedTuple):
    """A result that was copied out of its row, not unpickled yet.

    Attributes:
        leaves: The leaves of the observation; None for those that are objects.
        reward: The reward; None if it is an object that was not unpickled yet.
        content: The info and the objects, pickled; None if the info is empty and there are no objects.
    """

    env_id: int
    leaves: list[Any]
    reward: Any
    terminated: bool
    truncated: bool
    content: bytes | memoryview | None
    incarnation: int


@dataclasses.dataclass(slots=True, eq=False)
class EnvRequest:
    """The request of an env.

    A bare step needs no `EnvRequest`: its action is in the row, and the vector delivers its result.

    Attributes:
        method: The method that the user called.
        resets: Whether the worker runs a reset: the user has asked for it, or it answers a failed step. An autoreset
            does not set this.
        future: The future of the outcome; None if the vector delivers it.
        seed: The user's seed for a reset.
        payload: The pickled action, or the pickled options of a reset; None if the row contains all of the request.
        earlier_error: The error of an earlier attempt, which the result reports.
        ended_step: The result of a step that ended its episode, while the next process does its autoreset; else None.
    """

    method: Literal["step", "reset"]
    resets: bool = False
    future: ActorFuture | None = None
    seed: int | None = None
    payload: bytes | None = None
    earlier_error: Outcome | None = None
    ended_step: RowResult | None = None

    @property
    def truncates_episode(self) -> bool:
        """Whether the request is a step that has failed, and that a reset in the next process answers, truncated."""
        return self.method == "step" and self.earlier_error is not None and self.ended_step is None


class Selection(NamedTuple):
    """Some envs of a vector.

    Attributes:
        ids: Their ids, in the user's order.
        at: The same as an index of arrays with one entry per env: a slice of all, an array, or a list.
        is_all: Whether these are all envs in ascending order.
        by_group: The `EnvGroup` of each actor, with its ids in ascending order. Methods of `EnvTable` do not use it.
        actors: The actors of the groups.
    """

    ids: list[int]
    at: Any
    is_all: bool = False
    by_group: Sequence[tuple[Any, list[int]]] = ()
    actors: Sequence[Actor] = ()
