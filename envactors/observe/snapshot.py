"""How the actors of this process stand, in terms of JSON."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

from envactors.actor import engine
from envactors.actor.states import ActorStats
from envactors.actor.supervisor import Supervisor
from envactors.mailbox.durations import Durations, summarize
from envactors.vector.statistics import VectorStatistics, all_statistics

# Of the text of a failure, in characters.
_LONGEST_FAILURE = 500
# Each vector keeps its number, so that a client finds it again in the next snapshot.
_numbers: WeakKeyDictionary[VectorStatistics, int] = WeakKeyDictionary()
_next_number = itertools.count()


class ActorSnapshot(TypedDict):
    """One actor; the names without a description are those of `envactors.ActorStats`.

    Attributes:
        key: A number that no other actor of the program has.
        name: Its name.
        vector: The number of its vector; None if it is in none.
        envs: How many envs it has.
        last_failure: The first line of the error, None if there was none.
        steps: How many steps its envs have taken since times are taken; without a vector how many calls have ended.
        p50: The median of their durations in the middle one of its envs, in seconds; None without any.
        p99: What 99 of a hundred steps of its slowest env did not exceed, in seconds; None without any.
    """

    key: int
    name: str
    vector: int | None
    envs: int
    state: str
    pid: int | None
    node: str | None
    incarnation: int
    method: str | None
    elapsed: float
    rss: int
    restarts: int
    completed: int
    failed: int
    queued: int
    last_failure: str | None
    started_in: float | None
    steps: int
    p50: float | None
    p99: float | None


class VectorSnapshot(TypedDict):
    """One vector env.

    Attributes:
        number: Its number, which no other vector of the program has had.
        envs: How many envs it has.
        steps: The steps of all of them.
        episodes: Their episodes.
        where: Where the time goes, in one line.
    """

    number: int
    envs: int
    steps: int
    episodes: int
    where: str


class Snapshot(TypedDict):
    """A program.

    Attributes:
        pid: Its process id.
        command: Its command line.
        at: When the snapshot was taken (`time.monotonic`), in seconds.
        vectors: Its vector envs.
        actors: Its actors that are not closed.
    """

    pid: int
    command: list[str]
    at: float
    vectors: list[VectorSnapshot]
    actors: list[ActorSnapshot]


def take_snapshot() -> Snapshot:
    """Return how the actors of this process stand; the first time, begin to take times where envs run."""
    members = [member for member in engine.members() if isinstance(member, Supervisor)]
    vectors: list[VectorSnapshot] = []
    actors: list[ActorSnapshot] = []
    left = {id(member): member for member in members}
    for number, vector in _open_vectors(set(left)):
        stats = vector.collect()
        where = str(stats) if stats.wait_seconds + stats.caller_seconds else "nothing was timed yet"
        durations = iter(stats.step_seconds)
        for handle, of_actor in zip(vector.actors, stats.actors, strict=True):
            member = handle._supervisor
            steps = list(itertools.islice(durations, len(member.config.start.factories)))
            if left.pop(id(member), None) is not None:
                actors.append(_snapshot_of(member, number, of_actor, steps))
        counts: dict[str, Any] = {"steps": sum(stats.steps), "episodes": sum(stats.episodes), "where": where}
        vectors.append({"number": number, "envs": len(stats.steps), **counts})  # type: ignore[typeddict-item]
    actors += [
        _snapshot_of(one, None, one.stats(), [steps for steps, _ in summarize(one.core.histograms())])
        for one in left.values()
    ]
    actors.sort(key=lambda actor: (actor["vector"] is None, actor["vector"] or 0, actor["name"]))
    command = [*getattr(sys, "orig_argv", sys.argv)]
    return {"pid": os.getpid(), "command": command, "at": time.monotonic(), "vectors": vectors, "actors": actors}


def _open_vectors(alive: set[int]) -> list[tuple[int, VectorStatistics]]:
    """Return the vectors that have living actors, with their numbers and in their order."""
    is_open = [one for one in all_statistics() if any(id(actor._supervisor) in alive for actor in one.actors)]
    # Those that are new are numbered in the order of their processes, which mostly is that of their making.
    for vector in sorted(is_open, key=lambda one: min(actor.pid or sys.maxsize for actor in one.actors)):
        if vector not in _numbers:
            _numbers.setdefault(vector, next(_next_number))  # another client's thread may have been faster
    return sorted(((_numbers[vector], vector) for vector in is_open), key=lambda pair: pair[0])


def find_actors(name: str | None = None, key: int | None = None) -> list[Supervisor]:
    """Return the actors of this process that have a name, or a key; None for any."""
    members = [member for member in engine.members() if isinstance(member, Supervisor)]
    found = [one for one in members if name in (None, one.config.name) and key in (None, id(one))]
    return sorted(found, key=lambda one: one.config.first_index)


def _snapshot_of(actor: Supervisor, vector: int | None, stats: ActorStats, steps: list[Durations]) -> ActorSnapshot:
    timed = [one for one in steps if one.count]
    failure = None
    if stats.last_failure is not None:
        failure = str(stats.last_failure).partition("\n")[0][:_LONGEST_FAILURE]
    return {
        "key": id(actor),
        "name": actor.config.name,
        "vector": vector,
        "envs": len(actor.config.start.factories),
        "state": stats.state.value,
        "pid": stats.pid,
        "node": stats.node,
        "incarnation": stats.incarnation,
        "method": stats.method,
        "elapsed": stats.elapsed,
        "rss": stats.rss,
        "restarts": stats.restarts,
        "completed": stats.completed,
        "failed": stats.failed,
        "queued": stats.queued,
        "last_failure": failure,
        "started_in": stats.started_in,
        "steps": _total(steps) if vector is not None else stats.completed,
        "p50": statistics.median(one.p50 for one in timed) if timed else None,
        "p99": max(one.p99 for one in timed) if timed else None,
    }


def _total(steps: list[Durations]) -> int:
    return sum(one.count for one in steps)
