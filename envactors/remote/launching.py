"""The interface between a backend and the launcher of its agents: options, addresses, connections."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from envactors.remote.greeting import PATIENCE, greet
from envactors.remote.link import Link
from envactors.remote.streams import make_stream


class AgentOptions(NamedTuple):
    """The options that a launcher passes to its agents.

    Attributes:
        lease: The length of the lease, in seconds.
        heartbeat: The interval between heartbeats, in seconds.
        process: Arguments for the `envactors.ProcessBackend` of each node.
    """

    lease: float
    heartbeat: float
    process: dict[str, Any]


class NodeAddress(NamedTuple):
    """The address at which an agent waits for its caller.

    Attributes:
        name: The name of the node.
        host: The address of the node.
        port: The agent's port.
        secret: The secret that both sides prove to know.
        epoch: Identifies the start of agents that it belongs to.
        tls: The caller's certificates; None for a link without encryption.
    """

    name: str
    host: str
    port: int
    secret: str
    epoch: str
    tls: ssl.SSLContext | None = None


class NodeRegistry(Protocol):
    """Receives a launcher's news about nodes; its methods may be called in any thread."""

    def expect_nodes(self, count: int) -> None:
        """Announce that this many nodes will be added or refused, so that actors are spread over all of them."""

    def add_node(self, address: NodeAddress) -> None:
        """Use a node whose agent waits at this address."""

    def refuse_node(self, name: str, reason: str) -> None:
        """Report why a node has no agent."""


class Launcher(Protocol):
    """Starts node agents."""

    def start(self, options: AgentOptions, nodes: NodeRegistry) -> Callable[[], object]:
        """Start the agents, and report nodes that join until they are stopped; must not block for long.

        If it raises, it has ended the agents that it had started.

        Returns:
            A function that ends what this call has started, and nothing else; agents with a caller end by themselves.
        """

    def count_cores(self) -> int:
        """Return how many cores the nodes have together.

        Raises:
            ValueError: No node has joined yet.
        """


def connect(address: NodeAddress) -> Link:
    """Return the link to an agent.

    Raises:
        OSError: The agent cannot be reached.
        GreetingError: The agent is not the right one, or refuses the caller.
    """
    sock = socket.create_connection((address.host, address.port), PATIENCE)
    try:
        stream = make_stream(sock, address.tls, server_side=False)
        stream.handshake()
        greet(stream, address.secret, address.epoch)
        return Link(stream)
    except BaseException:
        sock.close()
        raise
