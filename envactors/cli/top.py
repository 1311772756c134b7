"""``envactors top``: a live table of a running program's actors."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from envactors.cli.arguments import fail, printable
from envactors.cli.monitored import add_pid, choose_program, one_line
from envactors.cli.units import count, duration, rate, size
from envactors.observe.programs import ProgramError, ask, has_ended
from envactors.system.processes import describe_state

_SHOWN, _NOT_FOUND, _NOT_RUN = 0, 1, 2
_TERMINATED = 128 + signal.SIGTERM
# Between two snapshots, in seconds.
_INTERVAL = 0.5
# Width of the table without a terminal: wide enough for every column.
_PLAIN_WIDTH = 200
# An actor that has been busy for this long may have a stopped process, in seconds.
_SUSPICIOUS = 1.0
_STYLES = {"starting": "yellow", "idle": "dim", "busy": "green", "renewing": "magenta", "dead": "bold red"}
# What messages of `envactors.ActorError` call the actor; the table says already which one it is.
_WHO = re.compile(r"( of)? ?actor '[^']*' \([^)]*\)")
# As in a snapshot, see `envactors.observe.snapshot.take_snapshot`, with `rate`: its steps per second, None if unknown.
Actor = dict[str, Any]

_DESCRIPTION = """\
Shows the actors of a running program, twice a second: the method that each one runs
and for how long, its steps per second, their duration, and its memory. Envs are not
disturbed. If the output is not a terminal, one table is printed. Ctrl-C quits.

PID may be left out if only one program of this user has actors. Programs started with
ENVACTORS_MONITOR=0 do not answer.
"""
_EPILOG = f"""\
exit status:
  {_SHOWN}    shown; also if the program has ended meanwhile
  {_NOT_FOUND}    no such program, several programs to choose from, or no answer
  {_NOT_RUN}    wrong arguments, or something to install first
"""


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        head: Its head.
        text: Makes the text of a cell.
        least_width: The least width of a terminal that has room for it.
        is_text: Whether it is aligned to the left.
        is_optional: Whether it is left out while it is empty.
    """

    head: str
    text: Callable[[Actor], str]
    least_width: int = 0
    is_text: bool = False
    is_optional: bool = False


def _seconds(name: str) -> Callable[[Actor], str]:
    return lambda actor: "" if actor[name] is None else duration(actor[name])


def _running(actor: Actor) -> str:
    return "" if actor["method"] is None else f"{actor['method']} {duration(actor['elapsed'])}"


def _failure(actor: Actor) -> str:
    return "" if actor["last_failure"] is None else _WHO.sub("", actor["last_failure"], count=1)


def _state(actor: Actor) -> str:
    wait = actor.get("restart_in")  # programs with an earlier version do not say it
    return str(actor["state"]) if wait is None else f"{actor['state']}, in {wait:.0f} s"


_COLUMNS = (
    Column("actor", lambda actor: actor["name"], is_text=True),
    Column("vector", lambda actor: "" if actor["vector"] is None else str(actor["vector"]), 100),
    Column("state", _state, is_text=True),
    Column("running", _running, 60, is_text=True),
    Column("steps/s", lambda actor: "" if actor["rate"] is None else rate(actor["rate"]), 40),
    Column("p50", _seconds("p50"), 90),
    Column("p99", _seconds("p99"), 70),
    Column("RSS", lambda actor: size(actor["rss"]) if actor["rss"] else "", 80),
    Column("restarts", lambda actor: str(actor["restarts"]), 70),
    Column("node", lambda actor: actor["node"] or "", 110, is_text=True, is_optional=True),
    Column("last failure", _failure, 110, is_text=True, is_optional=True),
)


def _by_name(actor: Actor) -> Any:
    """Return what sorts env-2 before env-10, in one vector after the other."""
    parts = re.split(r"([0-9]+)", actor["name"])
    vector = math.inf if actor["vector"] is None else actor["vector"]
    return vector, [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _descending(name: str) -> Callable[[Actor], Any]:
    return lambda actor: (-(actor[name] or 0.0), _by_name(actor))


_ORDERS = {
    "name": _by_name,
    "steps": _descending("rate"),
    "p99": _descending("p99"),
    "rss": _descending("rss"),
    "age": _descending("elapsed"),
    "restarts": _descending("restarts"),
}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "top", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pid(parser)
    parser.add_argument("--sort", choices=_ORDERS, default="name", help="what comes first (default: name)")
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: As `register` describes them.

    Returns:
        The exit status.
    """
    is_plain = not sys.stdout.isatty()
    console = Console(highlight=False, width=_PLAIN_WIDTH if is_plain and "COLUMNS" not in os.environ else None)
    try:
        pid = choose_program(arguments.pid)
        samples = sample(pid)
        first = next(samples)
        if arguments.once or is_plain or console.is_dumb_terminal:
            time.sleep(_INTERVAL)
            console.print(draw(next(samples), arguments.sort, console))
            return _SHOWN
    except ProgramError as error:
        return fail("top", str(error), _NOT_FOUND)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # so that the terminal is restored
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            _watch(pid, first, arguments.sort, live)
    except KeyboardInterrupt:
        return _SHOWN
    if console.is_terminal:
        print(f"program {pid} has ended")
    return _SHOWN


def _watch(pid: int, snapshot: dict[str, Any], order: str, live: Live) -> None:
    """Show a program until it has ended, or the terminal has gone."""
    samples, trouble = sample(pid, snapshot), None
    while live.console.is_terminal:
        live.update(draw(snapshot, order, live.console, trouble, height=live.console.height), refresh=True)
        time.sleep(_INTERVAL)
        try:
            snapshot, trouble = next(samples), None
        except ProgramError as error:  # it may answer later, and may have actors again
            if has_ended(pid):
                return
            samples, trouble = sample(pid, snapshot), str(error)


def sample(pid: int, before: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield snapshots of a program whenever asked for one, each with the rates since the one before.

    Raises:
        ProgramError: It does not answer.
    """
    while True:
        now = ask(pid, {"get": "snapshot"})
        seconds = 0.0 if before is None else now["at"] - before["at"]
        steps = {} if before is None else {actor["serial"]: actor["steps"] for actor in before["actors"]}
        for actor in now["actors"]:
            earlier = steps.get(actor["serial"])
            # A restart can lose counts.
            is_known = earlier is not None and seconds > 0
            actor["rate"] = max(0, actor["steps"] - earlier) / seconds if is_known else None
            if actor["elapsed"] > _SUSPICIOUS and actor["pid"] is not None and actor["node"] is None:
                actor["state"] += ", stopped" * describe_state(actor["pid"]).startswith("is stopped")
        before = now
        yield now


def draw(
    snapshot: dict[str, Any], order: str, console: Console, trouble: str | None = None, height: int | None = None
) -> RenderableType:
    """Return what is shown of a program.

    Args:
        snapshot: A snapshot with rates.
        order: One of the values of ``--sort``.
        console: Where it is shown.
        trouble: Why the program does not answer any more; None if it does.
        height: How many lines there may be; None for any number.
    """
    texts = [Text(f"program {snapshot['pid']}  {one_line(snapshot['command'])}", "bold", no_wrap=True)]
    texts += [Text(_vector_line(vector)) for vector in snapshot["vectors"]]
    head = [line for text in texts for line in text.wrap(console, console.width, overflow="ellipsis")]
    if height is not None:
        head = head[: max(1, height // 3)]
    if trouble is not None:
        head += Text(trouble, "yellow").wrap(console, console.width)
    actors = sorted(snapshot["actors"], key=_ORDERS[order])
    # Besides the head there are an empty line, the head of the table, its line, and the one on those that are left out.
    room = len(actors) if height is None else max(1, height - len(head) - 4)
    foot = [Text(f"and {count(len(actors) - room, 'more actor')}", "dim")] if room < len(actors) else []
    table = _table(actors[:room], console.width) if actors else Text("no actors now", "dim")
    return Group(*head, "", table, *foot)


def _vector_line(vector: dict[str, Any]) -> str:
    counts = f"{count(vector['envs'], 'env')}, {vector['steps']:,} steps, {vector['episodes']:,} episodes"
    return f"vector {vector['serial']}: {counts}; {vector['where']}"


def _table(actors: list[Actor], width: int) -> Table:
    table = Table(border_style="dim", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    shown = []
    for column in _COLUMNS:
        texts = [printable(column.text(actor)).replace("\t", " ").strip() for actor in actors]
        if width >= column.least_width and (any(texts) or not column.is_optional):
            # Where the terminal is too narrow, the failure gets what the others leave.
            shrinks = column.head == "last failure"
            table.add_column(column.head, justify="left" if column.is_text else "right", no_wrap=not shrinks)
            shown.append(
                [
                    Text(text, _style(column.head, actor), no_wrap=True, overflow="ellipsis")
                    for text, actor in zip(texts, actors, strict=True)
                ]
            )
    for cells in zip(*shown, strict=True):
        table.add_row(*cells)
    return table


def _style(head: str, actor: Actor) -> str:
    if head == "state":
        return _STYLES.get(actor["state"], "bold yellow")
    return "red" if head == "last failure" else "yellow" if head == "restarts" and actor["restarts"] else ""
