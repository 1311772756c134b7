"""Messages of a rollout: orders to workers, and their replies."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from envactors.mailbox.specs import ArraySpec

# Values of `Stop.reason`: why a worker has stopped.
DONE: Final = "done"
NEEDS_POLICY: Final = "needs policy"  # a new process has not made the policy yet
LEARNT: Final = "learnt"  # the policy returned extras or actions that the trajectory has no place for
RAISED: Final = "raised"  # an env raised

# Number of the part of a reply that contains columns of a trajectory. Parts with infos have the numbers of their rows.
COLUMNS: Final = (1 << 32) - 1

# State of an env before its next step: whether the step resets it because its episode has ended; whether its episode
# has ended and nothing resets it; the seed of its next reset (None lets the env choose); the seed that those of later
# episodes are derived from (None if episodes are not seeded); the index of its next episode.
EnvPlan: TypeAlias = "tuple[bool, bool, int | None, int | None, int]"


class Parameters(NamedTuple):
    """Parameters of a policy.

    Attributes:
        version: How often the user has given parameters.
        pickled: The parameters without the contents of their arrays.
        place: Part of the shared memory that contains the arrays; None without arrays.
        spans: Start and end of each array in that part, in bytes.
    """

    version: int
    pickled: bytes
    place: tuple[int, int] | None
    spans: list[tuple[int, int]]


class Order(NamedTuple):
    """An order to a worker: run some steps of a rollout.

    Attributes:
        policy: Id of the policy.
        rollout: Index of the rollout since that policy was set.
        start, stop: First step, and the step after the last one.
        due: Positions of the envs that take the first step; the others have taken it already, or do not take it.
        layout: Pickled `TrajectoryLayout`.
        place: Place of the trajectory in the shared memory.
        parameters: Fields of the `Parameters` that the policy loads first unless it has them; None if the user has
            never given any.
        plans: State of each env before its next step.
        autoreset: What happens at the end of an episode.
        objects: Leaves of each env's last observation that have no place in the trajectory.
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
    """Reply to an order; the number of completed steps is in the trajectory.

    Attributes:
        reason: One of the values above.
        position: Position of the env that raised.
        failure: Fields of the `envactors.mailbox.messages.Failure` of that env.
        learnt: Names and specs, for one env, of the extras that the policy returns.
        action: Spec of one env's action, if the envs have no action space.
    """

    reason: str
    position: int = 0
    failure: tuple[Any, ...] = ()
    learnt: tuple[tuple[str, ArraySpec], ...] = ()
    action: ArraySpec | None = None
