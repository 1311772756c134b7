"""``envactors stacks``: print the stacks of the workers of a running program."""

from __future__ import annotations

import argparse
from typing import Any

from envactors.cli.arguments import fail, printable, seconds
from envactors.cli.monitored import add_pid, choose_program
from envactors.cli.units import duration
from envactors.observe.programs import PATIENCE, ProgramError, ask

_SHOWN, _NOT_FOUND, _NOT_RUN = 0, 1, 2
# The longest wait that a program agrees to, in seconds.
_LONGEST_WAIT = 10.0

_DESCRIPTION = """\
Prints the stacks of all threads of a running program's workers, even while C code
holds the GIL. Envs are not disturbed.

PID may be left out if only one program of this user has actors. Programs started with
ENVACTORS_MONITOR=0 do not answer.
"""
_EPILOG = f"""\
exit status:
  {_SHOWN}    printed; a worker without stacks has a line that says why
  {_NOT_FOUND}    no such program or actor, several programs to choose from, or no answer
  {_NOT_RUN}    wrong arguments
  130  interrupted by Ctrl-C
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "stacks", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pid(parser)
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
    name, timeout = arguments.actor, arguments.timeout
    try:
        pid = choose_program(arguments.pid)
        actors = ask(pid, {"get": "stacks", "name": name, "timeout": timeout}, PATIENCE + timeout)["actors"]
        if not actors and name is not None:
            names = sorted({actor["name"] for actor in ask(pid, {"get": "snapshot"})["actors"]})
            raise ProgramError(f"program {pid} has no actor {name!r}, but {', '.join(names) or 'none at all'}")
    except ProgramError as error:
        return fail("stacks", str(error), _NOT_FOUND)
    if not actors:
        print(f"program {pid} has no actors now")
    for position, actor in enumerate(actors):
        print("\n" * (position > 0) + f"==== {_headline(actor)} ====")
        print(printable(actor["stacks"].rstrip("\n")))
    return _SHOWN


def _headline(actor: dict[str, Any]) -> str:
    """Return an actor's name, its process, and the method that it runs."""
    place = "no process" if actor["pid"] is None else f"process {actor['pid']}"
    if actor["node"] is not None:
        place += f" of node {actor['node']}"
    doing = actor["state"] if actor["method"] is None else f"{actor['method']} for {duration(actor['elapsed'])}"
    return printable(f"{actor['name']} ({place}): {doing}")


def _wait(text: str) -> float:
    value = seconds(text)
    if value > _LONGEST_WAIT:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LONGEST_WAIT:g} seconds")
    return value
