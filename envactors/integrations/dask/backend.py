"""Run actors on the machines of a Dask cluster: each Dask worker becomes a node.

Dask starts one node agent per Dask worker, including those that join later. All other messages use one link per node,
without Dask. `envactors.remote` implements links and nodes.

    with LocalCluster(security=True) as cluster, Client(cluster) as client:
        envs = VectorEnv([make_env] * 64, envs_per_actor=8, backend=DaskBackend(client))
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from distributed import Client

from envactors.integrations.dask.agents import AgentTerms
from envactors.integrations.dask.plugin import NodeAgentPlugin
from envactors.options import check_kind
from envactors.remote.backend import RemoteBackend
from envactors.remote.greeting import new_secret
from envactors.remote.launching import AgentOptions, Launcher, NodeAddress, NodeRegistry

_log = logging.getLogger("envactors")
# How long to wait for the cluster when the agents end, in seconds. The thread finishes the remaining work alone.
_END_PATIENCE = 5.0
# How often to check the connection to the scheduler, in seconds.
_CHECK = 0.5


class DaskBackend(RemoteBackend):
    """A backend with one process per actor on the nodes of a Dask cluster. The nodes have the names of Dask's workers.

    A node is lost when its Dask worker, that worker's nanny, or the scheduler exits, since Dask then closes the worker.
    A Dask worker may be stopped or busy without any effect, as long as its agent answers. Actors use none of the
    threads that Dask has for its tasks, and Dask's memory limits do not apply to them.

    Links are encrypted with the certificates of the cluster's `distributed.Security`. If it has none, agents listen at
    loopback addresses only.

    Args:
        client: A `distributed.Client`, which must stay open while actors use the backend, or a scheduler's address.
        envs_per_node: How many envs a node may have; None for no limit.
        lease: How long a node may be silent before it counts as lost, in seconds. A caller that is suspended for longer
            loses its nodes.
        heartbeat: How often each node sends a heartbeat, in seconds.
        insecure: Whether agents without TLS may listen at addresses that other machines can reach. Anyone who can read
            or change network traffic then has full access to the actors.
        process_options: Arguments for the `envactors.ProcessBackend` of each node.

    Raises:
        TypeError: ``client`` is neither a client nor an address, or ``insecure`` is not a bool.
        ValueError: The client is asynchronous, ``lease`` is shorter than two heartbeats, or ``envs_per_node`` is not a
            positive int.
    """

    def __init__(
        self,
        client: Client | str,
        *,
        envs_per_node: int | None = None,
        lease: float = 10.0,
        heartbeat: float = 1.0,
        insecure: bool = False,
        **process_options: Any,
    ) -> None:
        launcher = DaskNodes(client, insecure=insecure)
        super().__init__(launcher, envs_per_node=envs_per_node, lease=lease, heartbeat=heartbeat, **process_options)
        self._client = client

    def __repr__(self) -> str:
        return f"DaskBackend({self._client!r})"


class DaskNodes(Launcher):
    """A launcher of one agent per worker of a Dask cluster.

    Args:
        client: As for `DaskBackend`.
        insecure: As for `DaskBackend`.
    """

    def __init__(self, client: Client | str, *, insecure: bool = False) -> None:
        if not isinstance(client, (Client, str)):
            raise TypeError(f"client is {client!r}: expected a distributed.Client, or the address of a scheduler")
        if isinstance(client, Client) and client.asynchronous:
            raise ValueError("client is asynchronous: expected a synchronous client, or the address of the scheduler")
        check_kind("insecure", insecure, bool)
        self._client = client
        self._insecure = insecure

    def __repr__(self) -> str:
        return f"DaskNodes({self._client!r})"

    def start(self, options: AgentOptions, nodes: NodeRegistry) -> Callable[[], None]:
        """Start the agents; see `envactors.remote.launching.Launcher`."""
        return _ClusterSession(self._client, self._insecure, options, nodes).stop

    def count_cores(self) -> int:
        """Return how many threads all Dask workers have; see `envactors.remote.launching.Launcher`."""
        with _connected(self._client) as client:
            cores: int = sum(client.nthreads().values())
        if not cores:
            raise ValueError("the Dask cluster has no workers yet: call client.wait_for_workers(n) first")
        return cores


def _connected(client: Client | str) -> contextlib.AbstractContextManager[Client]:
    """Return a context manager for a client. If only an address is given, it connects on entry and closes on exit."""
    return Client(client, set_as_default=False) if isinstance(client, str) else contextlib.nullcontext(client)


class _ClusterSession:
    """One start of agents in a cluster, from registering the plugin to removing it, in a separate thread.

    The thread undoes every completed step, whichever step fails. A cluster that does not answer blocks only the thread.
    """

    def __init__(self, client: Client | str, insecure: bool, options: AgentOptions, nodes: NodeRegistry) -> None:
        self._client = client
        self._insecure = insecure
        self._options = options
        self._nodes = nodes
        self._secret, self._epoch = new_secret(), new_secret()[:16]
        self._topic = f"envactors-{self._epoch}"
        self._tls: Any = None
        # The reports that have arrived. Some may arrive twice.
        self._seen: set[str] = set()
        self._stopping = threading.Event()
        nodes.expect_nodes(1)
        self._thread = threading.Thread(target=self._run, name="envactors-dask", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the cluster, and wait at most `_END_PATIENCE` seconds for the thread."""
        self._stopping.set()
        self._thread.join(_END_PATIENCE)

    # Called in the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        name = self._client if isinstance(self._client, str) else "the Dask cluster"
        try:
            with contextlib.ExitStack() as stack:
                client = stack.enter_context(_connected(self._client))
                if client.status == "closed":
                    raise ValueError("client is closed: expected an open distributed.Client, or a scheduler's address")
                name = client.scheduler.address
                stack.callback(self._leave, client)
                self._join(client)
                self._watch(client, name)
        except Exception as error:
            self._refuse(name, f"cannot start its node agents: {error or repr(error)}")

    def _join(self, client: Client) -> None:
        self._tls = client.security.get_connection_args("client")["ssl_context"]
        # The constructor announced one node, before the number of Dask workers was known.
        self._nodes.expect_nodes(len(client.nthreads()) - 1)
        on_report = weakref.WeakMethod(self._on_report)  # the client never drops the handler of a topic
        client.subscribe_topic(self._topic, lambda event: (handle := on_report()) and handle(event))
        lease, heartbeat, process = self._options
        terms = AgentTerms(
            self._topic, self._secret, self._epoch, lease, heartbeat, process, self._tls is not None, self._insecure
        )
        try:
            client.register_plugin(NodeAgentPlugin(terms._asdict()))
        except (OSError, asyncio.TimeoutError) as error:
            # A Dask worker is exiting or does not answer. The others report to the topic anyway.
            _log.warning("cannot reach all workers of %s: %s", client.scheduler.address, error)
        for report in client.get_events(self._topic):
            self._on_report(report)  # it may have arrived before the subscription

    def _watch(self, client: Client, name: str) -> None:
        while client.status == "running":
            if self._stopping.wait(_CHECK):
                return
        self._refuse(name, "lost the connection to its scheduler")
        self._stopping.wait()

    def _leave(self, client: Client) -> None:
        if client.status != "running":
            return  # the calls below would wait in vain
        for undo in (client.unregister_worker_plugin, client.unsubscribe_topic):
            with contextlib.suppress(Exception):  # the step was not completed, or cannot be undone
                undo(self._topic)

    def _refuse(self, name: str, reason: str) -> None:
        if not self._stopping.is_set():
            self._nodes.refuse_node(name, reason)

    # Called in the thread of the client ------------------------------------------------------------------

    def _on_report(self, event: tuple[float, dict[str, Any]]) -> None:
        report = event[1]
        if self._stopping.is_set() or repr(event) in self._seen:
            return
        self._seen.add(repr(event))
        if "refused" in report:
            self._nodes.refuse_node(report["name"], report["refused"])
            return
        self._nodes.add_node(
            NodeAddress(report["name"], report["host"], report["port"], self._secret, self._epoch, self._tls)
        )
