"""The states and phases of an actor, and the counts that `ActorHandle.stats` returns."""

from __future__ import annotations

import dataclasses
import enum

from envactors.errors import ActorError


class ActorState(enum.Enum):
    """The state of an actor."""

    STARTING = "starting"  # its first process has not made its envs yet
    IDLE = "idle"  # it runs nothing; an actor of a pool may not have started a process yet
    BUSY = "busy"  # a call, a step, or another request is running
    RENEWING = "renewing"  # its process is being replaced, its start has failed, or a restart waits for its backoff
    DEAD = "dead"  # its process has ended; another one starts only if the user asks for one, or if a pool needs it
    CLOSED = "closed"  # it accepts no more calls, and its process has ended or was killed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorStats:
    """Counts over an actor's lifetime, and its current state.

    Attributes:
        completed: Requests that returned or raised: calls, resets, and steps, also those of rollouts, and the requests
            that the library makes itself, such as replays, snapshots, and orders to run a part of a rollout.
        failed: Calls, steps, and resets that ended with a crash, a deadline, or an abort, or that no process will run,
            since the actor is closed or dead, or their own process is gone. Those that a replay has made good do not
            count. A few requests of the library do, such as the one that saves the state of an env.
        restarts: Processes that replaced a lost one.
        restart_in: Seconds until the next one starts, by the backoff of `RestartPolicy`; None unless that is awaited.
        stale: Messages that were dropped: replies that matched no running call, and all of a former process.
        queued: Requests that are queued now, with those that the library makes itself.
        last_failure: The last crash or failed start; None if there was none.
        state: Its state.
        pid: The process id, for in-process actors that of the caller; None while there is no process.
        node: The node that runs the process; None on this machine.
        incarnation: The index of the process: 0 for the first, one more for each replacement.
        method: The running method; None if none is running, and for in-process actors.
        elapsed: How long that method has been running, in seconds.
        rss: Resident memory, in bytes; 0 while there is no process, and for in-process actors.
        started_in: How long the last start took, in seconds; None before the first, and for in-process actors.
        replays: How often an env was replayed by ``on_failure="replay"``.
        longest_replay: How long the longest replay took, in seconds.
    """

    completed: int = 0
    failed: int = 0
    restarts: int = 0
    restart_in: float | None = None
    stale: int = 0
    queued: int = 0
    last_failure: ActorError | None = None
    state: ActorState
    pid: int | None
    node: str | None
    incarnation: int
    method: str | None = None
    elapsed: float = 0.0
    rss: int = 0
    started_in: float | None = None
    replays: int = 0
    longest_replay: float = 0.0


class Phase(enum.Enum):
    """What an actor is doing with its process; `envactors.actor.actor.Actor` says what leads out of each phase.

    NEW ──▶ STARTING ──▶ LIVE ──▶ STOPPING ──▶ ENDING ──▶ STARTING, BACKOFF, DEAD, or CLOSED

    If the worker exits by itself, the actor is in ENDING while the exit is handled.
    """

    ASLEEP = enum.auto()  # it has no process, and starts one once it is woken
    NEW = enum.auto()  # the loop has not started a process yet
    STARTING = enum.auto()  # a process is being launched, or makes its envs
    LIVE = enum.auto()  # the process takes requests
    STOPPING = enum.auto()  # it takes no more requests, and closes its envs, or writes its stacks after a deadline
    ENDING = enum.auto()  # it was killed or has exited, if there was one; its end was not handled yet
    BACKOFF = enum.auto()  # the next process starts after a delay
    DEAD = enum.auto()  # no other process may start, unless the actor is renewed, woken, or killed with restart=True
    CLOSED = enum.auto()


# For code that runs once per call: before Python 3.12, looking up a member of an enum takes as long as a function call.
LIVE = Phase.LIVE
