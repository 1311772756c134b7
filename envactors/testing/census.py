"""The processes of a storm: its workers, and the children that they leave running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psutil

from envactors.actor.handle import ActorHandle
from envactors.testing.leaks import describe
from envactors.testing.sabotage import Orders
from envactors.testing.tally import Tally

CHILD_PATIENCE = 5.0  # seconds after which a process whose parent has died must be gone
_GLANCE = 0.05


class Census:
    """Keeps track of processes, and counts and ends those that live too long.

    Args:
        actors: Whose workers they are.
        orders: Where envs note the children that they leave running.
        tally: Where leaks are counted.
        stall: How long a worker may outlive leaving a child behind, in seconds.
    """

    def __init__(self, actors: Sequence[ActorHandle], orders: Orders, tally: Tally, stall: float) -> None:
        self._actors = actors
        self._orders = orders
        self._tally = tally
        self._stall = stall
        self._workers: dict[int, psutil.Process] = {}
        self._children: list[tuple[psutil.Process, float]] = []

    def remember(self, pid: int | None) -> None:
        """Takes a worker in."""
        if pid is not None and pid not in self._workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._workers[pid] = psutil.Process(pid)

    def look(self) -> None:
        """Takes in whoever has come, and looks for children that should be gone."""
        now = time.monotonic()
        for actor in self._actors:
            self.remember(actor.pid)
        for env_id in range(self._orders.num_envs):
            pid = self._orders.take_child(env_id)
            if pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child = psutil.Process(pid)
                    if self._orders.path in child.cmdline():  # and not another that has its number now
                        self._children.append((child, now + self._stall))
        for child, since in list(self._children):
            if not _is_alive(child):
                self._children.remove((child, since))
            elif now > since + CHILD_PATIENCE:
                self._children.remove((child, since))
                self._leak(child)

    def close(self) -> None:
        """Looks for processes that should be gone, once the envs are closed."""
        deadline = time.monotonic() + CHILD_PATIENCE
        left = [*self._workers.values(), *(child for child, _ in self._children)]
        while (left := [process for process in left if _is_alive(process)]) and time.monotonic() < deadline:
            time.sleep(_GLANCE)
        for process in left:
            self._leak(process)

    def _leak(self, process: psutil.Process) -> None:
        self._tally.leaks.append(f"process {process.pid}: {describe(process.pid)}")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
