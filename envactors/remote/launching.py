"""What is between a backend and what starts its agents: options, addresses, and the connection to an agent."""

from __future__ import annotations

import socket
import ssl
from typing import Any, NamedTuple, Protocol

from envactors.remote.greeting import PATIENCE, greet
from envactors.remote.link import Link
from envactors.remote.streams import make_stream


class AgentOptions(NamedTuple):
    """What a launcher tells its agents.

    Attributes:
        lease: The length of the lease, in seconds.
        heartbeat: How often an agent sends a heartbeat, in seconds.
        process: Arguments for the `envactors.ProcessBackend` of each node.
    """

    lease: float
    heartbeat: float
    process: dict[str, Any]


class NodeAddress(NamedTuple):
    """Where an agent waits for its caller.

    Attributes:
        name: The name of the node.
        host: Its address.
        port: The agent's port.
        secret: What both prove to know.
        epoch: Which start of agents it belongs to.
        tls: The caller's certificates; None for a link that is not encrypted.
    """

    name: str
    host: str
    port: int
    secret: str
    epoch: str
    tls: ssl.SSLContext | None = None


class NodeRegistry(Protocol):
    """What a launcher tells of nodes; its methods may be called in any thread."""

    def expect_nodes(self, count: int) -> None:
        """Say that so many nodes are about to be added or refused, so that actors are spread over all of them."""

    def add_node(self, address: NodeAddress) -> None:
        """Use a node whose agent waits at this address."""

    def refuse_node(self, name: str, reason: str) -> None:
        """Say that there is no agent on a node, and why."""


class Launcher(Protocol):
    """Starts node agents."""

    def start(self, options: AgentOptions, nodes: NodeRegistry) -> None:
        """Start the agents, and go on telling of nodes that join, until `stop`; must not block for long."""

    def count_cores(self) -> int:
        """Return how many cores the nodes have together.

        Raises:
            ValueError: There are no nodes yet.
        """

    def stop(self) -> None:
        """End what `start` has begun; agents that have a caller end by themselves."""


def connect(address: NodeAddress) -> Link:
    """Return the link to an agent.

    Raises:
        OSError: It cannot be reached.
        GreetingError: It is not the right one, or refuses.
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
