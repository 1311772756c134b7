"""Data that `envactors top` shows: the difference of two snapshots, and the system's view of the processes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import psutil

from envactors.cli.monitored import one_line, printable
from envactors.cli.units import count

# How messages of `envactors.ActorError` begin; the table says already which actor it is.
_WHO = re.compile(r"actor '[^']*' \([^)]*\) ")


@dataclasses.dataclass(frozen=True)
class ActorRow:
    """One actor.

    Attributes:
        key: A number that no other actor of the program has.
        name: Its name.
        vector: The number of its vector; None if it is in none.
        state: Its state, with ", stopped" if its process is.
        method: The running method; None while idle.
        age: How long it has been running or idle, in seconds.
        rate: Steps per second since the snapshot before; None without one.
        p50: The median duration of a step, in seconds; None if none was timed.
        p99: What 99 of a hundred steps did not exceed, in seconds; None if none was timed.
        rss: The memory of its process, in bytes.
        cpu: The processor time of its process since the snapshot before, in percent; None if that is not known.
        restarts: How many of its processes replaced a lost one.
        node: The node that its process runs on; None for this machine.
        failure: The first line of its last failure; None if there was none.
    """

    key: int
    name: str
    vector: int | None
    state: str
    method: str | None
    age: float
    rate: float | None
    p50: float | None
    p99: float | None
    rss: int
    cpu: float | None
    restarts: int
    node: str | None
    failure: str | None


@dataclasses.dataclass(frozen=True)
class Picture:
    """A program at one moment.

    Attributes:
        pid: Its process id.
        command: Its command line.
        state: The state of its process, in psutil's words.
        vectors: One line per vector env.
        steps: The steps of all of them.
        rows: One row per actor.
    """

    pid: int
    command: str
    state: str
    vectors: list[str]
    steps: int
    rows: list[ActorRow]


class Sampler:
    """Makes pictures of a program from one snapshot after the other."""

    def __init__(self) -> None:
        self._processes = Processes()
        # Of the snapshot before: when it was taken, and the steps of each actor.
        self._at = 0.0
        self._steps: dict[int, int] = {}

    def sample(self, snapshot: dict[str, Any]) -> Picture:
        """Return the picture of a snapshot; see `envactors.observe.snapshot.Snapshot`."""
        actors = snapshot["actors"]
        seconds = snapshot["at"] - self._at
        self._processes.refresh(
            [snapshot["pid"], *(a["pid"] for a in actors if a["pid"] is not None and not a["node"])]
        )
        rows = [self._row(actor, seconds) for actor in actors]
        self._at = snapshot["at"]
        self._steps = {actor["key"]: actor["steps"] for actor in actors}
        return Picture(
            pid=snapshot["pid"],
            command=one_line(snapshot["command"]),
            state=self._processes.state_of(snapshot["pid"]) or "unknown",
            vectors=[_vector_line(vector) for vector in snapshot["vectors"]],
            steps=sum(vector["steps"] for vector in snapshot["vectors"]),
            rows=rows,
        )

    def _row(self, actor: dict[str, Any], seconds: float) -> ActorRow:
        before = self._steps.get(actor["key"])
        local = actor["pid"] if not actor["node"] else None
        is_stopped = self._processes.state_of(local) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        failure = actor["last_failure"]
        return ActorRow(
            key=actor["key"],
            name=printable(actor["name"]),
            vector=actor["vector"],
            state=actor["state"] + (", stopped" if is_stopped else ""),
            method=None if actor["method"] is None else printable(actor["method"]),
            age=actor["elapsed"],
            # A restart can lose counts.
            rate=None if before is None or seconds <= 0 else max(0, actor["steps"] - before) / seconds,
            p50=actor["p50"],
            p99=actor["p99"],
            rss=actor["rss"],
            cpu=self._processes.cpu_of(local),
            restarts=actor["restarts"],
            node=actor["node"],
            failure=None if failure is None else _WHO.sub("", printable(failure), count=1),
        )


class Processes:
    """Processes of this machine, as psutil sees them."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._seen: dict[int, tuple[str, float | None]] = {}

    def refresh(self, pids: list[int]) -> None:
        """Read the states of these processes, and forget all others."""
        wanted = set(pids)
        self._seen = {}
        self._known = {pid: process for pid, process in self._known.items() if pid in wanted}
        for pid in wanted:
            is_new = pid not in self._known
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process = self._known.setdefault(pid, psutil.Process(pid))
                cpu = process.cpu_percent()  # the first value is meaningless
                self._seen[pid] = process.status(), None if is_new else cpu

    def state_of(self, pid: int | None) -> str | None:
        """Return the state that a process had, None if it is not known."""
        return self._seen[pid][0] if pid in self._seen else None

    def cpu_of(self, pid: int | None) -> float | None:
        """Return the processor time that it took between the last two refreshes, in percent; None if unknown."""
        return self._seen[pid][1] if pid in self._seen else None


def _vector_line(vector: dict[str, Any]) -> str:
    counts = f"{count(vector['envs'], 'env')}, {vector['steps']:,} steps, {vector['episodes']:,} episodes"
    return printable(f"vector {vector['number']}: {counts}; {vector['where']}")
