"""``envactors tune``: find the fastest settings for an env on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from envactors.cli.arguments import add_env, add_json, at_least, fail, refuse_without, seconds, write_json

_RAN, _FAILED, _NOT_RUN = 0, 1, 2

_DESCRIPTION = """\
Measures env-steps per second of one env with different settings, in turns:
in a plain loop without envactors, in-process, on threads, and in processes with more
or fewer envs each. The best of them is also measured without copies, with send and
recv, and with rollouts. Prints a table, the reason for its advice, and lines to
paste: for envactors, and for the drop-in for Gymnasium.

ENV is an id of Gymnasium, or MODULE:FACTORY, a callable without arguments that makes
an env.
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest settings for an env on this machine",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_env(parser)
    parser.add_argument("--num-envs", type=at_least(1), default=8, metavar="N", help="number of envs (default: 8)")
    parser.add_argument(
        "--seconds", type=seconds, default=20.0, metavar="S", help="about how long it may take (default: 20)"
    )
    add_json(parser, "what was measured")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status.
    """
    if refuse_without("tune", "rich"):
        return _NOT_RUN
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from envactors.cli.source import EnvInputError, find_source
    from envactors.mailbox.pickling import safe_str
    from envactors.tuning.tuner import Tuner

    drawing = sys.stdout.isatty()
    console = Console(file=sys.stdout, force_terminal=None if drawing else False, highlight=False)
    columns = BarColumn(bar_width=30), TextColumn("{task.description}")
    # Drawing takes processor time from what is measured, so do it rarely.
    bar = Progress(*columns, console=console, transient=True, disable=not drawing, refresh_per_second=4)
    task = bar.add_task("", total=1.0)

    def show(what: str, share: float) -> None:
        bar.update(task, description=what, completed=share)

    try:
        source = find_source(arguments.env)
        with bar:
            tuning = Tuner(source, arguments.num_envs, arguments.seconds, show).run()
    except EnvInputError as error:
        return fail("tune", str(error), _NOT_RUN)
    except (Exception, SystemExit) as error:  # raised by the env
        return fail("tune", safe_str(error), _FAILED)
    imports = tuning.imports if source.is_factory else ("import gymnasium", *tuning.imports)
    tuning = dataclasses.replace(tuning, factory_name=source.expression, imports=imports)
    console.print(str(tuning), soft_wrap=True, markup=False)
    if arguments.json is not None:
        write_json(arguments.json, tuning.record())
    return _RAN
