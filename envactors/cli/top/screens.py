"""The screens of ``envactors top``: what each shows, and what its keys do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.text import Text

from envactors.cli.monitored import Program
from envactors.cli.top.rows import ActorRow, Picture
from envactors.cli.top.view import ORDERS, screen
from envactors.cli.views import plain_table

_TABLE_KEYS = "up/down select   Enter stacks   s sort by {order}   p {pause}   {back}q quit"
_LIST_KEYS = "up/down select   Enter show   q quit"
_DETAIL_KEYS = "up/down scroll   Enter again   Esc back   q quit"
_MOVES = {"up": -1, "down": 1, "page up": -10, "page down": 10}


class View(NamedTuple):
    """Latest state of a program.

    Attributes:
        picture: Its last picture; None before the first.
        trouble: Why the picture is out of date; None if it is fresh.
        is_lost: Whether the program will never answer again.
    """

    picture: Picture | None
    trouble: str | None
    is_lost: bool


class Inquiry(Protocol):
    """A question about an actor; the text is None until it is answered."""

    text: str | None


class Watch(Protocol):
    """A program whose picture is refreshed regularly."""

    program: Program
    view: View

    def inquire(self, key: int) -> Inquiry:
        """Ask for the stacks and the output of an actor."""


class Back:
    """Result of a key: go back to the previous screen."""


class Quit:
    """Result of a key: quit."""


class Screen(Protocol):
    """A screen."""

    def frame(self, console: Console) -> RenderableType:
        """Return what it shows now."""

    def on_key(self, key: str) -> Screen | Back | Quit | None:
        """Do what a key says; return the screen that follows, or None to stay."""

    def lost(self) -> str | None:
        """Return a line that says that there is nothing to show any more; None while there is."""


class TableScreen:
    """The actors of one program.

    Args:
        watch: The program.
        has_list: Whether there is a list of programs to go back to.
    """

    def __init__(self, watch: Watch, *, has_list: bool = False) -> None:
        self._watch = watch
        self._has_list = has_list
        self._order = 0
        # The key of the selected actor.
        self._selected: int | None = None
        # What is shown while it pauses; None if it does not.
        self._paused: View | None = None

    def frame(self, console: Console) -> RenderableType:
        view = self._view()
        pause = "continue" if self._paused else "pause"
        back = "Esc back   " if self._has_list else ""
        foot = Text(_TABLE_KEYS.format(order=ORDERS[self._order].name, pause=pause, back=back), "dim", no_wrap=True)
        foot.overflow = "ellipsis"
        notes = []
        if (trouble := self._watch.view.trouble) is not None:
            notes.append(Text(trouble, "bold red"))
        if self._paused:
            notes.append(Text("paused", "bold yellow"))
        if view.picture is None:
            return Group(*(notes or [Text(f"asking {self._watch.program}")]), Text(""), foot)
        rows = self._rows(view.picture)
        if not rows:
            notes.append(Text("no actors now", "dim"))
        dimmed = trouble is not None
        return screen(view.picture, console, rows, notes=notes, foot=foot, selected=self._selected, dimmed=dimmed)

    def on_key(self, key: str) -> Screen | Back | Quit | None:
        picture = self._view().picture
        rows = [] if picture is None else self._rows(picture)
        if key == "q":
            return Quit()
        if key in ("escape", "b"):
            return Back()
        if key == "s":
            self._order = (self._order + 1) % len(ORDERS)
        elif key == "p":
            self._paused = None if self._paused else self._watch.view
        elif key in _MOVES and rows:
            at = [row.key for row in rows].index(self._selected or 0) + _MOVES[key]
            self._selected = rows[min(max(at, 0), len(rows) - 1)].key
        elif key in ("enter", "t") and self._selected is not None:
            return DetailScreen(self._watch, self._selected)
        return None

    def lost(self) -> str | None:
        return self._watch.view.trouble if self._watch.view.is_lost else None

    def _view(self) -> View:
        return self._paused or self._watch.view

    def _rows(self, picture: Picture) -> list[ActorRow]:
        """Return the actors in order; one of them is selected, if there are any."""
        rows = sorted(picture.rows, key=ORDERS[self._order].key)
        if all(row.key != self._selected for row in rows):
            self._selected = rows[0].key if rows else None
        return rows


class DetailScreen:
    """The stacks and the output of one actor.

    Args:
        watch: Its program.
        key: The actor's key.
    """

    def __init__(self, watch: Watch, key: int) -> None:
        self._watch = watch
        self._key = key
        self._inquiry = watch.inquire(key)
        # The text that is shown; None until the first answer.
        self._text: str | None = None
        # The number of the first line that is shown.
        self._top = 0

    def frame(self, console: Console) -> RenderableType:
        foot = Text(_DETAIL_KEYS, "dim", no_wrap=True, overflow="ellipsis")
        room = max(1, console.height - 1)
        # The previous text stays until the new one arrives.
        self._text = self._inquiry.text or self._text
        lines = list(Text(self._text or "asking for its stacks").wrap(console, console.width))
        lines[0].stylize("bold")
        self._top = max(0, min(self._top, len(lines) - room))
        shown = lines[self._top : self._top + room]
        return Group(*shown, *[Text("")] * (room - len(shown)), foot)

    def on_key(self, key: str) -> Screen | Back | Quit | None:
        if key == "q":
            return Quit()
        if key in ("escape", "b"):
            return Back()
        if key in _MOVES:
            self._top += _MOVES[key]
        elif key in ("enter", "t") and self._inquiry.text is not None:
            self._inquiry = self._watch.inquire(self._key)
        return None

    def lost(self) -> str | None:
        return self._watch.view.trouble if self._watch.view.is_lost else None


class ListScreen:
    """Programs to choose from.

    Args:
        watches: The programs.
    """

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches
        self._selected = 0

    def frame(self, console: Console) -> RenderableType:
        table = plain_table()
        table.width = console.width
        for head in ("pid", "vectors", "actors", "steps"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)
        # Two lines above the rows, two of the table, one below.
        room = max(1, console.height - 5)
        first = max(0, min(self._selected - room // 2, len(self._watches) - room))
        for number, watch in list(enumerate(self._watches))[first : first + room]:
            style = "reverse" if number == self._selected else "red" if watch.view.trouble else None
            table.add_row(*(Text(text) for text in _describe(watch)), style=style)
        title = Text(f"{len(self._watches)} programs have actors", "bold")
        filled = min(room, len(self._watches)) + 5
        foot = Text(_LIST_KEYS, "dim", no_wrap=True, overflow="ellipsis")
        return Group(title, Text(""), table, *[Text("")] * (console.height - filled), foot)

    def on_key(self, key: str) -> Screen | Back | Quit | None:
        if key == "q":
            return Quit()
        if key in _MOVES:
            self._selected = min(max(self._selected + _MOVES[key], 0), len(self._watches) - 1)
        elif key == "enter" and not self._watches[self._selected].view.is_lost:
            return TableScreen(self._watches[self._selected], has_list=True)
        return None

    def lost(self) -> str | None:
        return "all programs have ended" if all(watch.view.is_lost for watch in self._watches) else None


def _describe(watch: Watch) -> tuple[str, str, str, str, str]:
    """Return the cells of a program in the list."""
    picture = watch.view.picture
    trouble = watch.view.trouble
    pid = str(watch.program.pid or "")
    if picture is None:
        return pid, "", "", "", trouble or watch.program.command()
    counts = f"{len(picture.vectors)}", f"{len(picture.rows)}", f"{picture.steps:,}"
    return pid, *counts, trouble or picture.command
