"""An asyncio event loop in a simulated world: instead of sleeping, it lets the world continue."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any

from simulation.world import Violation, World

# How likely something happens between two callbacks of the loop.
_BETWEEN = 0.3


class WorldSelector(selectors.SelectSelector):
    """What the loop sleeps in. No descriptor is ever ready: callbacks reach the loop without its pipe.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[Any]:
        world = self._world
        if timeout is not None and timeout <= 0:
            if world.chance(_BETWEEN):
                world.step(world.now)
        elif not world.step(None if timeout is None else world.now + timeout):
            raise Violation("a task waits for what never comes")
        return []


class WorldTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash does not depend on its address, so that sets of tasks have the same order in each run."""

    numbers = itertools.count()

    def __init__(self, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = next(self.numbers)
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class WorldEventLoop(asyncio.SelectorEventLoop):
    """The event loop of the user's thread.

    Args:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        super().__init__(WorldSelector(world))
        WorldTask.numbers = itertools.count()
        self.set_task_factory(lambda loop, coroutine, **options: WorldTask(coroutine, loop=loop, **options))

    def _write_to_self(self) -> None:
        """Do nothing: the loop is not asleep while other threads of the world run."""
