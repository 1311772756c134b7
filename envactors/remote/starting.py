"""Starting node agents as processes of the machine that this runs on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from envactors.backends.starting import python_command
from envactors.remote.tls import Certificates
from envactors.system.sockets import sigpipe_blocked

# How long agents may take to end by themselves, in seconds.
_END_PATIENCE = 2.0


class AgentOrders(NamedTuple):
    """What an agent is told at its start.

    Attributes:
        name: The name of its node.
        host: The address to listen at.
        secret: Proves that caller and agent belong together.
        epoch: Which start of agents it belongs to; a caller of another one is refused.
        lease: The length of the lease, in seconds.
        heartbeat: How often to send a heartbeat, in seconds.
        options: Arguments for `envactors.ProcessBackend`.
        certificates: The node's certificates; None for a link that is not encrypted.
    """

    name: str
    host: str
    secret: str
    epoch: str
    lease: float
    heartbeat: float
    options: dict[str, Any]
    certificates: Certificates | None = None

    @classmethod
    def from_json(cls, text: str) -> AgentOrders:
        """Return the orders in the line that `start_agent` has written."""
        orders = cls(**json.loads(text))
        tls = orders.certificates
        return orders if tls is None else orders._replace(certificates=Certificates(*tls))


def start_agent(orders: AgentOrders) -> subprocess.Popen[str]:
    """Start an agent, which ends with this process, or when its standard input is closed.

    Raises:
        OSError: The process cannot be started.
    """
    # The secret goes through the pipe: everyone on the machine can read command lines.
    command = python_command("envactors.remote.agent", "main", {}, None)
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert agent.stdin is not None, "a pipe"
    with sigpipe_blocked(), contextlib.suppress(BrokenPipeError):  # `read_port` finds out
        agent.stdin.write(json.dumps(orders._asdict(), default=os.fspath) + "\n")
        agent.stdin.flush()
    return agent


def read_port(agent: subprocess.Popen[str]) -> int:
    """Wait until an agent listens, and return its port.

    Raises:
        ChildProcessError: It has ended.
    """
    assert agent.stdout is not None, "a pipe"
    with agent.stdout as stdout:
        line = stdout.readline()
    if not line:
        raise ChildProcessError(f"its agent ended with exit code {agent.wait()}, and its stderr says why")
    return int(json.loads(line)["port"])


def end_agents(agents: Collection[subprocess.Popen[str]]) -> None:
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
