"""Plan of a chaos run: which fault happens to which env, and when."""

from __future__ import annotations

import dataclasses
import random

from chaos.faults import FaultKind, Place

_MOST_GAP = 3  # most results between two faults of one actor

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
class PlannedFault:
    """One fault of a plan.

    Attributes:
        kind: What happens.
        env_id: Index of the env.
        place: Point of the env's life at which it happens; None: while its process is idle.
        gap: Number of results that the actor delivers before the fault.
        joined: True if it may happen before the actor has recovered from the previous fault.
        by_hand: True if the affected reset is requested explicitly; False to wait for an autoreset.
        overrun: Seconds by which a sleep is longer than the deadline.
    """

    kind: FaultKind
    env_id: int
    place: Place | None
    gap: int
    joined: bool
    by_hand: bool
    overrun: float


def plan_faults(faults: int, seed: int, num_envs: int) -> list[PlannedFault]:
    """Return a plan in which all kinds of fault are about equally frequent.

    Args:
        faults: Number of faults.
        seed: Seed of the plan; equal seeds give equal plans.
        num_envs: Number of envs to choose from.
    """
    dice = random.Random(seed)  # no secret
    plan: list[PlannedFault] = []
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
                PlannedFault(
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
