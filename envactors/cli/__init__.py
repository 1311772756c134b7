"""The command line: ``envactors COMMAND``.

Each command is a module with ``register``, which adds it to the parser, and ``run``. The modules import their
dependencies when they run, so that ``envactors --help`` is fast and works without any extra.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import envactors
from envactors.cli import chaos, doctor, stacks, tune
from envactors.cli.bench import command as bench
from envactors.cli.check import command as check
from envactors.cli.demo import command as demo
from envactors.cli.top import command as top

_INTERRUPTED = 130  # exit status that shells report after Ctrl-C
_READER_GONE = 141  # exit status that shells report after SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None: those of the process.

    Returns:
        The exit status.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("envactors: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit, which would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="envactors",
        description="Reinforcement-learning environments as actors: processes whose methods return futures.",
    )
    parser.add_argument("--version", action="version", version=f"envactors {envactors.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (top, stacks, check, doctor, tune, bench, demo, chaos):
        command.register(commands)
    return parser
