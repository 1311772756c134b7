"""The settings of an actor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from envactors.actor.change import ChangeLock
from envactors.actor.permits import Permits
from envactors.backends.base import Backend, RowMemory, Worker
from envactors.crashes.writer import CrashReporter
from envactors.mailbox.messages import Start
from envactors.options import Deadlines, RestartPolicy


@dataclasses.dataclass(eq=False, kw_only=True)
class ActorConfig:
    """The settings of an actor.

    Attributes:
        name: Name in errors and output.
        backend: Starts its workers.
        start: The first message to each worker.
        deadlines: Time limits of its requests.
        restart: Limits of restarts.
        env_vars: Environment variables of its workers.
        memory: The memory of its vector; None for a lone actor.
        lock: The lock, which all actors of a vector share.
        standbys: `Actor.give_process` of each standby whose process it may take; they share its lock.
        is_standby: Whether it only holds a process for others.
        permits: The permits that steps and resets need; None if any number of actors may run.
        is_on_demand: Whether it starts a process only when it is woken, also once it is dead.
        crashes: Leaves its crash bundles; None without ``crash_dir``.
        is_executor: Whether it runs functions in place of envs, for errors.
    """

    name: str
    backend: Backend
    start: Start
    deadlines: Deadlines
    restart: RestartPolicy
    env_vars: Mapping[str, str]
    memory: RowMemory | None = None
    lock: ChangeLock = dataclasses.field(default_factory=ChangeLock)
    standbys: Sequence[Callable[[float], Worker | None]] = ()
    is_standby: bool = False
    permits: Permits | None = None
    is_on_demand: bool = False
    crashes: CrashReporter | None = None
    is_executor: bool = False

    @property
    def first_index(self) -> int:
        """The index of the actor's first env."""
        return self.start.first

    @property
    def env_count(self) -> int:
        """The number of the actor's envs."""
        return len(self.start.factories)

    @property
    def indices(self) -> range:
        """The indices of the actor's envs."""
        return range(self.first_index, self.first_index + self.env_count)
