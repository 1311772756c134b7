"""Helpers of ``envactors top`` and ``envactors stacks``: the choice of a program."""

from __future__ import annotations

import argparse
import shlex

from envactors.cli.arguments import at_least, printable
from envactors.observe.programs import ProgramError, running_programs
from envactors.system.processes import command_line


def add_pid(parser: argparse.ArgumentParser) -> None:
    """Add the optional argument PID."""
    parser.add_argument("pid", nargs="?", type=at_least(1), metavar="PID", help="the process id of the program")


def choose_program(pid: int | None) -> int:
    """Return the process id that was given or, if it is None, that of the only program with actors.

    Raises:
        ProgramError: There is none, or there are several.
    """
    if pid is not None:
        return pid
    try:
        pids = running_programs()
    except OSError as error:
        raise ProgramError(str(error)) from error
    if not pids:
        raise ProgramError("no program of this user has actors now, or all were started with ENVACTORS_MONITOR=0")
    if len(pids) > 1:
        listed = "".join(f"\n  {pid:>7}  {one_line(command_line(pid))}" for pid in pids)
        raise ProgramError(f"{len(pids)} programs have actors: choose one by its PID{listed}")
    return pids[0]


def one_line(words: list[str]) -> str:
    """Return a command line as a shell takes it, in one line."""
    # A program of `python -c` may have many lines.
    return " ".join(printable(shlex.join(words)).split())
