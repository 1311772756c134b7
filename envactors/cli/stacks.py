"""``envactors stacks``: print the stacks of the workers of a running program."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from envactors.cli.arguments import add_program, fail, seconds

if TYPE_CHECKING:
    from envactors.cli.monitored import Program

_SHOWN, _NOT_FOUND, _NOT_RUN = 0, 1, 2
# The longest wait that a program agrees to, in seconds.
_LONGEST_WAIT = 10.0

_DESCRIPTION = """\
Prints the stacks of all threads of a running program's workers, even while C code
holds the GIL. Envs are not disturbed.

PROGRAM is a process id, or the path given to ea.monitor(). It may be left out if only
one program of this user has actors. Programs started with ENVACTORS_MONITOR=0 do not
answer.
"""
_EPILOG = f"""\
exit status:
  {_SHOWN}    printed; a worker without stacks has a line that says why
  {_NOT_FOUND}    no such program or actor, or the program does not answer
  {_NOT_RUN}    wrong arguments, or several programs to choose from
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "stacks",
        help="print the stacks of the workers of a running program",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_program(parser)
    parser.add_argument("--actor", metavar="NAME", help="only actors with this name")
    parser.add_argument(
        "--timeout", type=_wait, default=1.0, metavar="S", help="how long to wait for each, at most 10 s (default: 1)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status.
    """
    from envactors.cli.monitored import NO_PROGRAM, ProgramError, find_program, find_programs

    try:
        programs = find_programs() if arguments.program is None else [find_program(arguments.program)]
        if len(programs) == 1:
            return _print_stacks(programs[0], arguments.actor, arguments.timeout)
    except ProgramError as error:
        return fail("stacks", str(error), _NOT_FOUND)
    except OSError as error:
        return fail("stacks", str(error), _NOT_RUN)
    if not programs:
        return fail("stacks", NO_PROGRAM, _NOT_FOUND)
    listed = "".join(f"\n  {program.pid:>7}  {program.command()}" for program in programs)
    return fail(
        "stacks", f"{len(programs)} programs have actors, say which: envactors stacks PROGRAM{listed}", _NOT_RUN
    )


def _print_stacks(program: Program, name: str | None, timeout: float) -> int:
    from envactors.cli.monitored import headline, printable

    actors = program.ask({"get": "stacks", "name": name, "timeout": timeout}, wait=timeout)["actors"]
    if not actors and name is not None:
        there = sorted({actor["name"] for actor in program.ask({"get": "output"})["actors"]})
        return fail("stacks", f"{program} has no actor {name!r}, but {', '.join(there) or 'none at all'}", _NOT_FOUND)
    if not actors:
        print(f"{program} has no actors now")
    for number, actor in enumerate(actors):
        print("\n" * (number > 0) + f"==== {headline(actor)} ====")
        print(printable(actor["stacks"].rstrip("\n")))
    return _SHOWN


def _wait(text: str) -> float:
    value = seconds(text)
    if value > _LONGEST_WAIT:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LONGEST_WAIT:g} seconds")
    return value
