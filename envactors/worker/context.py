"""The current actor: whose env code is running."""

from __future__ import annotations

import dataclasses
import os
from contextvars import ContextVar

from envactors.wire.control_page import ENV_INDEX, ControlPage


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """The actor whose code is running.

    Attributes:
        name: The actor's name.
        index: The index of the env whose code is running.
        incarnation: The number of the process: 0 for the first, and one more for each replacement.
    """

    name: str
    index: int
    incarnation: int


class WorkerEnvs:
    """The envs of one worker, one of which runs at a time; the control page says which.

    Attributes:
        contexts: One context per env that is made, or being made.
    """

    def __init__(self, page: ControlPage) -> None:
        self.contexts: list[ActorContext] = []
        self._counters = page.counters

    @property
    def running(self) -> ActorContext | None:
        """The context of the env that runs, or ran last; None before the first."""
        return self.contexts[self._counters[ENV_INDEX]] if self.contexts else None


# The envs that the current thread runs, unless the process is one actor's alone.
_current: ContextVar[WorkerEnvs | None] = ContextVar("envactors_worker_envs", default=None)
# The envs of a process that is one actor's alone: threads that env code starts see them too.
_process_wide: WorkerEnvs | None = None
_is_worker_process = False
# How many forks lie between this process and the one that imported this module. If the number changes in a worker, env
# code has forked and this process is the copy. A variable rather than a function, since it is read in every step.
forks = 0


def current_actor() -> ActorContext | None:
    """Return the actor whose env code is running; None outside a worker."""
    envs = _current.get() or _process_wide
    return None if envs is None else envs.running


def own_process() -> None:
    """Declare that this process belongs to one actor alone."""
    global _is_worker_process
    _is_worker_process = True


def enter(envs: WorkerEnvs | None) -> WorkerEnvs | None:
    """Set the envs that this thread runs, or this process if it is one actor's alone; return the previous ones."""
    global _process_wide
    if _is_worker_process:
        before, _process_wide = _process_wide, envs
    else:
        before = _current.get()
        _current.set(envs)
    return before


def _count_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(after_in_child=_count_fork)
