"""The settings of an actor.

A standby is an ordinary actor that gets no requests. Its own supervisor watches and restarts it. Another actor takes
only its process, with the channel and all descriptors (`ActorProcess.move`), and sends an `Adopt` in place of a
`Start`. The standby then starts another process in the background.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from envactors.actor.permits import Permits
from envactors.actor.process import ActorProcess
from envactors.actor.requests import CallIds
from envactors.backends.base import Backend, RowMemory
from envactors.mailbox.messages import Start
from envactors.options import Deadlines, RestartPolicy
from envactors.system.cpus import STORES_IN_ORDER


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """The settings of an actor.

    Attributes:
        name: For errors and output.
        backend: Starts its workers.
        start: The first message of each worker.
        deadlines: How long things may take.
        restart: When a lost process is replaced.
        env_vars: Environment variables of its workers.
        memory: The memory that batch steps go through; None without it.
        max_journal: How many steps of each env are kept for a replay; None keeps none.
        save_every: How many steps after another the state of an env is saved, if its steps are kept; None for never.
        standbys: Each returns the process of a standby for an actor that has lost its own, or None; see
            `Lifecycle.give_process`.
        is_standby: Whether the actor only holds a process for others.
        permits: What its steps and resets need to run; None if any number may.
        lock: The lock that the actors and standbys of a vector share: none waits for that of another while it holds its
            own. None for an actor with its own.
        ids: Where its call ids come from; shared likewise.
    """

    name: str
    backend: Backend
    start: Start
    deadlines: Deadlines
    restart: RestartPolicy
    env_vars: Mapping[str, str]
    memory: RowMemory | None = None
    max_journal: int | None = None
    save_every: int | None = None
    standbys: Sequence[Callable[[float], ActorProcess | None]] = ()
    is_standby: bool = False
    permits: Permits | None = None
    lock: threading.RLock | None = None
    ids: CallIds = dataclasses.field(default_factory=CallIds)

    @property
    def spin(self) -> bool:
        """Whether caller and worker may spin before they sleep: only where stores keep their order."""
        return self.backend.spin and STORES_IN_ORDER

    @property
    def first_index(self) -> int:
        """The index of the actor's first env."""
        return self.start.first
