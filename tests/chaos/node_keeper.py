"""Keeper of the nodes of a run: ends those that are to end, and replaces those that are lost on a busy machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import envactors as ea
from envactors.remote import LocalNodes

_PAUSE = 0.1  # seconds between two looks
# The share of a lease by which the machine must have been late to explain the silence of a node.
_BUSY = 0.5


class NodeKeeper:
    """Looks after the nodes while the context lasts.

    On a busy machine an agent may not run for longer than its lease. The library then counts its node as lost, which is
    right; but without another node, the run would soon have none.

    Args:
        launcher: The nodes.
        backend: The backend that uses them.
        lease: Length of their lease, in seconds.
        lateness: See `chaos.machine_watch.MachineWatch.lateness`.

    Attributes:
        known: Names of all nodes that there have been so far.
        replaced: Names of the nodes that were lost although they were not to end.
        unexplained: Names of those that were lost while the machine was not that busy.
    """

    def __init__(
        self, launcher: LocalNodes, backend: ea.RemoteBackend, lease: float, lateness: Callable[[float], float]
    ) -> None:
        self.replaced: list[str] = []
        self.unexplained: list[str] = []
        self._launcher = launcher
        self._backend = backend
        self._lease = lease
        self._lateness = lateness
        self.known: set[str] = set()
        self._ended: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-nodes")

    def __enter__(self) -> NodeKeeper:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes that are not lost."""
        return self._backend.nodes

    def end(self, node: str, signum: int) -> None:
        """Signal the agent of a node, and have another node join in its place."""
        self._ended.add(node)
        self._launcher.add()
        os.kill(self._launcher.agents[node].pid, signum)

    def replace_lost(self) -> None:
        """Have a node join in the place of each one that was lost although it was not to end."""
        alive = set(self.nodes)
        for node in sorted(self.known - alive - self._ended):
            self._ended.add(node)
            self.replaced.append(node)
            if self._lateness(time.monotonic() - self._lease - _PAUSE) < _BUSY * self._lease:
                self.unexplained.append(node)
            self._launcher.add()
        self.known |= alive

    def _watch(self) -> None:
        while not self._over.wait(_PAUSE):
            self.replace_lost()
