"""Node agents as processes of this machine, for tests and for trying out."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from envactors.remote.greeting import new_secret
from envactors.remote.launching import AgentOptions, Launcher, NodeAddress, NodeRegistry

# How long an agent may take to end by itself, in seconds.
_END_PATIENCE = 2.0
# How many loopback addresses are used.
_ADDRESSES = 250


class LocalNodes(Launcher):
    """A launcher of agents on this machine; each listens at a loopback address of its own.

    Args:
        count: How many nodes there are.

    Attributes:
        agents: The processes of the agents, by node.

    Raises:
        ValueError: ``count`` is no int from 1 to 200.
    """

    def __init__(self, count: int = 2) -> None:
        if type(count) is not int or not 1 <= count <= 200:
            raise ValueError(f"count is {count!r}: expected an int from 1 to 200")
        self.count = count
        self.agents: dict[str, subprocess.Popen[str]] = {}
        # Starts one more agent; None while no actor uses the nodes.
        self._start_next: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"LocalNodes({self.count})"

    def start(self, options: AgentOptions, nodes: NodeRegistry) -> None:
        """Start the agents; see `envactors.remote.launching.Launcher`."""
        nodes.expect_nodes(self.count)
        numbers = itertools.count()
        self._start_next = lambda: self._start(next(numbers), options, nodes)
        for _ in range(self.count):
            self._start_next()

    def add(self) -> None:
        """Start one more agent, which is used for what starts from then on.

        Raises:
            RuntimeError: No actor uses the nodes.
        """
        if self._start_next is None:
            raise RuntimeError(f"{self!r} has no nodes yet: make an actor first, or raise its count")
        self._start_next()

    def _start(self, number: int, options: AgentOptions, nodes: NodeRegistry) -> None:
        name, host = f"local-{number}", f"127.0.0.{2 + number % _ADDRESSES}"
        secret, epoch = new_secret(), new_secret()[:16]
        orders = {
            "name": name,
            "host": host,
            "secret": secret,
            "epoch": epoch,
            "lease": options.lease,
            "heartbeat": options.heartbeat,
            "options": options.process,
            "path": [str(Path(entry).absolute()) for entry in sys.path],
        }
        command = [sys.executable, "-c", _CODE, json.dumps(orders["path"])]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self.agents[name] = agent
        stdin, stdout = agent.stdin, agent.stdout
        assert stdin is not None, "a pipe"
        assert stdout is not None, "a pipe"
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(orders) + "\n")
            stdin.close()

        def wait_for_port() -> None:
            with stdout:
                line = stdout.readline()
            if line:
                nodes.add_node(NodeAddress(name, host, json.loads(line)["port"], secret, epoch))
            else:
                nodes.refuse_node(name, f"its agent ended with exit code {agent.wait()}")

        threading.Thread(target=wait_for_port, name=f"envactors-{name}", daemon=True).start()

    def stop(self) -> None:
        """End the agents; see `envactors.remote.launching.Launcher`."""
        self._start_next = None
        agents, self.agents = self.agents, {}
        for agent in agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(_END_PATIENCE)
        for agent in agents.values():
            agent.kill()
            agent.wait()


# The agent finds the package where the caller has found it.
_CODE = (
    "import json, sys; sys.path.extend(entry for entry in json.loads(sys.argv.pop()) if entry not in sys.path); "
    "from envactors.remote.agent import main; main()"
)
