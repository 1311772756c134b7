"""How an actor stands, read from outside: the env and its worker notice nothing."""

from __future__ import annotations

import dataclasses
import time

from envactors.actor.states import ActorStats
from envactors.actor.supervisor import Supervisor
from envactors.actor.watch import what_runs
from envactors.mailbox.durations import Histograms


def read_stats(actor: Supervisor) -> ActorStats:
    """Return counts over the actor's life and its present activity."""
    core = actor.core
    with core.change, core.lock:
        if actor.calls.rows is not None:
            actor.calls.rows.arrive_for_others()
        state, process = actor.current_state(), core.process
        queued, last = len(core.table.queue), actor.lifecycle.tracker.last
        counts = core.completed, core.failed, core.restarts, core.stale, queued, last, state, core.pid
        node = None if process is None else process.worker.node
        under_way, replays = _under_way(actor), (core.replays, core.longest_replay)
        stats = ActorStats(*counts, node, core.incarnation, *under_way, 0, core.started_in, *replays)
    if process is None:
        return stats
    rss = process.worker.resident_memory()  # not under the lock: it may take seconds, where ``ps`` has to tell
    return dataclasses.replace(stats, rss=rss if core.process is process else 0)


def _under_way(actor: Supervisor) -> tuple[str | None, float]:
    """Return the method that runs, and for how long, in seconds."""
    core, now = actor.core, time.monotonic()
    if core.process is None:
        return None, 0.0
    if core.table.running is not None:
        return core.table.running.method, now - core.table.running.started
    if not actor.calls.is_busy:
        return None, 0.0
    turn = what_runs(actor.calls, core.process)
    return turn.method, now - turn.since


def read_histograms(actor: Supervisor) -> Histograms:
    """Return how long each env's steps and resets have taken; see `envactors.actor.core.ActorCore.histograms`."""
    with actor.core.lock:
        return actor.core.histograms()


def read_stacks(actor: Supervisor, timeout: float) -> str:
    """Return the stacks of the worker's threads, or a line that says why there are none."""
    with actor.core.lock:
        process = actor.core.process
        asked = None if process is None or process.at_end else process.worker.ask_stacks()
    if asked is None:
        return f"actor {actor.config.name!r} has no process now: it is {actor.state.value}\n"
    return asked.wait(timeout)


def read_output(actor: Supervisor) -> dict[str, str]:
    """Return the last lines of each output stream of the present process, by stream; nothing if there is none."""
    with actor.core.lock:
        return {} if actor.core.process is None else actor.core.process.last_output
