"""The part of `envactors.integrations.dask` that runs in Dask workers, each of which hosts one node agent.

The agent itself lives in `envactors.remote`, and the caller's part in `envactors.integrations.dask.backend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from typing import Any, NamedTuple

from distributed.comm import get_address_host

from envactors.remote.starting import NOT_NEEDED, AgentOrders, end_agents, read_port, start_agent
from envactors.remote.tls import Certificates


class AgentTerms(NamedTuple):
    """Settings that all agents of a cluster share. They are plain values, since the plugin is pickled as text.

    Attributes:
        topic: The Dask topic on which agents report; also the name of the plugin.
        secret: Proves that the caller and the agents belong together.
        epoch: Identifies this start of agents among several in one cluster.
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
    """Starts the node agent of one Dask worker, and reports where it listens or why it could not start.

    An agent that ends while its caller may need it is replaced.

    Args:
        worker: The `distributed.Worker`.
        terms: The settings that all agents share.
    """

    def __init__(self, worker: Any, terms: AgentTerms) -> None:
        self._worker = worker
        self._terms = terms
        # Without processes, a cluster runs its Dask workers as threads of the caller.
        inproc = worker.address.startswith("inproc:")
        self._host = "127.0.0.1" if inproc else get_address_host(worker.address)
        self._lock = threading.Lock()
        self._agent: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def start(self) -> None:
        """Start the agent. This does not wait for it, since Dask's event loop calls this method."""
        agent = self._start_agent()
        if agent is not None:
            threading.Thread(target=self._watch, args=(agent,), name="envactors-agent", daemon=True).start()

    async def end(self) -> None:
        """End the agent and its workers."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._lock:
            self._is_ending = True
        if self._agent is not None:
            end_agents([self._agent])

    def _start_agent(self) -> subprocess.Popen[bytes] | None:
        """Start and return an agent; None if this host ends, or if that fails, which is reported."""
        with self._lock:
            if self._is_ending:
                return None
            try:
                self._agent = start_agent(self._orders())
            except (OSError, ValueError) as error:
                self._report(refused=str(error))
                return None
            return self._agent

    def _watch(self, agent: subprocess.Popen[bytes] | None) -> None:
        """Report where the agent listens, and replace it when it ends unless nobody needs it."""
        while agent is not None:
            try:
                port = read_port(agent)
            except ChildProcessError as error:
                if not self._is_ending:
                    self._report(refused=str(error))
                return
            self._report(host=self._host, port=port)
            is_needed = agent.wait() != NOT_NEEDED
            end_agents([agent])  # closes its pipe
            agent = self._start_agent() if is_needed else None

    def _orders(self) -> AgentOrders:
        terms, certificates = self._terms, None
        if terms.tls:
            files = self._worker.security.get_tls_config_for_role("worker")
            if not (files["ca_file"] and files["cert"]):
                raise ValueError(
                    "the caller uses TLS, but the Security of this Dask worker has no certificates: start the Dask "
                    "worker with certificates too"
                )
            certificates = Certificates(files["ca_file"], files["cert"], files["key"], files["ciphers"])
        limits = terms.lease, terms.heartbeat
        name = str(self._worker.name)
        options = terms.options
        return AgentOrders(
            name, self._host, terms.secret, terms.epoch, *limits, options, certificates, insecure=terms.insecure
        )

    def _report(self, **what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # Dask's event loop has ended
            self._worker.log_event(self._terms.topic, {"name": str(self._worker.name), **what})
