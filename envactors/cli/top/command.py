"""``envactors top``: a live table of a running program's actors."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from envactors.cli.arguments import add_json, add_program, fail, refuse_without, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from envactors.cli.monitored import Program

_SHOWN, _NOT_FOUND, _NOT_RUN = 0, 1, 2
_TERMINAL_GONE = 129  # exit status that shells report after SIGHUP
# Time between the two snapshots that give the rates, in seconds.
_APART = 0.5
# Width of the table without a terminal: wide enough for every column.
_WIDTH = 200

_DESCRIPTION = """\
Shows the actors of a running program, twice a second: the method that each one runs
and for how long, its steps per second, their duration, and its memory. Enter shows
the stacks of the selected actor and the last lines that it printed. Envs are not
disturbed. If the output is not a terminal, one table is printed.

PROGRAM is a process id, or the path given to ea.monitor(). Without it, all programs of
this user that have actors are shown, except those started with ENVACTORS_MONITOR=0.
"""
_EPILOG = f"""\
keys:
  up, down     select an actor (also k and j)
  Enter        show the stacks and the output of the selected one (also t)
  Esc          go back (also b)
  s            sort by the next one of name, steps/s, p99, RSS, age, restarts
  p            pause
  q            quit

exit status:
  {_SHOWN}    shown; also if the program has ended meanwhile
  {_NOT_FOUND}    no such program, or one does not answer
  {_NOT_RUN}    wrong arguments, or something to install first
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "top",
        help="watch the actors of a running program",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_program(parser)
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    add_json(parser, "what the programs answer, as a list,")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status.
    """
    from envactors.cli.monitored import NO_PROGRAM, ProgramError, find_program, find_programs

    if arguments.json is None and refuse_without("top", "psutil", "rich"):
        return _NOT_RUN
    try:
        programs = find_programs() if arguments.program is None else [find_program(arguments.program)]
    except ProgramError as error:
        return fail("top", str(error), _NOT_FOUND)
    except OSError as error:
        return fail("top", str(error), _NOT_RUN)
    if arguments.json is not None:
        return _write_json(programs, arguments.json)
    if not programs:
        return fail("top", NO_PROGRAM, _NOT_FOUND)
    console = None if arguments.once else _terminal()
    return _print_tables(programs) if console is None else _watch(console, programs)


def _terminal() -> Console | None:
    """Return the terminal to draw on; None if there is none, or none with keys."""
    from envactors.cli.views import terminal

    console = terminal()
    return console if console is not None and sys.stdin.isatty() and console.encoding.startswith("utf") else None


def _watch(console: Console, programs: list[Program]) -> int:
    from envactors.cli.monitored import ProgramError
    from envactors.cli.top.live import watch

    trouble = None
    if len(programs) == 1:
        try:
            programs[0].ask({"get": "snapshot"})
        except ProgramError as error:
            if error.is_lost:
                return fail("top", str(error), _NOT_FOUND)
            trouble = str(error)  # it may answer later
    try:
        last_words = watch(console, programs, trouble)
        console.print(last_words, markup=False, highlight=False, soft_wrap=True, end="")
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # The interpreter flushes stdout again at exit, which would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _TERMINAL_GONE
    return _SHOWN


def _write_json(programs: list[Program], target: str) -> int:
    answers, troubles = _ask_all(programs)
    found = [
        {"pid": program.pid, "error": troubles[program]} if program in troubles else answers[program]
        for program in programs
    ]
    write_json(target, found)
    return _SHOWN if found and not troubles else _NOT_FOUND


def _print_tables(programs: list[Program]) -> int:
    from rich.console import Console

    from envactors.cli.top.rows import Sampler
    from envactors.cli.top.view import report

    # The terminal's encoding may lack characters; show the rest.
    getattr(sys.stdout, "reconfigure", lambda **_: None)(errors="replace")
    is_plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(highlight=False, width=_WIDTH if is_plain else None)
    samplers = {program: Sampler() for program in programs}
    before, troubles = _ask_all(programs)
    for program, answer in before.items():
        samplers[program].sample(answer)
    if before:
        time.sleep(_APART)
    answers, troubles_since = _ask_all([*before])
    for number, (program, answer) in enumerate(answers.items()):
        with console.capture() as captured:
            console.print(report(samplers[program].sample(answer), console))
        # Cells are padded to the width of their column.
        lines = [line.rstrip() for line in captured.get().splitlines()]
        print("\n" * (number > 0) + "\n".join(lines))
    for trouble in (troubles | troubles_since).values():
        fail("top", trouble, _NOT_FOUND)
    return _NOT_FOUND if troubles or troubles_since else _SHOWN


def _ask_all(programs: list[Program]) -> tuple[dict[Program, dict[str, Any]], dict[Program, str]]:
    """Return the snapshots of the programs that answer, and the reason for each of the others."""
    from concurrent.futures import ThreadPoolExecutor

    from envactors.cli.monitored import ProgramError

    answers = {}
    troubles = {}
    with ThreadPoolExecutor(max(1, len(programs))) as threads:
        asked = [(program, threads.submit(program.ask, {"get": "snapshot"})) for program in programs]
    for program, future in asked:
        try:
            answers[program] = future.result()
        except ProgramError as error:
            troubles[program] = str(error)
    return answers, troubles
