"""What an actor with processes and an in-process actor have in common."""

from __future__ import annotations

import os

from envactors import runtime as runtimes
from envactors.actor.config import ActorConfig
from envactors.actor.error_factory import ErrorFactory
from envactors.actor.incarnation import Incarnation
from envactors.actor.latch import Latch
from envactors.errors import ActorClosedError, ActorError
from envactors.mailbox.control_page import ControlPage
from envactors.runtime import Runtime


class ActorBase:
    """Base class of actors.

    Args:
        config: The settings of the actor.

    Attributes:
        config: As above.
        errors: Makes its errors.
        runtime: The threads that serve it, once it has begun.
        closed: Opened once nothing of the actor is left.
        incarnation: The current process, the one that is starting, or the last one.
        last_crash: The error of the last exit of a process: the reason why an episode was lost.
    """

    runtime: Runtime

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.errors: ErrorFactory = ErrorFactory(config)
        self.closed: Latch = Latch()
        self.incarnation: Incarnation = Incarnation(0)
        self.last_crash: ActorError | None = None
        self._owner_pid, self._forks = os.getpid(), runtimes.forks

    @property
    def name(self) -> str:
        """The name of the actor."""
        return self.config.name

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        raise NotImplementedError

    @property
    def page(self) -> ControlPage | None:
        """The control page of the process; None while there is no process."""
        raise NotImplementedError

    def check_owner(self) -> None:
        """Raise in a forked process, which must not use the actors of its parent.

        Raises:
            ActorClosedError: This is not the process that made the actor.
        """
        if runtimes.forks != self._forks:
            where = f"process {self._owner_pid} and this is its fork {os.getpid()}"
            raise ActorClosedError(
                f"actor {self.name!r} belongs to {where}: make an actor here, or call it there", actor=self.name
            )
