"""How `envactors top` draws a program: its head, and a table of its actors that fits the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from envactors.cli.top.rows import ActorRow, Picture
from envactors.cli.units import count, duration, rate, size
from envactors.cli.views import plain_table

STATE_STYLES = {
    "starting": "yellow",
    "idle": "dim",
    "busy": "green",
    "renewing": "magenta",
    "dead": "bold red",
}
_STOPPED_STYLE = "bold yellow"
_LONGEST_NAME = _LONGEST_DOING = 24
_LEAST_NAME = 8
# A narrower column would not show a useful part of a failure.
_LEAST_FAILURE = 16
# Between two columns.
_GAP = 2
# Head and line of a table.
_TABLE_LINES = 2
# Rows that the head leaves room for.
_LEAST_ROWS = 3


class Column(NamedTuple):
    """A column of the table of actors.

    Attributes:
        head: Its head.
        text: Makes the text of a cell.
        is_number: Whether it is aligned to the right.
        least: Its least width, which keeps the columns behind it from moving all the time.
        most: Its largest width.
    """

    head: str
    text: Callable[[ActorRow], str]
    is_number: bool = True
    least: int = 0
    most: int = 99


class Order(NamedTuple):
    """A way to sort the actors.

    Attributes:
        name: The head of its column, or what it goes by.
        key: Makes what is compared.
    """

    name: str
    key: Callable[[ActorRow], Any]


def _optional(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _doing(row: ActorRow) -> str:
    return "" if row.method is None else f"{row.method} {duration(row.age)}"


_FAILURE = Column("last failure", lambda row: row.failure or "", is_number=False)
COLUMNS = (
    Column("actor", lambda row: row.name, is_number=False, most=_LONGEST_NAME),
    Column("vector", lambda row: "" if row.vector is None else str(row.vector)),
    Column("state", lambda row: row.state, is_number=False, least=8),
    Column("running", _doing, is_number=False, least=11, most=_LONGEST_DOING),
    Column("steps/s", lambda row: _optional(row.rate, rate)),
    Column("p50", lambda row: _optional(row.p50, duration), least=7),
    Column("p99", lambda row: _optional(row.p99, duration), least=7),
    Column("RSS", lambda row: size(row.rss) if row.rss else "", least=6),
    Column("CPU %", lambda row: _optional(row.cpu, lambda value: f"{value:.0f}")),
    Column("restarts", lambda row: str(row.restarts)),
    Column("node", lambda row: row.node or "", is_number=False, most=_LONGEST_NAME),
    _FAILURE,
)
# Columns to omit in a narrow terminal, first to last.
_LESSER = ("CPU %", "node", "last failure", "vector", "p50", "RSS", "restarts", "running", "p99")
# Columns to omit while they are empty.
_SELDOM = ("node", "last failure")


def _by_name(row: ActorRow) -> Any:
    """Return what sorts env-2 before env-10, in one vector after the other."""
    parts = re.split(r"([0-9]+)", row.name)
    return math.inf if row.vector is None else row.vector, [(int(p), "") if p.isdecimal() else (0, p) for p in parts]


def _descending(value: Callable[[ActorRow], float | None]) -> Callable[[ActorRow], Any]:
    return lambda row: (-(value(row) or 0.0), _by_name(row))


ORDERS = (
    Order("name", _by_name),
    Order("steps/s", _descending(lambda row: row.rate)),
    Order("p99", _descending(lambda row: row.p99)),
    Order("RSS", _descending(lambda row: row.rss)),
    Order("age", _descending(lambda row: row.age)),
    Order("restarts", _descending(lambda row: row.restarts)),
)


def head_lines(picture: Picture, console: Console, *, most: int | None = None) -> list[Text]:
    """Return the lines about the program and its vectors.

    Args:
        picture: The program.
        console: Where they are to be shown.
        most: How many lines there may be.
    """
    first = Text.assemble((f"program {picture.pid}", "bold"), f"  {picture.command}", overflow="ellipsis", no_wrap=True)
    state = Text(f"  {picture.state}", "cyan")
    first.truncate(max(1, console.width - state.cell_len), overflow="ellipsis")
    lines = [first + state]
    for number, vector in enumerate(picture.vectors):
        wrapped = _wrap(vector, console.width)
        if most is not None and len(lines) + len(wrapped) > most - (number + 1 < len(picture.vectors)):
            lines.append(Text(f"and {count(len(picture.vectors) - number, 'vector')} more", "dim"))
            break
        lines += wrapped
    return lines


def _wrap(text: str, width: int) -> list[Text]:
    """Return a vector's line in as many lines as it takes, broken between its parts."""
    lines: list[str] = []
    for part in re.split(r"(?<=[;,] )", text):
        if lines and cell_len((lines[-1] + part).rstrip()) <= width:
            lines[-1] += part
        else:
            lines.append(("  " if lines else "") + part)
    return [Text(line.rstrip(), no_wrap=True, overflow="ellipsis") for line in lines]


def fit_columns(rows: Sequence[ActorRow], width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit a width, each with its own; those of lesser worth are left out first."""
    chosen = {}
    for column in COLUMNS:
        widest = max((cell_len(column.text(row)) for row in rows), default=0)
        if widest or column.head not in _SELDOM:
            chosen[column.head] = column, min(max(widest, cell_len(column.head), column.least), column.most)

    def excess() -> int:
        return sum(width for _, width in chosen.values()) + _GAP * (len(chosen) - 1) - width

    def shrink(head: str, least: int) -> None:
        if head in chosen and excess() > 0:
            column, now = chosen[head]
            chosen[head] = column, max(now - excess(), min(now, least))

    shrink(_FAILURE.head, _LEAST_FAILURE)
    for head in _LESSER:
        if excess() > 0:
            chosen.pop(head, None)
    shrink("actor", _LEAST_NAME)
    return list(chosen.values())


def actor_table(
    rows: Sequence[ActorRow],
    shown: Sequence[ActorRow],
    width: int,
    *,
    selected: int | None = None,
    dimmed: bool = False,
) -> Table:
    """Return a table of actors.

    Args:
        rows: All of them, which decide on its columns.
        shown: Those that are in it.
        width: The width that it may have.
        selected: The key of the one that is marked.
        dimmed: Whether its numbers are not fresh.
    """
    table = plain_table()
    columns = fit_columns(rows, width)
    for column, cells in columns:
        justify = "right" if column.is_number else "left"
        table.add_column(column.head, justify=justify, width=cells, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    # A gap after the last column would make the table wider than the terminal.
    table.pad_edge = False
    for row in shown:
        styles = "dim" * dimmed, "reverse" * (row.key == selected)
        cells_of_row = [_cell(column, row, plain=dimmed or row.key == selected) for column, _ in columns]
        table.add_row(*cells_of_row, style=" ".join(style for style in styles if style) or None)
    return table


def window(rows: Sequence[ActorRow], selected: int | None, room: int) -> tuple[int, Sequence[ActorRow]]:
    """Return as many rows around the selected one as there is room for, and the number of the first."""
    at = next((number for number, row in enumerate(rows) if row.key == selected), 0)
    first = max(0, min(at - room // 2, len(rows) - room))
    return first, rows[first : first + room]


def screen(
    picture: Picture,
    console: Console,
    rows: Sequence[ActorRow],
    *,
    notes: Sequence[Text],
    foot: Text,
    selected: int | None,
    dimmed: bool,
) -> RenderableType:
    """Return a picture that fills a terminal.

    Args:
        picture: The program.
        console: The terminal.
        rows: Its actors, in order.
        notes: Lines below the head.
        foot: The last line.
        selected: The key of the actor that is marked.
        dimmed: Whether the numbers are not fresh.
    """
    notes = [line for note in notes for line in note.wrap(console, console.width)]
    # Besides the head and the rows: the table's head, a line on those that are left out, and the last line.
    others = len(notes) + _TABLE_LINES + 2
    head = head_lines(picture, console, most=max(2, min(console.height // 3, console.height - others - _LEAST_ROWS)))
    if dimmed:
        for line in head:
            line.stylize("dim")
    above = [*head, *notes]
    room = max(1, console.height - len(head) - others)
    if len(rows) == room + 1:
        room += 1  # no row is left out then
    first, shown = window(rows, selected, room)
    table = actor_table(rows, shown, console.width, selected=selected, dimmed=dimmed)
    below = []
    if len(shown) < len(rows):
        below.append(Text(f"actors {first + 1} to {first + len(shown)} of {len(rows)}", "dim"))
    filled = len(above) + _TABLE_LINES + len(shown) + len(below) + 1
    return Group(*above, table, *below, *[Text("")] * (console.height - filled), foot)


def report(picture: Picture, console: Console) -> RenderableType:
    """Return all of a picture, for output that is not redrawn."""
    rows = sorted(picture.rows, key=ORDERS[0].key)
    table = actor_table(rows, rows, console.width) if rows else Text("no actors now", "dim")
    return Group(*head_lines(picture, console), Text(""), table)


def _cell(column: Column, row: ActorRow, *, plain: bool) -> Text:
    style = ""
    if not plain and column.head == "state":
        style = _STOPPED_STYLE if row.state.endswith("stopped") else STATE_STYLES.get(row.state, "")
    elif not plain and column is _FAILURE:
        style = "red"
    elif not plain and column.head == "restarts":
        style = "yellow" if row.restarts else "dim"
    # A failure's text may have tabs, which count as one character here.
    return Text(column.text(row).replace("\t", " "), style)
