"""What an actor needs of a backend, and of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from envactors.wire.board import Board
from envactors.wire.messages import Frame

Stream = Literal["stdout", "stderr"]


class ExitStatus(NamedTuple):
    """How a worker ended; both None where nobody can tell."""

    exitcode: int | None
    signal: int | None


class ParentChannel(Protocol):
    """The parent's end of a channel; see `envactors.wire.channel.Channel`."""

    def fileno(self) -> int:
        """Something to wait for."""

    @property
    def backlog(self) -> bool:
        """Whether something still waits to be written."""

    def unread(self) -> bool:
        """Whether the worker has left something unread that was sent to it."""

    def send(self, frame: Frame) -> None:
        """Writes a frame, or as much of it as fits."""

    def flush(self) -> None:
        """Writes what is left."""

    def receive(self) -> list[Frame] | None:
        """Reads once and gives what is complete; None at the end, BlockingIOError when nothing is there."""


class Worker(Protocol):
    """One incarnation of an actor."""

    @property
    def pid(self) -> int:
        """The process that it runs in."""

    @property
    def channel(self) -> ParentChannel:
        """The parent's end of its channel."""

    @property
    def board(self) -> Board | None:
        """What it shares with the parent beside its channel, where its process is another."""

    @property
    def outputs(self) -> list[tuple[Stream, int]]:
        """Descriptors to read what it prints, where that needs passing on; they do not block."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable once the worker has ended."""

    def kill(self) -> None:
        """Ends it now, or where that cannot be, after the call that it runs."""

    def ask_stacks(self) -> None:
        """Asks for the stacks of its threads; the answer takes a moment, or never comes."""

    def stacks(self) -> str:
        """What it has told of its stacks so far."""

    def work(self) -> bool:
        """Runs one request in the calling thread, if that is how it works and there is one."""

    def reap(self) -> ExitStatus:
        """Takes leave of it once the sentinel is readable, and frees all descriptors."""


class Backend(Protocol):
    """A way to start workers."""

    @property
    def kills(self) -> bool:
        """Whether a worker can be ended in the middle of a call."""

    @property
    def spin(self) -> bool:
        """Whether to look with open eyes for a moment before sleeping."""

    @property
    def inline(self) -> bool:
        """Whether workers run in the threads that call them."""

    @property
    def max_starting(self) -> int | None:
        """How many workers may be on their way at a time, from the launch until they are ready; None for any number."""

    def launch(self, name: str, env_vars: Mapping[str, str], slab: int | None) -> Worker:
        """Starts a worker; called from a thread that lasts as long as any actor does.

        Args:
            name: The actor's name.
            env_vars: Environment variables to set before anything is imported.
            slab: The descriptor of a file that the worker may share with the parent, where there is one.

        Raises:
            OSError: The system refused.
        """

    def retain(self) -> None:
        """An actor has begun to use it."""

    def release(self) -> None:
        """An actor uses it no more; after the last one nothing of it may be left."""
