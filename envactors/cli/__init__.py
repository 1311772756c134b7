"""The command line: ``envactors COMMAND``.

Each command is a module with ``register``, which describes it to the parser, and a function that runs it. They
are imported without what they need, so that ``envactors --help`` is quick and works without any extra.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import envactors
from envactors.cli import bench, chaos, demo

_INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended
_READER_GONE = 141  # and for one whose output nobody reads any more


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("envactors: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="envactors",
        description="Reinforcement-learning environments as actors: processes whose methods return futures.",
    )
    parser.add_argument("--version", action="version", version=f"envactors {envactors.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.register(commands)
    bench.register(commands)
    chaos.register(commands)
    return parser
