"""Helpers of several commands: types of arguments, shared words, and errors that end a command."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STDOUT = "-"


def add_env(parser: argparse.ArgumentParser) -> None:
    """Add the argument ENV."""
    parser.add_argument("env", metavar="ENV", help="an id of Gymnasium, or MODULE:FACTORY")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option ``--json FILE``; `write_json` takes its value."""
    parser.add_argument(
        "--json", type=_json_target, metavar="FILE", help=f"write {what} to a file, or to stdout for {STDOUT}"
    )


def write_json(target: str, record: Any) -> None:
    """Write a record to the value of ``--json``."""
    text = json.dumps(record, indent=2) + "\n"
    if target == STDOUT:
        print(text, end="", file=sys.__stdout__, flush=True)
    else:
        Path(target).write_text(text, encoding="utf-8")


def refuse_without(command: str, *modules: str, extra: str = "cli") -> bool:
    """Print what to install if a module is missing, and return whether one is."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        print(f"envactors {command} needs {' and '.join(missing)}: pip install 'envactors[{extra}]'", file=sys.stderr)
    return bool(missing)


def printable(text: str) -> str:
    """Return a text without the control characters that would change a terminal's state; lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " if c.isspace() else "�" for c in text)


def fail(command: str, text: str, status: int) -> int:
    """Print why a command has failed, and return its exit status."""
    print(printable(f"envactors {command}: {text}"), file=sys.stderr)
    return status


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type for integers of at least ``least``."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _json_target(text: str) -> str:
    """Parse the path of a file that can be written, or `STDOUT`."""
    path = Path(text)
    is_writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
    if text != STDOUT and not is_writable:
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return text
