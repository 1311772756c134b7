"""Interrupts of the user at any line of the library: a signal handler that raises, or that uses the vector."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import envactors as ea
from simulation.world import World

_PACKAGE = str(Path(ea.__file__).parent)
_PLACES = ("loop.py", "runtime.py", "replay.py", "actor/", "vector/", "vector_env.py", "rollout/")
_FOLDERS = tuple(f"{_PACKAGE}/{name}" for name in _PLACES)
# How many lines of the library run until the interrupt, on average.
_LINES = 60


class InterruptedInside(BaseException):
    """Raised by a signal handler while the library runs."""


@functools.lru_cache(None)
def with_exits(code: CodeType) -> set[int]:
    """Return the offsets at which a code object leaves ``with`` blocks.

    Python reports the line of the ``with`` statement again there. No signal handler runs at that point, before the
    context is left.
    """
    found, instructions = set(), list(dis.get_instructions(code))
    for place, one in enumerate(instructions[:-2]):
        others = instructions[place + 1 : place + 3]
        is_first = one.opname == "LOAD_CONST" and one.argval is None
        if is_first and all(i.opname == "DUP_TOP" or (i.opname == "LOAD_CONST" and i.argval is None) for i in others):
            found.add(one.offset)
            before = instructions[place - 1]
            if before.opname in ("SWAP", "ROT_TWO", "ROT_THREE"):  # a ``return`` in the block
                found.add(before.offset)
    return found


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
