"""The half of `envactors.integrations.dask` that runs in the Dask workers: each hosts one node agent."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import subprocess
import threading
from typing import Any, NamedTuple

from distributed.comm import get_address_host

from envactors.remote.starting import AgentOrders, end_agents, read_port, start_agent
from envactors.remote.tls import Certificates


class AgentTerms(NamedTuple):
    """What is the same for all agents of a cluster; all of it is plain values, since the plugin carries it.

    Attributes:
        topic: The Dask topic on which agents are reported; also the name of the plugin.
        secret: Proves that caller and agents belong together.
        epoch: Which start of agents it is.
        lease: The length of the lease, in seconds.
        heartbeat: How often an agent sends a heartbeat, in seconds.
        options: Arguments for the `envactors.ProcessBackend` of each node.
        tls: Whether the caller encrypts its links.
        insecure: Whether agents may listen without encryption where other machines reach them.
    """

    topic: str
    secret: str
    epoch: str
    lease: float
    heartbeat: float
    options: dict[str, Any]
    tls: bool
    insecure: bool


class AgentHost:
    """Starts the node agent of one Dask worker, and reports where it listens, or why there is none.

    Args:
        worker: The `distributed.Worker`.
        terms: What is the same for all agents.
    """

    def __init__(self, worker: Any, terms: AgentTerms) -> None:
        self._worker = worker
        self._terms = terms
        # The threads of a Dask worker are in the caller's process if the cluster has no processes.
        inproc = worker.address.startswith("inproc:")
        self._host = "127.0.0.1" if inproc else get_address_host(worker.address)
        self._agents: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start the agent, without waiting for it: Dask's event loop runs this."""
        try:
            agent = start_agent(self._orders())
        except (OSError, ValueError) as error:
            self._report(refused=str(error))
            return
        self._agents.append(agent)
        threading.Thread(target=self._await_port, args=(agent,), name="envactors-agent-port", daemon=True).start()

    async def end(self) -> None:
        """End the agent with its workers."""
        await asyncio.to_thread(end_agents, self._agents)

    def _orders(self) -> AgentOrders:
        terms, certificates = self._terms, None
        if terms.tls:
            files = self._worker.security.get_tls_config_for_role("worker")
            if not (files["ca_file"] and files["cert"]):
                raise ValueError("the caller's Security has TLS certificates, and that of this Dask worker has none")
            certificates = Certificates(files["ca_file"], files["cert"], files["key"], files["ciphers"])
        elif not (terms.insecure or _is_loopback(self._host)):
            raise ValueError(
                f"without TLS its agent would listen at {self._host} for everyone: start the cluster with "
                "security=..., or pass insecure=True in a network that you trust"
            )
        limits = terms.lease, terms.heartbeat
        name = str(self._worker.name)
        return AgentOrders(name, self._host, terms.secret, terms.epoch, *limits, terms.options, certificates)

    def _await_port(self, agent: subprocess.Popen[str]) -> None:
        try:
            port = read_port(agent)
        except ChildProcessError as error:
            self._report(refused=str(error))
        else:
            self._report(host=self._host, port=port)

    def _report(self, **what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # Dask's event loop has ended
            self._worker.log_event(self._terms.topic, {"name": str(self._worker.name), **what})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
