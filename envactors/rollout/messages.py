"""Messages of a rollout: orders to workers, and their replies.

Orders travel as the arguments of an `envactors.mailbox.messages.Extend`. Everything that each rollout sends is taken
apart into bare tuples, which are pickled in half of the time: an `Order`, the `envactors.rollout.env_plan.EnvPlan` of
each env, and an `OrderReply`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from envactors.mailbox import bundle
from envactors.mailbox.messages import Failure
from envactors.rollout.trajectory import RegionPlaces, Trajectory, TrajectoryLayout

# Key of the piece of a reply that contains steps of a trajectory. Pieces with infos have the numbers of their cells.
STEPS: Final = (1 << 32) - 1


class MirroredSteps(NamedTuple):
    """The steps of a trajectory that a worker on another machine writes; see `envactors.backends.base.MirroredPart`.

    Attributes:
        places: Places of the regions of the trajectory in the shared memory.
        layout: Pickled `TrajectoryLayout`.
        envs: Indices of the worker's envs.
        first_step: First step.
    """

    places: RegionPlaces
    layout: bytes
    envs: range
    first_step: int

    def write(self, regions: Sequence[memoryview | None], content: bytes | memoryview) -> None:
        """Write the first step, as far as the caller has it."""
        self._trajectory(regions).unpack(self.envs, content)

    def read(self, regions: Sequence[memoryview | None]) -> bytes | bytearray:
        """Return the steps that the worker has written."""
        return bundle.pack([(STEPS, self._trajectory(regions).pack(self.envs, self.first_step))])

    def _trajectory(self, regions: Sequence[memoryview | None]) -> Trajectory:
        return Trajectory(pickle.loads(self.layout), regions)


class PolicyRecipe(NamedTuple):
    """What makes a policy: its id within the vector, a pickled function, and the seed of its random numbers."""

    policy_id: int
    pickled: bytes
    seed: int


class Parameters(NamedTuple):
    """Parameters of a policy.

    Attributes:
        version: How often the user had given parameters since the policy was set, with these.
        pickled: The parameters without the contents of their arrays.
        place: Part of the shared memory that contains the arrays; None without arrays.
        spans: Start and end of each array in that part, in bytes.
    """

    version: int
    pickled: bytes
    place: tuple[int, int] | None
    spans: list[tuple[int, int]]


class Order(NamedTuple):
    """An order to a worker: run the steps of a rollout that are left.

    Attributes:
        policy_id: Id of the policy.
        recipe: Recipe of the policy to make first; None if the worker should have made it.
        rollout_index: Index of the rollout since the policy was set.
        first_step: First step that an env takes.
        layout: Pickled `TrajectoryLayout`.
        places: Places of the regions of the trajectory in the shared memory.
        parameters: Parameters that the policy loads first unless it has them; None if there are none.
        plans: Fields of the `EnvPlan` of each env.
        last_leaves: The encoded info and object leaves of each env's last observation (None without any); empty if all
            leaves have arrays.
    """

    policy_id: int
    recipe: PolicyRecipe | None
    rollout_index: int
    first_step: int
    layout: bytes
    places: RegionPlaces
    parameters: Parameters | None
    plans: list[tuple[Any, ...]]
    last_leaves: list[bytes | None]


class OrderReply(NamedTuple):
    """Reply to an order; the number of completed steps is in the trajectory.

    Attributes:
        lacks_policy: Whether this process has not made the policy of the order.
        position: Position of the env that raised.
        failure: How it raised; None if none has.
        layout: The layout that has room for the actions and extras that the policy returned; None if the trajectory
            has.
    """

    lacks_policy: bool = False
    position: int = 0
    failure: Failure | None = None
    layout: TrajectoryLayout | None = None
