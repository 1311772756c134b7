"""Watch over the processes of a chaos run: its workers, and the children that env code leaves running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psutil
from leaks import describe

from chaos.checker import Limits
from chaos.faults import FaultTable
from chaos.report import ReportBuilder
from envactors.actor.handle import ActorHandle

# Seconds within which a child process must end after its worker has crashed.
CHILD_PATIENCE = 5.0
_POLL_SECONDS = 0.05


class ProcessWatch:
    """Tracks worker and child processes; reports and kills those that live too long.

    Args:
        actors: Handles whose workers are watched.
        fault_table: Table in which envs record the children that they leave running.
        report_builder: Receives the leaks.
        limits: Limits of time; a worker may live on for a stall after it has left a child behind.
    """

    def __init__(
        self, actors: Sequence[ActorHandle], fault_table: FaultTable, report_builder: ReportBuilder, limits: Limits
    ) -> None:
        self._actors = actors
        self._fault_table = fault_table
        self._report = report_builder
        self._limits = limits
        self._workers: dict[int, psutil.Process] = {}
        self._children: list[tuple[psutil.Process, float]] = []

    def add_worker(self, pid: int | None) -> None:
        """Watch a worker process."""
        if pid is not None and pid not in self._workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._workers[pid] = psutil.Process(pid)

    def update(self) -> None:
        """Add new workers and children, and report children that should have ended."""
        now = time.monotonic()
        for actor in self._actors:
            self.add_worker(actor.pid)
        for env_id in range(self._fault_table.num_envs):
            pid = self._fault_table.take_child(env_id)
            if pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child = psutil.Process(pid)
                    if self._fault_table.path in child.cmdline():  # not another process that reuses the pid
                        self._children.append((child, now + self._limits.stall))
        for child, since in list(self._children):
            if not _is_alive(child):
                self._children.remove((child, since))
            elif self._is_overdue(since):
                self._children.remove((child, since))
                self._leak(child)

    def close(self) -> None:
        """Report processes that are left once the envs are closed."""
        begun = time.monotonic()
        left = [*self._workers.values(), *(child for child, _ in self._children)]
        while (left := [process for process in left if _is_alive(process)]) and not self._is_overdue(begun):
            time.sleep(_POLL_SECONDS)
        for process in left:
            self._leak(process)

    def _is_overdue(self, since: float) -> bool:
        """Return whether what had to end since then (`time.monotonic`) should be gone."""
        elapsed = time.monotonic() - since
        return elapsed > CHILD_PATIENCE and elapsed > CHILD_PATIENCE + self._limits.lateness(since)

    def _leak(self, process: psutil.Process) -> None:
        self._report.leaks.append(f"process {process.pid}: {describe(process.pid)}")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
