"""The messages of a rollout: orders to workers, and their replies."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from envactors.mailbox.specs import ArraySpec

# Why a worker has stopped; the values of `Stop.reason`.
DONE: Final = "done"
NEEDS_POLICY: Final = "needs policy"  # its process is new
LEARNT: Final = "learnt"  # what the policy returns beside the actions, for which the trajectory has no place
RAISED: Final = "raised"  # an env has raised

# The number of the part of a reply that holds columns of a trajectory; those with infos have the numbers of their rows.
COLUMNS: Final = (1 << 32) - 1

# The state of an env before its next step: whether that step resets it, as its episode has ended; whether the episode
# has ended and nothing resets it; the seed of its next reset, None to let the env choose; the seed that those of later
# episodes are derived from, None if episodes are not seeded; the number of the next episode.
EnvPlan: TypeAlias = "tuple[bool, bool, int | None, int | None, int]"


class Parameters(NamedTuple):
    """Parameters of a policy.

    Attributes:
        version: How often parameters were given.
        pickled: What they are, without the arrays.
        place: The part of the memory that has the arrays; None if there are none.
        spans: Where each of the arrays begins and ends in it.
    """

    version: int
    pickled: bytes
    place: tuple[int, int] | None
    spans: list[tuple[int, int]]


class Order(NamedTuple):
    """An order to a worker: some steps of a rollout.

    Attributes:
        policy: The number of the policy.
        rollout: The number of the rollout since that policy was set.
        start, stop: Which steps.
        due: The positions of the envs that take the first of these steps; the others have taken it, or do not.
        layout: What the trajectory looks like: a pickled `TrajectoryLayout`.
        place: Where it is.
        parameters: The fields of the `Parameters` that the policy is to load first, if it has not; None if none were
            ever given.
        plans: The state of each env before its next step.
        autoreset: What happens at the end of an episode.
        objects: The leaves of each env's last observation that have no place in the trajectory.
    """

    policy: int
    rollout: int
    start: int
    stop: int
    due: tuple[int, ...]
    layout: bytes
    place: tuple[int, int]
    parameters: tuple[Any, ...] | None
    plans: list[EnvPlan]
    autoreset: str
    objects: list[list[Any]]


class Stop(NamedTuple):
    """How an order ended; the trajectory says how many steps were taken.

    Attributes:
        reason: One of the values above.
        position: The position of the env that has raised.
        failure: What it has raised: the fields of a `envactors.mailbox.messages.Failure`.
        learnt: What the policy returns beside the actions, by name, for one env.
        action: One env's action, if that was to be learnt.
    """

    reason: str
    position: int = 0
    failure: tuple[Any, ...] = ()
    learnt: tuple[tuple[str, ArraySpec], ...] = ()
    action: ArraySpec | None = None
