"""The worker's half of rollouts: carry out orders, in which the policy and the envs alternate.

An output of the policy may have no room in the trajectory, as the first one of a policy with extras. Then the worker
keeps it, and replies with the layout that it needs. The caller adds the memory, and the next order continues with the
output, so that the policy is not called again. Only after a crash, the next process calls it again for the step whose
actions were not written.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

from envactors.mailbox.control_page import METHOD_CALL, METHOD_POLICY, TIMED
from envactors.rollout.env_runner import EnvRunner
from envactors.rollout.messages import MOST_IN_FLIGHT, Order, OrderReply, Parameters, PolicyRecipe
from envactors.rollout.policy import ActorPolicy
from envactors.rollout.trajectory import RegionPlaces, Trajectory
from envactors.worker.main import Server

# How many trajectories and regions of parameters stay open. Without copies, two rollouts may be in flight while the
# user keeps two results. Only rollouts in flight need their parameters.
_MOST_TRAJECTORIES = MOST_IN_FLIGHT + 2
_MOST_PARAMETERS = MOST_IN_FLIGHT


def set_policy(server: Server, recipe: PolicyRecipe) -> bool:
    """Make the policy in this worker; return whether it can load parameters."""
    server.page.record_env(METHOD_CALL, 0)
    runner = PolicyRunner(server, recipe)
    server.extension = runner
    return runner.policy.can_load


def run_rollout(server: Server, *fields: Any) -> tuple[Any, ...]:
    """Carry out an order, given as the fields of `Order`; return the fields of an `OrderReply`."""
    order = Order(*fields)
    if order.recipe is not None:
        set_policy(server, order.recipe)
    runner: PolicyRunner | None = server.extension
    if runner is None or runner.policy_id != order.policy_id:
        return tuple(OrderReply(must_make_policy=True))
    return tuple(runner.run(order))


class PolicyRunner:
    """Runs the policy of one worker in its rollouts; `EnvRunner` runs the envs.

    Args:
        server: The worker's server.
        recipe: Recipe of the policy.

    Attributes:
        policy_id: Id of the policy.
        policy: The policy.
    """

    def __init__(self, server: Server, recipe: PolicyRecipe) -> None:
        hosted = server.host.hosted_envs
        self.policy_id: int = recipe.policy_id
        indices = range(hosted[0].index, hosted[0].index + len(hosted))
        self.policy: ActorPolicy = ActorPolicy(recipe.pickled, recipe.seed, indices)
        self._server = server
        self._env_runner_at = functools.lru_cache(_MOST_TRAJECTORIES)(self._open_trajectory)
        self._parameters_at = functools.lru_cache(_MOST_PARAMETERS)(functools.partial(self._open, writable=False))
        # The index of the rollout, the step, and the output of the policy that the trajectory had no room for.
        self._output_without_room: tuple[int, int, Any] | None = None

    def run(self, order: Order) -> OrderReply:
        """Carry out an order.

        Raises:
            BaseException: Raised by the policy, because of its output, or by unpickling what the order contains.
        """
        page, policy = self._server.page, self.policy
        if order.parameters is not None and order.parameters.version != policy.version:
            self._load(order.parameters)
        env_runner = self._env_runner_at(order.places, order.pickled_layout)
        kept, self._output_without_room = self._output_without_room, None
        policy.rollout_index = order.rollout_index
        page.is_timing = page.counters[TIMED] != 0
        try:
            for step, obs, starts in env_runner.run(order):
                if kept is not None and kept[:2] == (order.rollout_index, step):
                    output = kept[2]
                else:
                    page.record_env(METHOD_POLICY, 0)
                    output = policy.choose(step, obs, starts)
                if (needed_layout := env_runner.write_output(step, output)) is not None:
                    self._output_without_room = order.rollout_index, step, output
                    return OrderReply(needed_layout=needed_layout)
            return OrderReply()
        finally:
            page.is_timing = False

    def _load(self, parameters: Parameters) -> None:
        """Have the policy load parameters. Their arrays are read-only views of the shared memory."""
        region = b"" if parameters.place is None else self._parameters_at(parameters.place)
        arrays = [region[start:stop] for start, stop in parameters.spans]
        self._server.page.record_env(METHOD_POLICY, 0)
        self.policy.load(parameters.version, parameters.pickled, arrays)

    # The shared memory -----------------------------------------------------------------------------------

    def _open_trajectory(self, places: RegionPlaces, layout: bytes) -> EnvRunner:
        regions = [None if place is None else self._open(place, writable=True) for place in places]
        return EnvRunner(Trajectory(pickle.loads(layout), regions), self._server, self.policy.indices)

    def _open(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        assert self._server.memory is not None, "envs of a vector have memory"
        return self._server.memory.open_region(place, writable=writable)
