"""The plan of a storm: which fault befalls which env, and when."""

from __future__ import annotations

import dataclasses
import random

from envactors.testing.sabotage import FaultKind, Place

_MOST_GAP = 3  # results between two faults of one actor

_IN_STEP_OR_RESET = (
    FaultKind.STOP,
    FaultKind.HANG,
    FaultKind.SLEEP,
    FaultKind.EXCEPTION,
    FaultKind.UNPICKLABLE,
    FaultKind.EXIT,
    FaultKind.SEGFAULT,
    FaultKind.CHILD,
    FaultKind.KILL_WRITING,
    FaultKind.BUS_WRITING,
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
        kind: What happens.
        env_id: To which env.
        place: Where in its life; None: while its process is idle.
        gap: How many results its actor gives out in peace before.
        joined: Whether it may come while the fault before it, in the same actor, is not over yet.
        by_hand: Whether a reset that is to suffer is asked for, rather than waited for.
        overrun: Of a sleep, by how many seconds it is longer than the deadline.
    """

    kind: FaultKind
    env_id: int
    place: Place | None
    gap: int
    joined: bool
    by_hand: bool
    overrun: float


def plan_faults(faults: int, seed: int, num_envs: int) -> list[Fault]:
    """Plans a storm; all kinds come about equally often.

    Args:
        faults: How many.
        seed: Equal ones give equal plans.
        num_envs: How many envs there are to choose from.
    """
    dice = random.Random(seed)  # noqa: S311 # no secret
    plan: list[Fault] = []
    while len(plan) < faults:
        for kind in dice.sample(list(FaultKind), len(FaultKind)):
            place: Place | None = Place.STEP
            if kind is FaultKind.KILL_IDLE:
                place = None
            elif kind is FaultKind.KILL_FACTORY:
                place = Place.FACTORY
            elif kind is FaultKind.KILL_RESET or (kind in _IN_STEP_OR_RESET and dice.random() < 0.2):
                place = Place.RESET
            plan.append(
                Fault(
                    kind,
                    env_id=dice.randrange(num_envs),
                    place=place,
                    gap=dice.randint(0, _MOST_GAP),
                    joined=dice.random() < 0.25,
                    by_hand=dice.random() < 0.3,
                    overrun=round(dice.uniform(0.0, 0.1), 3),
                )
            )
    return plan[:faults]
