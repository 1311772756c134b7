"""Making the actors of a vector, learning what its envs look like, and sharing memory with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, ActorView, close_all
from envactors.actor.permits import Permits
from envactors.actor.process import ActorProcess
from envactors.arrays.slab import Layout, Slab
from envactors.arrays.specs import ArraySpec, batches_alike, leaves
from envactors.backends.base import RowMemory
from envactors.errors import SpaceMismatchError, VectorEnvError
from envactors.vector.env_state import EnvHandle, EnvState
from envactors.wire.factory import Factory
from envactors.wire.info_codec import InfoReader
from envactors.wire.messages import Attach, Describe, Description, Kind


@dataclasses.dataclass
class VectorActors:
    """The actors of a vector and its standbys.

    Attributes:
        launch_alike: Makes an actor with the options of the vector; see `envactors.actor.handle.launch`.
        memory: The memory that their steps may go through; None without any.
        actors: One handle per process.
        envs: One state per env.
        standbys: Actors that hold processes for the others.
    """

    launch_alike: Callable[..., ActorHandle]
    memory: RowMemory | None
    actors: list[ActorHandle] = dataclasses.field(default_factory=list)
    envs: list[EnvState] = dataclasses.field(default_factory=list)
    standbys: list[ActorHandle] = dataclasses.field(default_factory=list)

    def launch(
        self,
        groups: Sequence[list[Factory]],
        env_vars: Sequence[Mapping[str, str] | None],
        standbys: int,
        permits: Permits | None,
    ) -> None:
        """Make an actor per group of factories, which share the permits, and the standbys."""
        # Filled below; read when a process is lost.
        givers: list[Callable[[float], ActorProcess | None]] = []
        shares, largest = len(groups[0]) > 1, groups[0]
        for group, variables in zip(groups, env_vars, strict=True):
            first = len(self.envs)
            name = f"envs-{first}-{first + len(group) - 1}" if shares else f"env-{first}"
            actor = self.launch_alike(
                group, name=name, first=first, env_vars=variables, standbys=givers, permits=permits
            )
            self.actors.append(actor)
            for position in range(len(group)):
                handle: ActorView = EnvHandle(actor._supervisor, actor._lifeline, position) if shares else actor
                self.envs.append(EnvState(first + position, handle))
        for number in range(standbys):
            name, first = f"standby-{number}", -len(largest)
            standby = self.launch_alike(largest, name=name, first=first, env_vars=env_vars[0], is_standby=True)
            givers.append(standby._supervisor.lifecycle.give_process)
            self.standbys.append(standby)

    def close(self, timeout: float | None) -> bool:
        """Close all of them; return whether nothing is left, so that the memory is closed too."""
        actors = [*self.actors, *self.standbys]
        close_all(actors, timeout)
        if not all(actor._supervisor.closed.is_set() for actor in actors):
            return False
        if self.memory is not None:
            self.memory.close()  # until now another process may have been on its way that was to have it
        return True


def describe_envs(envs: Sequence[EnvState]) -> Description:
    """Return what the values of the envs look like.

    Raises:
        ActorStartError: An env could not be made.
        SpaceMismatchError: Their values do not go into one batch.
    """
    futures = [env.handle._submit(Kind.DESCRIBE, Describe(env.position), "describe") for env in envs]
    expected, *others = [Description(*value) for value in results_of(futures)]
    for env_id, other in enumerate(others, 1):
        for what in ("observation", "action", "reward"):
            ours, theirs = getattr(expected, what), getattr(other, what)
            if not batches_alike(ours, theirs):
                raise SpaceMismatchError(
                    f"the {what} spec of env {env_id} is {theirs}: expected that of env 0, {ours}; envs of one vector "
                    "have values of one shape and dtype"
                )
    return expected


def share_rows(
    built: VectorActors, description: Description, *, same_step: bool, seeded: bool
) -> tuple[Slab, InfoReader] | None:
    """Have actors step through shared memory, if they have some and the values of the envs are arrays of fixed shapes.

    Args:
        built: The actors.
        description: What the values look like.
        same_step: Whether an episode that ends is reset within the step.
        seeded: Whether each reset gets the seed that stands in the env's row.

    Returns:
        The rows of all envs and the reader of what comes beside them; None without.
    """
    observation, action, reward, _, _ = description
    if built.memory is None or observation is None or action is None or not isinstance(reward, ArraySpec):
        return None
    if not all(leaf.batchable for leaf in leaves(action)) or not any(leaf.batchable for leaf in leaves(observation)):
        return None
    layout = Layout(observation, action, reward, len(built.envs), seeded)
    try:
        shared = built.memory.create(layout)
    except (OSError, ValueError, OverflowError) as error:
        raise VectorEnvError(
            f"{layout.size} bytes of shared memory for {layout.envs} envs could not be had ({error}): use fewer "
            "envs, give the process more memory, or shared_memory=False"
        ) from error
    results_of([actor._supervisor.attach(Attach(layout, same_step)) for actor in built.actors])
    return shared


def results_of(futures: Sequence[ActorFuture]) -> list[Any]:
    """Return the results of all; if some failed, wait for all and raise the first failure."""
    for future in futures:
        future.exception()
    return [future.result() for future in futures]
