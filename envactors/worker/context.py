"""The current actor, whose env code is running; `envactors.current_actor` for users.

Also counts forks, so that a worker notices that env code has forked it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextvars import ContextVar


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """The actor whose code is running.

    Attributes:
        name: The actor's name.
        index: The index of the env whose code is running.
        incarnation: Which process of the actor it is: 0 for the first, and one more for each replacement.
    """

    name: str
    index: int
    incarnation: int


# Returns the context of the env that runs in this thread; see `envactors.worker.host.Host.running`.
of_thread: ContextVar[Callable[[], ActorContext | None] | None] = ContextVar("envactors_worker", default=None)
# The same for a process that works for one actor only, so that threads that env code starts see it too.
of_process: Callable[[], ActorContext | None] | None = None
# How many forks lie between this process and the one that imported this module. If the count changes in a worker, env
# code has forked and this process is the copy. A variable rather than a function, since every step reads it.
forks: int = 0


def current_actor() -> ActorContext | None:
    """Return the actor whose env code is running; None outside a worker."""
    running = of_thread.get() or of_process
    return None if running is None else running()


def _count_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(after_in_child=_count_fork)
