"""The states of an actor, and what is counted of it."""

from __future__ import annotations

import dataclasses
import enum

from envactors.errors import ActorError


class ActorState(enum.Enum):
    """The state of an actor."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    RENEWING = "renewing"
    DEAD = "dead"
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True)
class ActorStats:
    """Counts over an actor's life, and its present activity.

    Attributes:
        completed: Calls that returned or raised.
        failed: Calls ended by a crash, a deadline, or an abort.
        restarts: Processes that replaced a lost one.
        stale: Replies that matched no running call and were dropped.
        queued: Calls that wait now.
        last_failure: The last crash or failed start, None if there was none.
        state: Its state.
        pid: The process id, None while there is no process.
        node: The node that runs the process; None on this machine.
        incarnation: The index of the process: 0 for the first, one more for each replacement.
        method: The method that runs; None if none does.
        elapsed: How long that method has been running, in seconds; 0.0 if none is.
        rss: Resident memory, in bytes; 0 while there is no process.
        started_in: How long the last start took, in seconds; None before the first.
        replays: How often an env was replayed by ``on_failure="replay"``.
        longest_replay: The longest replay, in seconds.
    """

    completed: int
    failed: int
    restarts: int
    stale: int
    queued: int
    last_failure: ActorError | None
    state: ActorState
    pid: int | None
    node: str | None
    incarnation: int
    method: str | None
    elapsed: float
    rss: int
    started_in: float | None
    replays: int
    longest_replay: float


class Phase(enum.Enum):
    """The phases of an actor's life cycle, drawn in `envactors.actor.lifecycle`."""

    LAUNCHING = enum.auto()  # a process is being started, or waits for its turn to be
    LIVE = enum.auto()  # the process answers requests
    STOPPING = enum.auto()  # CLOSE has been sent
    ENDING = enum.auto()  # the process is being killed
    BACKOFF = enum.auto()  # waits before the next start
    DEAD = enum.auto()  # the restart allowance is spent; a renewal revives it
    CLOSED = enum.auto()  # never changes again


# Before Python 3.12 looking up an enum's member costs as much as a call; these are read several times per step.
LAUNCHING, LIVE, STOPPING, ENDING, BACKOFF, DEAD, CLOSED = Phase


class EndReason(enum.Enum):
    """Why the parent itself ends a process."""

    TIMEOUT = enum.auto()  # a deadline passed
    ABORT = enum.auto()  # a call was aborted, or the user killed it
    RENEW = enum.auto()  # a renewal is running
    DISCARDED = enum.auto()  # an env of it raised, and on_failure wants a fresh process
    CLOSE = enum.auto()  # the actor is closed
