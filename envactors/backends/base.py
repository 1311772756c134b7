"""What an actor needs of a backend: launch a worker; what it needs of a worker: five things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from envactors.wire.channel import Channel


class ExitStatus(NamedTuple):
    """How a worker ended; both None where nobody can tell."""

    exitcode: int | None
    signal: int | None


class Worker(Protocol):
    """One incarnation of an actor.

    Attributes:
        pid: Its process id.
        channel: The parent's end of its channel, which does not block.
        stdout: A descriptor to read what it prints, which does not block.
        stderr: The same for its standard error.
        sentinel: A descriptor that becomes readable once the worker has ended.
    """

    pid: int
    channel: Channel
    stdout: int
    stderr: int
    sentinel: int

    def kill(self) -> None:
        """Ends it now."""

    def ask_stacks(self) -> None:
        """Asks for the stacks of its threads; the answer takes a moment, or never comes."""

    def stacks(self) -> str:
        """What it has told of its stacks so far."""

    def reap(self) -> ExitStatus:
        """Takes leave of it once the sentinel is readable, and frees all descriptors."""


class Backend(Protocol):
    """A way to start workers."""

    def launch(self, name: str, env_vars: Mapping[str, str]) -> Worker:
        """Starts a worker; called from a thread that lasts as long as any actor does.

        Args:
            name: The actor's name.
            env_vars: Environment variables to set before anything is imported.

        Raises:
            OSError: The system refused.
        """
