"""Make the actors of a vector, ask for the specs of their envs, and share memory with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle, ActorView, close_all
from envactors.actor.launch import launch
from envactors.actor.permits import Permits
from envactors.actor.process import ActorProcess
from envactors.actor.slots import Autoreset, OnFailure, Op, Slot, Slots
from envactors.backends.base import Backend, RowMemory
from envactors.errors import SpaceMismatchError, VectorEnvError
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Attach, Describe, Description, Kind
from envactors.mailbox.slab import Layout
from envactors.mailbox.specs import OBJECT, ArraySpec, batches_alike, leaves
from envactors.vector.env_handles import EnvHandle
from envactors.vector.options import Choices
from envactors.vector.pending import Pending


@dataclasses.dataclass
class VectorActors:
    """The actors of a vector and its standbys.

    Attributes:
        launch_alike: Makes an actor with the options of the vector; see `envactors.actor.launch.launch`.
        memory: The memory of their rows.
        actors: One handle per process.
        handles: One handle per env.
        standbys: Actors that hold processes for the others.
    """

    launch_alike: Callable[..., ActorHandle]
    memory: RowMemory
    actors: list[ActorHandle] = dataclasses.field(default_factory=list)
    handles: list[ActorView] = dataclasses.field(default_factory=list)
    standbys: list[ActorHandle] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, choices: Choices, backend: Backend) -> VectorActors:
        """Return the actors of a vector, before any is launched."""
        memory = backend.make_memory()
        # Only actors with a process can be lost.
        journal = choices.max_journal if choices.on_failure == "replay" and backend.kills else None
        launch_alike = functools.partial(
            launch,
            backend=backend,
            deadlines=choices.deadlines,
            restart=choices.restart,
            memory=memory,
            max_journal=journal,
            seed_episodes=choices.seed_episodes,
            snapshot=choices.snapshot,
        )
        return cls(launch_alike, memory)

    def launch(
        self,
        groups: Sequence[list[Factory]],
        env_vars: Sequence[Mapping[str, str] | None],
        standbys: int,
        permits: Permits | None,
    ) -> None:
        """Launch one actor per group of factories, and the standbys."""
        # Filled below, and read when an actor needs another process.
        givers: list[Callable[[float], ActorProcess | None]] = []
        shares, largest = len(groups[0]) > 1, groups[0]
        for group, variables in zip(groups, env_vars, strict=True):
            first = len(self.handles)
            name = f"envs-{first}-{first + len(group) - 1}" if shares else f"env-{first}"
            actor = self.launch_alike(
                group, name=name, first=first, env_vars=variables, standbys=givers, permits=permits
            )
            self.actors.append(actor)
            for position in range(len(group)):
                handle: ActorView = EnvHandle(actor._supervisor, actor._lifeline, position) if shares else actor
                self.handles.append(handle)
        for number in range(standbys):
            name, first = f"standby-{number}", -len(largest)
            standby = self.launch_alike(largest, name=name, first=first, env_vars=env_vars[0], is_standby=True)
            givers.append(standby._supervisor.lifecycle.give_process)
            self.standbys.append(standby)

    def close(self, timeout: float | None) -> bool:
        """Close all actors, and then the memory; return False if some are still closing."""
        actors = [*self.actors, *self.standbys]
        close_all(actors, timeout)
        if not all(actor._supervisor.closed.is_set() for actor in actors):
            return False
        self.memory.close()  # not earlier: a process that was still starting may have needed it
        return True


def describe_envs(handles: Sequence[ActorView]) -> Description:
    """Return the specs and metadata of the envs.

    Raises:
        ActorStartError: An env could not be made.
        SpaceMismatchError: The specs differ, so that values of different envs cannot be batched.
    """
    futures = [handle._submit(Kind.DESCRIBE, Describe(handle._env), "describe") for handle in handles]
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
    built: VectorActors, description: Description, autoreset: Autoreset, on_failure: OnFailure
) -> tuple[Slots, Pending, Callable[[Callable[[int, Op], None]], None]]:
    """Create the rows and slots of all envs.

    Args:
        built: The actors.
        description: Specs of the envs.
        autoreset: What happens at the end of an episode.
        on_failure: What happens after a failure.

    Returns:
        The slots; the results that are not delivered yet; and a function that attaches the actors to the rows, given a
        function that reads the outcome of an env for its future.

    Raises:
        VectorEnvError: There is not enough memory.
    """
    observation, action, reward, _, _ = description
    is_plain = isinstance(reward, ArraySpec) and reward.batchable
    has_actions = action is not None and all(leaf.batchable for leaf in leaves(action))
    count = len(built.handles)
    layout = Layout(
        OBJECT if observation is None else observation,
        action if has_actions else None,
        reward if is_plain else None,
        count,
    )
    try:
        slab, infos = built.memory.create(layout)
    except (OSError, ValueError, OverflowError) as error:
        raise VectorEnvError(
            f"cannot allocate {layout.size} bytes of shared memory for {layout.envs} envs ({error}): use fewer "
            "envs, or give the process more memory"
        ) from error
    pickles = built.actors[0]._supervisor.config.backend.pickles
    of = [Slot(index, handle._env) for index, handle in enumerate(built.handles)]
    slots = Slots(of, slab, infos, autoreset, on_failure, pickles=pickles)
    pending = Pending(slots)
    attach = Attach(layout, autoreset == "same_step")

    def use(read: Callable[[int, Op], None]) -> None:
        results_of([actor._supervisor.attach(attach, slots, pending, read) for actor in built.actors])

    return slots, pending, use


def results_of(futures: Sequence[ActorFuture]) -> list[Any]:
    """Wait for all futures, then return their results or raise the first failure."""
    for future in futures:
        future.exception()
    return [future.result() for future in futures]
