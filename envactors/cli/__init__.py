"""The command line: ``envactors COMMAND``.

Each command is a module with ``register``, which adds it to the parser, and ``run``. Only the module of the chosen
command is imported, so that ``envactors --help`` is fast and works without any extra.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable

import envactors
from envactors.cli.arguments import STDOUT, fail

# By command: its module in this package, and its line in the list of commands.
_COMMANDS = {
    "top": ("top", "watch the actors of a running program"),
    "stacks": ("stacks", "print the stacks of the workers of a running program"),
    "replay": ("replay", "run the inputs of a crash bundle again, also in a debugger"),
    "check": ("check.command", "find defects of an env, and suggest settings"),
    "doctor": ("doctor", "show resources and limits of this machine, and warn of problems"),
    "tune": ("tune", "find the fastest settings for an env on this machine"),
    "demo": ("demo.command", "learn to balance CartPole on actors, some of which crash and hang"),
}
_NOT_RUN = 2
_INTERRUPTED = 130  # exit status that shells report after Ctrl-C
_READER_GONE = 141  # exit status that shells report after SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None: those of the process.

    Returns:
        The exit status.
    """
    argv = sys.argv[1:] if argv is None else argv
    chosen = argv[0] if argv and argv[0] in _COMMANDS else None
    try:
        parser = _parser(chosen)
    except ModuleNotFoundError as error:
        if chosen is None or not error.name:
            raise
        missing = error.name.partition(".")[0]
        return fail(chosen, f"{missing} is not installed: pip install 'envactors[cli]'", _NOT_RUN)
    arguments = parser.parse_args(argv)
    if chosen is None:
        parser.print_help()
        return 0
    # The encoding of stdout may lack characters; show the rest.
    getattr(sys.stdout, "reconfigure", lambda **_: None)(errors="replace")
    if getattr(arguments, "json", None) == STDOUT:
        sys.stdout = sys.stderr  # for the output of envs; `write_json` writes to `sys.__stdout__`
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("envactors: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):  # the reader of stdout has gone, or the terminal
            raise
        # The interpreter flushes stdout (descriptor 1) again at exit, which would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _READER_GONE


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="envactors",
        description="Reinforcement-learning environments as actors: processes whose methods return futures.",
    )
    parser.add_argument("--version", action="version", version=f"envactors {envactors.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, description) in _COMMANDS.items():
        if name == chosen:
            importlib.import_module(f"envactors.cli.{module}").register(commands)
        else:
            commands.add_parser(name, help=description)
    return parser
