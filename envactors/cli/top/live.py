"""``envactors top`` on a terminal: a thread that asks each program, and a loop of keys and redrawing."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live

from envactors.cli.monitored import Program, ProgramError, headline, printable
from envactors.cli.top.keyboard import Keyboard
from envactors.cli.top.rows import Sampler
from envactors.cli.top.screens import Back, ListScreen, Quit, Screen, TableScreen, View

# Between two requests for a snapshot, in seconds.
_INTERVAL = 0.5
# How long to wait for the end of a program that has removed its socket, and how often to check, in seconds.
_FAREWELL = 1.2
_POLL = 0.02
# How long a worker may take to write its stacks, in seconds.
_STACKS_WAIT = 1.0
# The screen is redrawn at least this often, in seconds: its size may have changed.
_REDRAW = 0.5


def watch(console: Console, programs: Sequence[Program], trouble: str | None = None) -> str:
    """Show programs until the user quits, or what is shown has ended.

    Args:
        console: The terminal.
        programs: The programs; of several one is chosen from a list.
        trouble: Why the first of them does not answer, if that is known.

    Returns:
        What is to be said when the screen is as before; empty for nothing.
    """
    with Keyboard(sys.stdin.fileno()) as keyboard, contextlib.ExitStack() as stack:
        watches = [Watch(program, keyboard.wake, trouble) for program in programs]
        for one in watches:
            stack.enter_context(one)
        screens: list[Screen] = [TableScreen(watches[0]) if len(watches) == 1 else ListScreen(watches)]
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        while True:
            if (lost := screens[-1].lost()) is not None:
                return f"{lost}\n"
            live.update(screens[-1].frame(console), refresh=True)
            try:
                key = keyboard.read(_REDRAW)
            except EOFError:
                return ""
            after = screens[-1].on_key(key) if key is not None else None
            if isinstance(after, Quit):
                return ""
            if isinstance(after, Back):
                screens = screens[:-1] if len(screens) > 1 else screens
            elif after is not None:
                screens.append(after)


class Watch:
    """Asks a program for snapshots, twice a second, in a thread; a context manager.

    Args:
        program: The program.
        changed: Called in that thread when there is something to show.
        trouble: Why the program does not answer, if that is known.
    """

    def __init__(self, program: Program, changed: Callable[[], None], trouble: str | None = None) -> None:
        self.program = program
        self.view: View = View(None, trouble, is_lost=False)
        self._changed = changed
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        # A program that does not answer must not hold up the end, so nobody waits for this thread.
        threading.Thread(target=self._run, name="envactors-top", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()

    def inquire(self, key: int) -> Inquiry:
        """Ask for the stacks and the output of an actor."""
        return Inquiry(self.program, key, self._changed)

    def _run(self) -> None:
        sampler = Sampler()
        picture = None
        while not self._over.is_set() and not self.view.is_lost:
            try:
                picture = sampler.sample(self.program.ask({"get": "snapshot"}))
                self.view = View(picture, None, is_lost=False)
            except ProgramError as error:
                text = self._last_words() if error.is_lost else str(error)
                self.view = View(picture, text, is_lost=error.is_lost)
            self._changed()
            self._over.wait(_INTERVAL)

    def _last_words(self) -> str:
        """Return why the program no longer answers."""
        # A program that ends has removed its socket some time before.
        end = time.monotonic() + _FAREWELL
        while not self.program.has_ended() and time.monotonic() < end and not self._over.wait(_POLL):
            pass
        return f"{self.program} has ended" if self.program.has_ended() else f"{self.program} no longer has actors"


class Inquiry:
    """Asks for the stacks and the output of an actor, in a thread.

    Args:
        program: The program.
        key: The actor's key.
        changed: Called in that thread when the answer is there.

    Attributes:
        text: The answer; None until it is there.
    """

    def __init__(self, program: Program, key: int, changed: Callable[[], None]) -> None:
        self.text: str | None = None
        self._program = program
        self._key = key
        self._changed = changed
        threading.Thread(target=self._run, name="envactors-top-stacks", daemon=True).start()

    def _run(self) -> None:
        try:
            self.text = printable(self._ask())
        except ProgramError as error:
            self.text = str(error)
        self._changed()

    def _ask(self) -> str:
        request = {"key": self._key, "timeout": _STACKS_WAIT}
        actors = self._program.ask({"get": "stacks", **request}, wait=_STACKS_WAIT)["actors"]
        if not actors:
            return "this actor is closed"
        parts = [headline(actors[0]), "", actors[0]["stacks"].rstrip("\n")]
        for output in self._program.ask({"get": "output", **request})["actors"]:
            for stream in ("stdout", "stderr"):
                if output.get(stream):
                    parts += ["", f"last lines of {stream}:", output[stream].rstrip("\n")]
        return "\n".join(parts)
