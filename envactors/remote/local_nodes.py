"""Node agents as processes of this machine, for tests and first experiments."""

from __future__ import annotations

import functools
import itertools
import subprocess
import threading
from collections.abc import Callable

from envactors.remote.greeting import new_secret
from envactors.remote.launching import AgentOptions, Launcher, NodeAddress, NodeRegistry
from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent
from envactors.system.cpus import usable_cores

# How many loopback addresses are used.
_ADDRESSES = 250


class LocalNodes(Launcher):
    """A launcher of agents on this machine, each at a different loopback address.

    Args:
        count: The number of nodes.

    Attributes:
        agents: The processes of the agents that were started last, by node.

    Raises:
        ValueError: ``count`` is not an int from 1 to 200.
    """

    def __init__(self, count: int = 2) -> None:
        if type(count) is not int or not 1 <= count <= 200:
            raise ValueError(f"count is {count!r}: expected an int from 1 to 200")
        self.count = count
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        # Starts another agent; None while no actor uses the nodes.
        self._start_next: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"LocalNodes({self.count})"

    def start(self, options: AgentOptions, nodes: NodeRegistry) -> Callable[[], None]:
        """Start the agents; see `envactors.remote.launching.Launcher`."""
        nodes.expect_nodes(self.count)
        numbers = itertools.count()
        agents = self.agents = {}
        stop = functools.partial(self._stop, agents)

        def start_next() -> None:
            self._start(next(numbers), options, nodes, agents)

        self._start_next = start_next
        try:
            for _ in range(self.count):
                start_next()
        except BaseException:
            stop()
            raise
        return stop

    def add(self) -> None:
        """Start another agent, for actors that start from now on.

        Raises:
            RuntimeError: No actor uses these nodes.
        """
        if self._start_next is None:
            raise RuntimeError(f"{self!r} has no nodes yet: make an actor first, or raise its count")
        self._start_next()

    def _start(
        self, number: int, options: AgentOptions, nodes: NodeRegistry, agents: dict[str, subprocess.Popen[bytes]]
    ) -> None:
        name = f"local-{number}"
        host = f"127.0.0.{2 + number % _ADDRESSES}"
        secret = new_secret()
        epoch = new_secret()[:16]
        orders = AgentOrders(name, host, secret, epoch, *options)
        agent = agents[name] = start_agent(orders)

        def wait_for_port() -> None:
            try:
                port = read_port(agent)
            except ChildProcessError as error:
                nodes.refuse_node(name, str(error))
            else:
                nodes.add_node(NodeAddress(name, host, port, secret, epoch))

        threading.Thread(target=wait_for_port, name=f"envactors-{name}", daemon=True).start()

    def count_cores(self) -> int:
        """Return how many cores all nodes share; see `envactors.remote.launching.Launcher`."""
        return usable_cores()

    def _stop(self, agents: dict[str, subprocess.Popen[bytes]]) -> None:
        """End these agents, which one call of `start` has started."""
        if agents is self.agents:
            self._start_next = None
            self.agents = {}
        end_agents(agents.values())
