"""JSON-serializable snapshots of this process's actors."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from typing import Any

from envactors import runtime
from envactors.actor.base import ActorBase
from envactors.actor.states import ActorStats
from envactors.mailbox.durations import Durations
from envactors.vector_stats import all_statistics

# Of the text of a failure, in characters.
_LONGEST_FAILURE = 500
# Number of actors whose stacks are read at a time.
_MOST_READ = 32
# Least time for the stacks of an actor, in seconds, even if the others took all of the time.
_LEAST_WAIT = 0.1


def find_actors() -> dict[ActorBase, int]:
    """Return the actors of this process that have not ended, in the order in which they were made, with serials."""
    members = runtime.members().items()
    return {member: serial for member, serial in members if isinstance(member, ActorBase)}


def take_snapshot() -> dict[str, Any]:
    """Return the state of this process's actors; the first time, begin to measure times where envs run.

    Returns:
        The ``pid`` and ``command`` line of the process; the time ``at`` which the snapshot was taken
        (`time.monotonic`); for each of the ``vectors`` its ``serial``, its numbers of ``envs``, ``steps``, and
        ``episodes``, and ``where`` its time goes, in one line; and for each of the ``actors`` the fields of
        `envactors.ActorStats`, its ``serial``, its ``name``, the serial of its ``vector``, its number of ``envs``, and
        of their ``steps`` the count and the durations ``p50`` (of the median env) and ``p99`` (of the slowest one),
        None without any.
    """
    vectors, actors = [], []
    left = find_actors()
    for vector in all_statistics():
        members = [handle._actor for handle in vector.actors]
        if left.keys().isdisjoint(members):
            continue  # it is closed
        stats = vector.collect()
        durations = iter(stats.step_seconds)
        for actor, of_actor in zip(members, stats.actors, strict=True):
            steps = [next(durations) for _ in actor.config.indices]
            serial = left.pop(actor, None)
            if serial is not None:
                counted = {"serial": serial, "vector": vector.serial, "steps": sum(one.count for one in steps)}
                actors.append(_describe(actor.name, of_actor, steps) | counted)
        where = str(stats) if stats.wait_seconds + stats.caller_seconds else "nothing was timed yet"
        counts = {"envs": len(stats.steps), "steps": sum(stats.steps), "episodes": sum(stats.episodes)}
        vectors.append({"serial": vector.serial, **counts, "where": where})
    for lone, serial in left.items():
        stats_of_one = lone.stats()
        of_lone = {"serial": serial, "vector": None, "steps": stats_of_one.completed}
        actors.append(_describe(lone.name, stats_of_one, [Durations()]) | of_lone)
    command = [*getattr(sys, "orig_argv", sys.argv)]
    return {"pid": os.getpid(), "command": command, "at": time.monotonic(), "vectors": vectors, "actors": actors}


def _describe(name: str, stats: ActorStats, steps: list[Durations]) -> dict[str, Any]:
    timed = [one for one in steps if one.count]
    failure = stats.last_failure
    return {
        **vars(stats),
        "name": name,
        "envs": len(steps),
        "state": stats.state.value,
        "last_failure": None if failure is None else str(failure).partition("\n")[0][:_LONGEST_FAILURE],
        "p50": statistics.median(one.p50 for one in timed) if timed else None,
        "p99": max(one.p99 for one in timed) if timed else None,
    }


def take_stacks(name: str | None, seconds: float) -> list[dict[str, Any]]:
    """Return the stacks of the actors with a name, or of all if it is None.

    Args:
        name: The name.
        seconds: How long to wait for them.

    Returns:
        The ``name``, ``pid``, ``node``, ``state``, running ``method``, its ``elapsed`` seconds, and the ``stacks`` of
        each actor.
    """
    actors = [actor for actor in find_actors() if name in (None, actor.name)]
    found: dict[ActorBase, str] = {}
    end = time.monotonic() + seconds
    unread = iter(actors)

    def read() -> None:
        for actor in unread:
            found[actor] = actor.stacks(max(_LEAST_WAIT, end - time.monotonic()))

    # No executor: the interpreter would wait for its threads when it exits.
    threads = [threading.Thread(target=read, name="envactors-monitor-stacks", daemon=True) for _ in actors[:_MOST_READ]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [{**_doing(actor), "stacks": found.get(actor, "")} for actor in actors]


def _doing(actor: ActorBase) -> dict[str, Any]:
    stats = actor.stats()
    doing = {name: getattr(stats, name) for name in ("pid", "node", "method", "elapsed")}
    return {"name": actor.name, "state": stats.state.value, **doing}
