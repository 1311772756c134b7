"""Making the actors of a vector, learning what its envs look like, and sharing memory with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, ActorView, launch
from envactors.actor.process import ActorProcess
from envactors.arrays.slab import Layout, Slab
from envactors.arrays.specs import ArraySpec, batches_alike, leaves
from envactors.backends.base import Backend, RowMemory
from envactors.errors import SpaceMismatchError, VectorEnvError
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.env_state import EnvState
from envactors.vector.handle import EnvHandle
from envactors.wire.info_codec import InfoReader
from envactors.wire.messages import Attach, Describe, Description, Kind


class VectorActors:
    """The actors of a vector and its standbys.

    Args:
        backend: Where they live.
        deadlines: How long things may take.
        restart: When a lost process is replaced.
        memory: The memory that their steps may go through.
        max_journal: How many steps of each env are kept for a replay; None keeps none.

    Attributes:
        actors: One handle per process.
        envs: One state per env.
        standbys: Actors that hold processes for the others.
    """

    def __init__(
        self,
        backend: Backend,
        deadlines: Deadlines,
        restart: RestartPolicy,
        memory: RowMemory | None,
        max_journal: int | None,
    ) -> None:
        self.backend = backend
        self.memory = memory
        self.actors: list[ActorHandle] = []
        self.envs: list[EnvState] = []
        self.standbys: list[ActorHandle] = []
        self._launch_alike = functools.partial(
            launch, backend=backend, deadlines=deadlines, restart=restart, memory=memory, max_journal=max_journal
        )

    def launch(
        self,
        groups: Sequence[list[Callable[[], Any]]],
        env_vars: Sequence[Mapping[str, str] | None],
        standbys: int,
    ) -> None:
        """Make an actor per group of factories, and the standbys."""
        # Filled below; read when a process is lost.
        givers: list[Callable[[float], ActorProcess | None]] = []
        shares, largest = len(groups[0]) > 1, groups[0]
        for group, variables in zip(groups, env_vars, strict=True):
            first = len(self.envs)
            name = f"envs-{first}-{first + len(group) - 1}" if shares else f"env-{first}"
            actor = self._launch_alike(group, name=name, first=first, env_vars=variables, standbys=givers)
            self.actors.append(actor)
            self.envs += _env_states(actor, first, len(group), shares=shares)
        for number in range(standbys):
            name, first = f"standby-{number}", -len(largest)
            standby = self._launch_alike(largest, name=name, first=first, env_vars=env_vars[0], is_standby=True)
            givers.append(standby._supervisor.lifecycle.give_process)
            self.standbys.append(standby)

    def release(self) -> None:
        """Free what the actors shared, once all of them have ended."""
        if self.memory is not None:
            self.memory.close()


def _env_states(actor: ActorHandle, first: int, count: int, *, shares: bool) -> list[EnvState]:
    supervisor = actor._supervisor
    states = []
    for position in range(count):
        handle: ActorView = EnvHandle(supervisor, actor._lifeline, position) if shares else actor
        states.append(EnvState(first + position, handle, supervisor, position))
    return states


def describe_envs(envs: Sequence[EnvState]) -> Description:
    """Return what the values of the envs look like.

    Raises:
        ActorStartError: An env could not be made.
        SpaceMismatchError: Their values do not go into one batch.
    """
    futures = []
    for env in envs:
        future = ActorFuture(env.supervisor, env.handle._lifeline)
        env.supervisor.submit_call(Kind.DESCRIBE, Describe(env.position), future, "describe", env.position)
        futures.append(future)
    descriptions = [Description(*value) for value in results_of(futures)]
    expected = descriptions[0]
    for i, other in enumerate(descriptions):
        for what in ("observation", "action", "reward"):
            ours, theirs = getattr(expected, what), getattr(other, what)
            if not batches_alike(ours, theirs):
                raise SpaceMismatchError(
                    f"the {what} spec of env {i} is {theirs}: expected that of env 0, {ours}; envs of one vector "
                    "have values of one shape and dtype"
                )
    return expected


def share_rows(built: VectorActors, description: Description, *, same_step: bool) -> tuple[Slab, InfoReader] | None:
    """Have actors step through shared memory, if they have some and the values of the envs are arrays of fixed shapes.

    Args:
        built: The actors.
        description: What the values of the envs look like.
        same_step: Whether an episode that ends is reset within the step.

    Returns:
        The rows of all envs and the reader of what comes beside them; None without.

    Raises:
        VectorEnvError: There is not enough memory.
    """
    if built.memory is None:
        return None
    observation, action, reward = description.observation, description.action, description.reward
    if observation is None or action is None or not isinstance(reward, ArraySpec):
        return None
    if not all(leaf.batchable for leaf in leaves(action)) or not any(leaf.batchable for leaf in leaves(observation)):
        return None
    count = len(built.envs)
    layout = Layout(observation, action, reward, count)
    try:
        rows, infos = built.memory.create(layout)
    except (OSError, ValueError, OverflowError) as error:
        raise VectorEnvError(
            f"{layout.size} bytes of shared memory for {count} envs could not be had ({error}): use fewer "
            "envs, give the process more memory, or shared_memory=False"
        ) from error
    attach = Attach(layout, same_step)
    results_of([actor._supervisor.attach(attach) for actor in built.actors])
    return rows, infos


def results_of(futures: Sequence[ActorFuture]) -> list[Any]:
    """Return the results of all; if some failed, wait for all and raise the first failure."""
    failures = [future.exception() for future in futures]
    for failure in failures:
        if failure is not None:
            raise failure
    return [future.result() for future in futures]
