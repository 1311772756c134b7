"""Messages of a rollout: orders to workers, and their replies.

Orders travel as the arguments of an `envactors.mailbox.messages.Extend`. An `Order`, the plans in it, and an
`OrderReply` are pickled as bare tuples of their fields, since that takes half of the time, and every rollout sends
some.

The caller receives a reply as a frame, perhaps after *pieces* of it: infos that did not fit into the trajectory, the
exceptions of envs and, from another machine, the steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from envactors.mailbox import packing
from envactors.rollout.trajectory import RegionPlaces, Trajectory, TrajectoryLayout

# Most rollouts of a vector in flight.
MOST_IN_FLIGHT: Final = 2
# Keys of pieces with steps, and with the position, the step, and the failure of an env that has raised. The key of a
# piece with an info is its cell; see `Trajectory.cell`.
STEPS: Final = (1 << 32) - 1
RAISED: Final = (1 << 32) - 2


class MirroredSteps(NamedTuple):
    """The steps of a trajectory that a worker on another machine writes; see `envactors.backends.base.MirroredPart`.

    Attributes:
        places: Places of the regions of the trajectory in the shared memory.
        pickled_layout: Pickled `TrajectoryLayout`.
        indices: Indices of the worker's envs.
        first_step: First step.
    """

    places: RegionPlaces
    pickled_layout: bytes
    indices: range
    first_step: int

    def write(self, regions: Sequence[memoryview | None], content: bytes | memoryview) -> None:
        """Write the observations before the first step, and the steps that some envs are ahead by."""
        self._trajectory(regions).unpack(self.indices, content)

    def read(self, regions: Sequence[memoryview | None]) -> bytes | bytearray:
        """Return the steps that the worker has written."""
        return packing.pack([(STEPS, self._trajectory(regions).pack(self.indices, self.first_step))])

    def _trajectory(self, regions: Sequence[memoryview | None]) -> Trajectory:
        return Trajectory(pickle.loads(self.pickled_layout), regions)


class PolicyRecipe(NamedTuple):
    """A policy to make: its id within the vector, its pickled function, and the seed of its random numbers."""

    policy_id: int
    pickled: bytes
    seed: int


class Parameters(NamedTuple):
    """Parameters of a policy.

    Attributes:
        version: How often the user has given parameters since the policy was set. The first ones have version 1.
        pickled: The parameters without the contents of their arrays.
        place: Place of the region of the shared memory that contains the arrays; None without arrays.
        spans: Start and end of each array in that region, in bytes.
    """

    version: int
    pickled: bytes
    place: tuple[int, int] | None
    spans: list[tuple[int, int]]


class Order(NamedTuple):
    """An order to a worker: run the steps of a rollout that are left.

    Attributes:
        policy_id: Id of the policy.
        recipe: Recipe of the policy, which the worker makes first; None if it should have the policy already.
        rollout_index: Index of the rollout since the policy was set.
        pickled_layout: Pickled `TrajectoryLayout`.
        places: Places of the regions of the trajectory in the shared memory.
        parameters: Parameters that the policy loads first unless it has them; None if there are none.
        plans: Fields of the `EnvPlan` of each env.
        last_contents: The encoded info and object leaves of each env's last observation (None without any); empty if
            all leaves have arrays.
    """

    policy_id: int
    recipe: PolicyRecipe | None
    rollout_index: int
    pickled_layout: bytes
    places: RegionPlaces
    parameters: Parameters | None
    plans: list[tuple[Any, ...]]
    last_contents: list[bytes | None]


class OrderReply(NamedTuple):
    """Reply to an order; the number of completed steps is in the trajectory.

    Attributes:
        must_make_policy: Whether the worker did nothing, since its process lacks the policy and got no recipe.
        needed_layout: The layout to make room for, since the trajectory has no room for the actions or extras that the
            policy returned; None if it has.
    """

    must_make_policy: bool = False
    needed_layout: TrajectoryLayout | None = None
