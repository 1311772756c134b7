"""The nodes of a backend while actors use it, and the workers that wait for room on a node."""

from __future__ import annotations

import logging
import threading
import time

from envactors.loop import Timer
from envactors.remote.launching import NodeAddress, NodeRegistry, connect
from envactors.remote.node import Node
from envactors.remote.notices import log_node
from envactors.remote.worker import Host, RemoteWorker
from envactors.runtime import Runtime

# How long to wait for the expected nodes after the first one has joined, in seconds.
_JOINING_PATIENCE = 15.0


class Session(NodeRegistry):
    """The nodes of a backend, and the placement of its workers.

    Args:
        envs_per_node: How many envs a node may have; None sets no limit.
        lease: The length of the lease, in seconds.
        runtime: Its loop watches the links.

    Attributes:
        nodes: The nodes that have joined, including lost ones whose lease is not over.
        runtime: As above.
    """

    def __init__(self, envs_per_node: int | None, lease: float, runtime: Runtime) -> None:
        self.nodes: tuple[Node, ...] = ()
        self._envs_per_node = envs_per_node
        self._lease = lease
        self.runtime = runtime
        self._lock = threading.RLock()
        self._waiting: list[RemoteWorker] = []
        # Why a node could not be used, by name.
        self._refusals: dict[str, str] = {}
        self._ended = False
        # How many expected nodes have neither joined nor been refused, and when workers stop waiting for them.
        self._expected = 0
        self._patience: Timer | None = None

    # Nodes -----------------------------------------------------------------------------------------------

    def expect_nodes(self, count: int) -> None:
        """Wait for this many more nodes before workers are placed."""
        with self._lock:
            self._expected += count

    def add_node(self, address: NodeAddress) -> None:
        """Use a node whose agent waits at this address."""
        threading.Thread(target=self._join, args=(address,), name="envactors-joining", daemon=True).start()

    def refuse_node(self, name: str, reason: str) -> None:
        """Record why a node cannot be used; log it, unless its agent was told to end."""
        if not self._ended:
            log_node(self.runtime, logging.WARNING, name, "node %s cannot be used: %s", name, reason)
        with self._lock:
            self._refusals[name] = reason
        self._count_expected()

    def _count_expected(self) -> None:
        with self._lock:
            self._expected = max(0, self._expected - 1)
            if self.nodes and self._patience is None:
                ends_at = time.monotonic() + _JOINING_PATIENCE
                self._patience = self.runtime.loop.call_at(ends_at, self._stop_expecting)
        self._place_waiting()

    def _stop_expecting(self) -> None:
        """Stop waiting for expected nodes."""
        with self._lock:
            self._expected = 0
        self._place_waiting()

    def _join(self, address: NodeAddress) -> None:
        try:
            link = connect(address)
        except Exception as error:  # also if the launcher's address is wrong
            self.refuse_node(address.name, f"its agent at {address.host}:{address.port}: {error}")
            return
        with self._lock:
            if self._ended:
                link.close()
                return
            try:
                node = Node(address.name, link, self._lease, self.runtime, self._on_change)
            except Exception as error:
                link.close()
                self.refuse_node(address.name, f"its link cannot be watched: {error!r}")
                return
            self.nodes = (*self.nodes, node)
        log_node(self.runtime, logging.INFO, address.name, "node %s has joined", address.name)
        self._count_expected()

    def _on_change(self, node: Node) -> None:
        with self._lock:
            if node.is_over:
                self.nodes = tuple(one for one in self.nodes if one is not node)
        self._place_waiting()

    # Workers ---------------------------------------------------------------------------------------------

    def launch(self, worker: RemoteWorker) -> None:
        """Start a worker as soon as a node has room for it."""
        with self._lock:
            self._waiting.append(worker)
        self._place_waiting()

    def _place_waiting(self) -> None:
        with self._lock:
            for worker in () if self._expected else tuple(self._waiting):
                node = self.find_room(worker.envs, worker.home)
                if node is not None:
                    self._waiting.remove(worker)
                    try:
                        node.place(worker)
                    except Exception as error:  # such as too little memory to send the memory of its vector
                        worker.refuse(OSError(f"node {node.name!r} cannot be sent the worker: {error!r}"))

    def find_room(self, envs: int, home: Host | None = None) -> Node | None:
        """Return the node with the fewest envs that has room for this many more. Takes no lock.

        Args:
            envs: The number of envs.
            home: The node to return if it is being drained, and no other one has room.
        """
        most = self._envs_per_node
        fit = [node for node in self.nodes if not node.is_lost and (most is None or node.envs + envs <= most)]
        fit = [node for node in fit if not node.draining] or [node for node in fit if node is home]
        return min(fit, key=lambda node: node.envs, default=None)

    def kill(self, worker: RemoteWorker) -> None:
        """End a worker that was not placed, because no node had room for it."""
        with self._lock:
            is_waiting = worker in self._waiting
            if is_waiting:
                self._waiting.remove(worker)
        if is_waiting:
            worker.refuse(OSError(self._describe_room(worker.envs)))
        elif worker.node is not None:
            worker.kill()  # another thread has placed it meanwhile

    def _describe_room(self, envs: int) -> str:
        limit = "" if self._envs_per_node is None else f" of {self._envs_per_node}"
        nodes = [
            f"{node.name} has {node.envs}{limit}{', is lost' * node.is_lost}{', is being drained' * node.draining}"
            for node in sorted(self.nodes, key=lambda node: node.name)
        ]
        nodes += [f"{name} cannot be used, {reason}" for name, reason in self._refusals.items()]
        there_is = "; ".join(nodes) if nodes else "no node has joined, or all are lost"
        return f"no node has room for {envs} more envs ({there_is}): add nodes, or raise envs_per_node"

    def end(self) -> None:
        """End all agents with their workers."""
        with self._lock:
            self._ended = True
            if self._patience is not None:
                self._patience.cancel()
            nodes, self.nodes = self.nodes, ()
        for node in nodes:
            node.end()
