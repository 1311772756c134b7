"""Programs that can be shown: finding them, sending requests, and explaining why one does not answer."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from envactors.cli.units import duration
from envactors.observe.listener import path_of
from envactors.observe.programs import (
    PATIENCE,
    NoAnswerError,
    NotListeningError,
    ask,
    pid_of,
    running_programs,
)
from envactors.system.processes import command_line, describe_state

_WHY_NOT = "it has no actors now, or was started with ENVACTORS_MONITOR=0"
NO_PROGRAM = "no program of this user has actors now, or all were started with ENVACTORS_MONITOR=0"
_STOPPED = "is stopped"
_ENDED = "has ended"


class ProgramError(Exception):
    """A program cannot be shown; the text says why.

    Args:
        text: Why.
        is_lost: Whether it has ended or has no socket, so that another request is useless.
    """

    def __init__(self, text: str, *, is_lost: bool = False) -> None:
        super().__init__(text)
        self.is_lost = is_lost


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that can be shown.

    Attributes:
        path: Its socket.
        pid: Its process id; None if the system cannot tell.
    """

    path: Path
    pid: int | None

    def __str__(self) -> str:
        return f"the program at {self.path}" if self.pid is None else f"program {self.pid}"

    def ask(self, request: dict[str, Any], wait: float = 0.0) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            request: See `envactors.observe.monitor`.
            wait: How long the program may wait for something itself, in seconds.

        Raises:
            ProgramError: It does not answer.
        """
        if self.pid is not None and (state := describe_state(self.pid)).startswith(f"{_STOPPED} (by SIGSTOP"):
            raise ProgramError(self._explain_state(state))
        try:
            return ask(self.path, request, PATIENCE + wait)
        except NoAnswerError as error:
            raise self._explain(error) from error

    def _explain(self, error: NoAnswerError) -> ProgramError:
        state = "does not answer" if self.pid is None else describe_state(self.pid)
        if state == _ENDED:
            return ProgramError(f"{self} {_ENDED}", is_lost=True)
        if isinstance(error, NotListeningError):
            if self.pid is None:
                return ProgramError(f"no program listens at {self.path}", is_lost=True)
            return ProgramError(f"{self} cannot be shown: {_WHY_NOT}", is_lost=True)
        if state == "does not answer":
            is_late = isinstance(error.__cause__, (TimeoutError, BlockingIOError))
            return ProgramError(f"{self} does not answer: {'perhaps C code holds its GIL' if is_late else error}")
        return ProgramError(self._explain_state(state))

    def _explain_state(self, state: str) -> str:
        return f"{self} {state}" + (f": kill -CONT {self.pid}" if state.startswith(_STOPPED) else "")

    def has_ended(self) -> bool:
        """Return whether its process is known to have ended."""
        return self.pid is not None and describe_state(self.pid) == _ENDED

    def command(self) -> str:
        """Return its command line, as the system knows it; empty if it does not."""
        return "" if self.pid is None else one_line(command_line(self.pid))


def find_program(name: str) -> Program:
    """Return the program with a process id, or with the path of a socket.

    Raises:
        ProgramError: There is no such process or socket.
        PermissionError: The directory of the sockets is not this user's alone.
    """
    if not name.isdecimal():
        path = Path(name)
        if not path.is_socket():
            raise ProgramError(f"{name!r} is neither a process id nor the path of a socket", is_lost=True)
        return Program(path, pid_of(path))
    pid = int(name)
    program = Program(path_of(pid), pid)
    if not program.path.exists() and describe_state(pid) == _ENDED:
        raise ProgramError(f"process {pid} does not exist", is_lost=True)
    return program


def find_programs() -> list[Program]:
    """Return this user's programs that can be shown, ordered by process id.

    Raises:
        PermissionError: The directory of the sockets is not this user's alone.
    """
    return [Program(path_of(pid), pid) for pid in running_programs()]


def one_line(words: list[str]) -> str:
    """Return a command line as a shell takes it, in one line."""
    # A program of `python -c` may have many lines.
    return " ".join(printable(shlex.join(words)).split())


def printable(text: str) -> str:
    """Return a text without the control characters that would change a terminal's state; lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " if c.isspace() else "�" for c in text)


def headline(actor: dict[str, Any]) -> str:
    """Return an actor's name, its process, and the method that it runs."""
    place = "no process" if actor["pid"] is None else f"process {actor['pid']}"
    if actor["node"] is not None:
        place += f" of node {actor['node']}"
    doing = actor["state"] if actor["method"] is None else f"{actor['method']} for {duration(actor['elapsed'])}"
    return printable(f"{actor['name']} ({place}): {doing}")
