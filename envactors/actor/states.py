"""What an actor is made of, and the states that it goes through."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping

from envactors.actor.incarnation import Incarnation
from envactors.backends.base import Backend
from envactors.errors import ActorError
from envactors.options import Deadlines, RestartPolicy
from envactors.system import STORES_IN_ORDER, SharedFile
from envactors.wire.messages import Start


class ActorState(enum.Enum):
    """What an actor is doing."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    RENEWING = "renewing"
    DEAD = "dead"
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True)
class ActorStats:
    """Counts over an actor's life.

    Attributes:
        completed: Calls that returned or raised.
        failed: Calls that a death, a deadline or an abort ended.
        restarts: Processes that replaced a lost one.
        stale_replies: Replies that matched no running call and were dropped.
        queued: Calls that wait now.
        last_failure: The last process's death or the last failed start, None where there was none.
    """

    completed: int
    failed: int
    restarts: int
    stale_replies: int
    queued: int
    last_failure: ActorError | None


class Phase(enum.Enum):
    """Where an actor stands; drawn in `envactors.actor.supervisor`."""

    LAUNCHING = enum.auto()
    LIVE = enum.auto()
    STOPPING = enum.auto()
    ENDING = enum.auto()
    BACKOFF = enum.auto()
    DEAD = enum.auto()
    CLOSED = enum.auto()


# Before Python 3.12 an enum takes as long as a call to look a member up: on the way of every step it is done once.
LAUNCHING, LIVE, STOPPING, ENDING, BACKOFF, DEAD, CLOSED = Phase


class Verdict(enum.Enum):
    """Why the parent itself ends a process."""

    TIMEOUT = enum.auto()
    ABORT = enum.auto()
    RENEW = enum.auto()
    CONDEMNED = enum.auto()
    CLOSE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an actor is made of.

    ``max_journal`` is how many steps of each env are kept to be replayed, None where nothing is; ``take_standby``
    gives a process that was started for whoever loses its own (`envactors.actor.standbys.Standbys.take`).
    """

    name: str
    backend: Backend
    start: Start
    deadlines: Deadlines
    restart: RestartPolicy
    env_vars: Mapping[str, str]
    shared: SharedFile | None = None
    max_journal: int | None = None
    take_standby: Callable[[float], Incarnation | None] | None = None

    @functools.cached_property
    def spin(self) -> bool:
        """Whether to look with open eyes before sleeping: where stores keep their order."""
        return self.backend.spin and STORES_IN_ORDER
