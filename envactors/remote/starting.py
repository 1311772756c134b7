"""Starting node agents as processes of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import subprocess
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from envactors.remote.tls import Certificates
from envactors.system.interpreters import python_command, start_blocked
from envactors.system.sockets import sigpipe_blocked

# How long agents may take to end after they were told to, in seconds.
_END_PATIENCE = 2.0
# The exit code of an agent that nobody needs: its caller has told it to end, or no caller came.
NOT_NEEDED = 3


class AgentOrders(NamedTuple):
    """The orders that an agent gets at its start.

    Attributes:
        name: The name of its node.
        host: The address to listen at.
        secret: Proves that caller and agent belong together.
        epoch: Identifies the start of agents that it belongs to; a caller of another one is refused.
        lease: The length of the lease, in seconds.
        heartbeat: The interval between heartbeats, in seconds.
        options: Arguments for `envactors.ProcessBackend`.
        certificates: The node's certificates; None for a link without encryption.
        insecure: Whether it may listen without encryption where other machines reach it.
    """

    name: str
    host: str
    secret: str
    epoch: str
    lease: float
    heartbeat: float
    options: dict[str, Any]
    certificates: Certificates | None = None
    insecure: bool = False

    @classmethod
    def from_json(cls, text: str) -> AgentOrders:
        """Return the orders in a line from `start_agent`."""
        orders = cls(**json.loads(text))
        tls = orders.certificates
        return orders if tls is None else orders._replace(certificates=Certificates(*tls))

    def check_encryption(self) -> None:
        """Raise ValueError if other machines could connect without encryption, and nobody has allowed that."""
        if self.certificates is None and not (self.insecure or _is_loopback(self.host)):
            raise ValueError(
                f"without TLS, the node agent would accept connections from anyone at {self.host!r}: give it "
                "certificates (with Dask, start the cluster with security=...), or pass insecure=True in a network "
                "that you trust"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def start_agent(orders: AgentOrders) -> subprocess.Popen[bytes]:
    """Start an agent with this process's path; it ends with this process, or when its standard input is closed.

    Raises:
        OSError: The process cannot be started.
        ValueError: Other machines could connect to the agent without encryption.
    """
    orders.check_encryption()
    # The secret goes through the pipe, since all users of the machine can read command lines.
    command = python_command("envactors.remote.agent", "main", {}, None)
    line = json.dumps(orders._asdict(), default=os.fspath) + "\n"
    agent = start_blocked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin is not None, "a pipe"
    with sigpipe_blocked(), contextlib.suppress(BrokenPipeError):  # `read_port` reports it
        agent.stdin.write(line.encode())
        agent.stdin.flush()
    return agent


def read_port(agent: subprocess.Popen[bytes]) -> int:
    """Wait until an agent listens, and return its port.

    Raises:
        ChildProcessError: The agent has ended.
    """
    assert agent.stdout is not None, "a pipe"
    with agent.stdout as stdout:
        line = stdout.readline()
    if not line:
        raise ChildProcessError(f"its agent ended with exit code {agent.wait()}, and its stderr says why")
    return int(json.loads(line)["port"])


def end_agents(agents: Collection[subprocess.Popen[bytes]]) -> None:
    """End agents with their workers, and reap them."""
    for agent in agents:
        assert agent.stdin is not None, "a pipe"
        with sigpipe_blocked(), contextlib.suppress(BrokenPipeError):
            agent.stdin.close()
    deadline = time.monotonic() + _END_PATIENCE
    for agent in agents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, deadline - time.monotonic()))
    for agent in agents:
        agent.kill()
        agent.wait()
