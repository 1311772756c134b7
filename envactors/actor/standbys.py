"""Processes that are started before they are needed: an actor that loses its own takes one of these.

A standby is an actor like any other, watched and restarted by its own supervisor, of which nothing is asked. What is
taken is its process alone, with its channel and all descriptors (`ActorProcess.move`); an `Adopt` in place of a `Start`
says whose it is now. The standby then starts another one in the background.
"""

from __future__ import annotations

import dataclasses

from envactors.actor.config import ActorConfig
from envactors.actor.process import ActorProcess
from envactors.actor.supervisor import Supervisor


class Standbys:
    """The standbys of one vector; their handles keep them alive, not this."""

    def __init__(self) -> None:
        self._members: list[Supervisor] = []

    def make_standby(self, config: ActorConfig) -> Supervisor:
        """Add a standby."""
        standby = Supervisor(dataclasses.replace(config, is_standby=True))
        self._members.append(standby)
        return standby

    def take_standby(self, delay: float) -> ActorProcess | None:
        """Return a process that is ready, None if there is none; see `Launching.give_process`."""
        for standby in self._members:
            process = standby.lifecycle.launching.give_process(delay)
            if process is not None:
                return process
        return None
