"""``envactors chaos``: says where the chaos kit has gone. To be removed with the next minor version."""

from __future__ import annotations

import argparse
import sys

_NOT_RUN = 2


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser, but not to its list of commands."""
    # No argument begins with a space, so that options of the kit are taken as well, and ignored.
    parser = commands.add_parser("chaos", prefix_chars=" ", add_help=False)
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say where the kit is, and return the exit status."""
    del arguments
    print(
        "envactors chaos: the chaos kit has moved to the tests of envactors; run `python -m tests.chaos` in a checkout "
        "of its repository",
        file=sys.stderr,
    )
    return _NOT_RUN
