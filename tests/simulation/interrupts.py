"""Interrupts of the user at any line of the library: a signal handler that raises, or that uses the vector."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from interrupting import with_exits

import envactors as ea
from simulation.world import World

_PACKAGE = str(Path(ea.__file__).parent)
_PLACES = ("loop.py", "runtime.py", "replay.py", "actor/", "vector/", "vector_env.py", "rollout/")
_FOLDERS = tuple(f"{_PACKAGE}/{name}" for name in _PLACES)
# How many lines of the library run until the interrupt, on average.
_LINES = 60


class InterruptedInside(BaseException):
    """Raised by a signal handler while the library runs."""


class Interrupter:
    """Interrupts the user at a random line of the library.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    @contextlib.contextmanager
    def armed(self, handler: Callable[[], object] | None) -> Iterator[None]:
        """Interrupt what runs in this context, once, if it runs long enough.

        Args:
            handler: Runs at that line; None to raise `InterruptedInside` there.
        """
        world = self._world
        left = int(world.random.expovariate(1 / _LINES)) + 1

        def enter(frame: FrameType, event: str, argument: object) -> Any:
            is_of_user = world.context == "user" and frame.f_code.co_filename.startswith(_FOLDERS)
            # Python only prints an exception of a finalizer.
            return on_line if is_of_user and frame.f_code.co_name != "__del__" else None

        def on_line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if event != "line" or left <= 0 or frame.f_lasti in with_exits(frame.f_code):
                return on_line
            left -= 1
            if left == 0:
                sys.settrace(None)
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                if handler is None:
                    world.note(f"a signal handler raises at {where}")
                    raise InterruptedInside
                world.note(f"a signal handler runs at {where}")
                handler()
            return on_line

        sys.settrace(enter)
        try:
            yield
        finally:
            left = 0
            sys.settrace(None)
