"""The settings of an actor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from envactors.actor.change import ChangeLock
from envactors.backends.base import Backend, RowMemory
from envactors.mailbox.messages import Start
from envactors.options import Deadlines, RestartPolicy


@dataclasses.dataclass(frozen=True)
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
    """

    name: str
    backend: Backend
    start: Start
    deadlines: Deadlines
    restart: RestartPolicy
    env_vars: Mapping[str, str]
    memory: RowMemory | None = None
    lock: ChangeLock = dataclasses.field(default_factory=ChangeLock)

    @property
    def first_index(self) -> int:
        """The index of the actor's first env."""
        return self.start.first
