"""``envactors tune``: find the fastest settings for an env on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from envactors.cli.arguments import at_least, seconds

_RAN, _FAILED, _NOT_RUN = 0, 1, 2

_DESCRIPTION = """\
Measures env-steps per second of one env with different settings, in turns: in line,
on threads, in processes with more or fewer envs each, and of the best of them without
copies, with other start methods, and with send and recv. Prints a table and the line
to paste.

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
    parser.add_argument("env", metavar="ENV", help="an id of Gymnasium, or MODULE:FACTORY")
    parser.add_argument("--num-envs", type=at_least(1), default=8, metavar="N", help="number of envs (default: 8)")
    parser.add_argument(
        "--seconds", type=seconds, default=20.0, metavar="S", help="about how long it may take (default: 20)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status.
    """
    if importlib.util.find_spec("rich") is None:
        print("envactors tune needs rich: pip install 'envactors[demo]'", file=sys.stderr)
        return _NOT_RUN
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from envactors.cli.jobs import BenchInputError, check_source
    from envactors.tuning.tuner import Tuner

    # As with `python -m`, a factory may be in the current directory.
    sys.path.insert(0, str(Path.cwd()))
    drawing = sys.stdout.isatty()
    console = Console(force_terminal=None if drawing else False, highlight=False)
    columns = BarColumn(bar_width=30), TextColumn("{task.description}")
    # Drawing takes processor time from what is measured, so do it rarely.
    bar = Progress(*columns, console=console, transient=True, disable=not drawing, refresh_per_second=4)
    task = bar.add_task("", total=1.0)

    def show(what: str, share: float) -> None:
        bar.update(task, description=what, completed=share)

    try:
        source = check_source(arguments.env)
        with bar:
            tuning = Tuner(source, arguments.num_envs, arguments.seconds, show).run()
    except BenchInputError as error:
        print(f"envactors tune: {error}", file=sys.stderr)
        return _NOT_RUN
    except Exception as error:  # the env's own, whatever it is
        print(f"envactors tune: {type(error).__name__}: {error}", file=sys.stderr)
        return _FAILED
    console.print(str(tuning), soft_wrap=True, markup=False)
    return _RAN
