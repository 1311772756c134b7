"""Scenarios in which the parts of a rollout end in several threads."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from envactors.actor.slots import ROLLING
from envactors.rollout.rollouts import Rollouts
from envactors.rollout.run import Run as RolloutInFlight
from simulation.schedule import Run
from simulation.waits import Check


class _Part:
    """A part of a rollout."""

    def __init__(self, supervisor: Any) -> None:
        self.supervisor = supervisor
        self.errors: dict[int, BaseException] = {}

    def move(self, trajectory: Any, place: Any) -> None:
        pass


class _Supervisor:
    """An actor."""

    reactor = SimpleNamespace(wake=lambda _future: None)


class _Books:
    """Rollouts of two actors, and what they hand out."""

    def __init__(self) -> None:
        self.handed_out: list[Any] = []
        slots: Any = SimpleNamespace(at_rest=ROLLING)
        self.actors: list[Any] = [_Supervisor() for _ in range(2)]
        vector: Any = SimpleNamespace(slots=slots, actors=self.actors, reader=SimpleNamespace(copies=True))
        unused: Any = None
        self.rollouts = Rollouts(vector, unused, unused)

    def begin(self, futures: int) -> RolloutInFlight:
        """Begin a rollout with this many futures."""
        buffer: Any = SimpleNamespace(trajectory=None, place=(0, 0))
        run = RolloutInFlight(
            self.actors,
            buffer,
            copy=True,
            count=futures,
            prepare=lambda _run: None,
            read=lambda _run, _part: None,
        )
        future: Any = SimpleNamespace(arrive=self.handed_out.append)
        run.futures = [future] * futures
        parts: list[Any] = [_Part(actor) for actor in self.actors]
        run.parts = parts
        run.left = set(run.parts)
        self.rollouts._runs.append(run)
        return run


def ends(futures: int, run: Run) -> Check:
    """Both parts of a rollout end at once: each future is handed out once."""
    books = _Books()
    rollout = books.begin(futures)
    for name, part in zip("ab", rollout.parts, strict=True):
        run.add_thread(name, functools.partial(books.rollouts._on_part_end, rollout, part))

    def check() -> None:
        assert len(books.handed_out) == futures, f"{len(books.handed_out)} of {futures} futures are handed out"

    return check
