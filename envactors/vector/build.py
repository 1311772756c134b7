"""Make the actors of a vector and the handles of its envs, ask for specs, and share memory with them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from envactors.actor.future import results_of
from envactors.actor.handle import ActorHandle, ActorView, close_all
from envactors.actor.launch import launch
from envactors.actor.permits import Permits
from envactors.actor.process import ActorProcess
from envactors.actor.requests import CallIds
from envactors.actor.slots import Op, Slot, Slots
from envactors.backends.base import Backend, RowMemory
from envactors.errors import SpaceMismatchError, VectorEnvError, VectorInputError
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Attach, Describe, Description, Kind
from envactors.mailbox.slab import Layout
from envactors.mailbox.specs import OBJECT, ArraySpec, batches_alike, leaves
from envactors.vector.options import Choices


class EnvHandle(ActorView):
    """Handle of one of several envs that share a process: its methods and attributes, but not the process."""

    __slots__ = ()

    def renew(self) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse("renew()")

    def kill(self, *, restart: bool = False) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse(f"kill(restart={restart})")

    def close(self, timeout: float | None = None) -> NoReturn:
        """Raise, since this would end the other envs of the process."""
        self._refuse(f"close({timeout})")

    def _refuse(self, call: str) -> NoReturn:
        raise VectorInputError(
            f"cannot call {call} through the handle of env {self._supervisor.config.first_index + self._env}, which "
            f"shares its process with other envs: use envs.actors[j].{call} for all of {self.name!r}, "
            "or make the vector with envs_per_actor=1"
        )


class VectorActors:
    """The actors of a vector and its standbys.

    Args:
        choices: Options of the vector.
        backend: Starts the workers.

    Attributes:
        memory: The memory of their rows.
        actors: One handle per process.
        handles: One handle per env.
        standbys: Actors that hold processes for the others.
    """

    def __init__(self, choices: Choices, backend: Backend) -> None:
        self.memory: RowMemory = backend.make_memory()
        self.actors: list[ActorHandle] = []
        self.handles: list[ActorView] = []
        self.standbys: list[ActorHandle] = []
        self._choices = choices
        self._backend = backend

    def launch(
        self, groups: Sequence[list[Factory]], env_vars: Sequence[Mapping[str, str] | None], permits: Permits | None
    ) -> None:
        """Launch one actor per group of factories, and the standbys."""
        choices, backend = self._choices, self._backend
        launch_alike = functools.partial(
            launch,
            backend=backend,
            deadlines=choices.deadlines,
            restart=choices.restart,
            memory=self.memory,
            lock=threading.RLock(),
            ids=CallIds(),
            # Only actors with a process can be lost.
            max_journal=choices.max_journal if choices.on_failure == "replay" and backend.kills else None,
            seed_episodes=choices.seed_episodes,
            snapshot=choices.snapshot,
        )
        # Filled below, and read when an actor needs another process.
        givers: list[Callable[[float], ActorProcess | None]] = []
        shares, largest = len(groups[0]) > 1, groups[0]
        for group, variables in zip(groups, env_vars, strict=True):
            first = len(self.handles)
            name = f"envs-{first}-{first + len(group) - 1}" if shares else f"env-{first}"
            actor = launch_alike(group, name=name, first=first, env_vars=variables, standbys=givers, permits=permits)
            self.actors.append(actor)
            parts = actor._supervisor, actor._lifeline
            envs = [EnvHandle(*parts, position, _is_shared=True) for position in range(len(group))]
            self.handles += envs if shares else [actor]
        for number in range(choices.standbys):
            name, first = f"standby-{number}", -len(largest)
            standby = launch_alike(largest, name=name, first=first, env_vars=env_vars[0], is_standby=True)
            givers.append(standby._supervisor.lifecycle.give_process)
            self.standbys.append(standby)
        first_actor = self.actors[0]._supervisor
        for method in ("step", "reset"):
            first_actor.core.warn_of_deadline(first_actor.config.deadlines.of(method))

    def describe_envs(self) -> Description:
        """Return the specs and metadata of the envs.

        Raises:
            ActorStartError: An env could not be made.
            SpaceMismatchError: The specs differ, so that values of different envs cannot be batched.
        """
        futures = [handle._submit(Kind.DESCRIBE, Describe(handle._env), "describe") for handle in self.handles]
        expected, *others = [Description(*value) for value in results_of(futures)]
        for env_id, other in enumerate(others, 1):
            for what in ("observation", "action", "reward"):
                ours, theirs = getattr(expected, what), getattr(other, what)
                if not batches_alike(ours, theirs):
                    raise SpaceMismatchError(
                        f"the {what} spec of env {env_id} is {theirs}: expected that of env 0, {ours}; envs of one "
                        "vector have values of one shape and dtype"
                    )
        return expected

    def make_slots(self, description: Description) -> Slots:
        """Create the rows and slots of all envs.

        Raises:
            VectorEnvError: There is not enough memory.
        """
        observation, action, reward, _, _ = description
        is_plain = isinstance(reward, ArraySpec) and reward.batchable
        has_actions = action is not None and all(leaf.batchable for leaf in leaves(action))
        layout = Layout(
            OBJECT if observation is None else observation,
            action if has_actions else None,
            reward if is_plain else None,
            len(self.handles),
        )
        try:
            slab, infos = self.memory.create(layout)
        except (OSError, ValueError, OverflowError) as error:
            raise VectorEnvError(
                f"cannot allocate {layout.size} bytes of shared memory for {layout.envs} envs ({error}): use fewer "
                "envs, or give the process more memory"
            ) from error
        of = [Slot(index, handle._env) for index, handle in enumerate(self.handles)]
        choices = self._choices
        return Slots(of, slab, infos, choices.autoreset, choices.on_failure, pickles=self._backend.pickles)

    def attach(self, slots: Slots, waiter: object, read: Callable[[int, Op], None]) -> None:
        """Have all actors use the rows of their envs; for the arguments see `Supervisor.attach`."""
        attach = Attach(slots.slab.layout, slots.autoreset == "same_step")
        results_of([actor._supervisor.attach(attach, slots, waiter, read) for actor in self.actors])

    def close(self, timeout: float | None) -> bool:
        """Close all actors, and then the memory; return False if some are still closing."""
        actors = [*self.actors, *self.standbys]
        close_all(actors, timeout)
        if not all(actor._supervisor.closed.is_set() for actor in actors):
            return False
        self.memory.close()  # not earlier: a process that was still starting may have needed it
        return True
