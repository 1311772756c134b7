"""The backend for workers on other machines."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envactors.actor.future import BoundToProcess
from envactors.backends.base import Backend, Traits, Use
from envactors.backends.process import ProcessBackend
from envactors.options import as_seconds, is_int
from envactors.remote.launching import AgentOptions, Launcher
from envactors.remote.rows import MirroredMemory
from envactors.remote.session import Session
from envactors.remote.worker import RemoteWorker
from envactors.runtime import Runtime


class RemoteBackend(BoundToProcess, Backend):
    """A backend with one process per actor on other machines, the nodes, each with an agent that a launcher starts.

    Actors are spread evenly. A lost node costs each of its actors one restart on the remaining nodes. They restart when
    their old processes have certainly ended: the end was acknowledged, or 1.1 leases have passed.

    Args:
        launcher: Starts the agents, such as `envactors.remote.LocalNodes`.
        envs_per_node: How many envs a node may have; None sets no limit.
        lease: How long a node may be silent before it counts as lost, in seconds. A caller that is stopped for longer
            loses its nodes.
        heartbeat: The interval between the heartbeats of a node, in seconds.
        process_options: Arguments for the `envactors.ProcessBackend` of each node.

    Raises:
        TypeError: ``launcher`` is something else.
        ValueError: ``lease`` is shorter than two heartbeats, or ``envs_per_node`` is not a positive int.
    """

    traits: Traits = Traits(
        can_kill=True,
        is_remote=True,
        import_advice="it has to be on the node. Install it there, send it by Dask's client.upload_file before the "
        "first actor starts, or have it travel with the factory by cloudpickle.register_pickle_by_value(module)",
    )

    def __init__(
        self,
        launcher: Launcher,
        *,
        envs_per_node: int | None = None,
        lease: float = 10.0,
        heartbeat: float = 1.0,
        **process_options: Any,
    ) -> None:
        lease, heartbeat = as_seconds(lease, "lease"), as_seconds(heartbeat, "heartbeat")
        if not 0 < 2 * heartbeat <= lease < float("inf"):
            raise ValueError(f"lease is {lease!r} with heartbeat={heartbeat!r}: expected at least two heartbeats")
        if isinstance(launcher, type) or not callable(getattr(launcher, "start", None)):
            raise TypeError(f"launcher is {launcher!r}: expected a Launcher, such as LocalNodes(2)")
        if envs_per_node is not None and not is_int(envs_per_node):
            raise ValueError(f"envs_per_node is {envs_per_node!r}: expected an int >= 1, or None")
        ProcessBackend(**process_options)  # raises what it would raise on the nodes
        self.launcher = launcher
        self.envs_per_node = envs_per_node
        self._options = AgentOptions(lease, heartbeat, process_options)
        self._lock = threading.RLock()
        self._uses: set[Use] = set()
        self._session: Session | None = None
        # Ends the agents of the session; None until they were started.
        self._stop: Callable[[], object] | None = None
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        return f"RemoteBackend({self.launcher!r})"

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that are not lost."""
        session = self._session
        return [] if session is None else [node.name for node in session.nodes if not node.is_lost]

    def drain(self, node: str) -> None:
        """Place no more actors on a node, and move its actors elsewhere, which does not count as a restart.

        An actor with one env moves when its next episode ends, one with several envs when all of them are reset
        together. Workers of an `Executor` move after a call, those of a `SessionPool` between two sessions, and other
        actors when they are renewed. While no other node has room for an actor, it stays.

        Args:
            node: The name of the node.

        Raises:
            ValueError: No node has this name.
        """
        # A lost node may have had the same name: Dask's nannies restart workers under the same name.
        found = [one for one in (self._session.nodes if self._session else []) if one.name == node and not one.is_lost]
        if not found:
            raise ValueError(f"node {node!r}: expected one of {self.nodes}")
        found[0].draining = True

    # As a backend ----------------------------------------------------------------------------------------

    def make_memory(self) -> MirroredMemory:
        """Return memory that the nodes mirror; see `envactors.backends.base.Backend.make_memory`."""
        return MirroredMemory(next(self._ids), self._announce, self._free)

    def _announce(self, memory: MirroredMemory) -> None:
        session = self._session
        for node in () if session is None else session.nodes:
            node.announce(memory)

    def _free(self, memory: MirroredMemory, places: Sequence[tuple[int, int]]) -> None:
        session = self._session
        for node in () if session is None else session.nodes:
            node.free(memory, places)

    def use(self, env_vars: Mapping[str, str], runtime: Runtime) -> RemoteUse:
        """Return the use by another actor; see `envactors.backends.base.Backend.use`."""
        return RemoteUse(self, env_vars, runtime)

    def begin_use(self, use: RemoteUse, runtime: Runtime) -> None:
        """Start the agents, unless they were started for another actor."""
        with self._lock:
            if self._session is None or self._session.runtime is not runtime:  # None, or that of the parent of a fork
                self._uses, self._stop = {use}, None
                self._session = Session(self.envs_per_node, self._options.lease, runtime)
                try:
                    self._stop = self.launcher.start(self._options, self._session)
                except BaseException:  # there is no cluster; the next actor tries again
                    self._end()
                    raise
            self._uses.add(use)

    def start_worker(self, use: RemoteUse, name: str, memory: MirroredMemory | None, envs: int) -> RemoteWorker:
        """Start a worker on the node with the fewest envs."""
        session, last = self._session, use.worker
        assert session is not None, "an actor uses the backend"
        home = None if last is None else last.node or last.home
        use.worker = worker = RemoteWorker(next(self._ids), name, use.env_vars, memory, envs, session, home)
        try:
            session.launch(worker)
        except BaseException:
            worker.kill()
            worker.reap()
            raise
        return worker

    def end_use(self, use: RemoteUse) -> None:
        """End the agents, unless another actor uses them."""
        with self._lock:
            self._uses.discard(use)
            if not self._uses:
                self._end()

    def _end(self) -> None:
        """End the agents, before others may start."""
        session, self._session = self._session, None
        stop, self._stop = self._stop, None
        if session is not None:
            session.end()
        if stop is not None:
            stop()

    def count_cores(self) -> int:
        """Return how many cores the nodes have; see `envactors.backends.base.Backend.count_cores`."""
        return self.launcher.count_cores()


class RemoteUse(Use):
    """Starts the workers of an actor; see `envactors.backends.base.Use`.

    Attributes:
        env_vars: Their environment variables.
        worker: The last one.
    """

    def __init__(self, backend: RemoteBackend, env_vars: Mapping[str, str], runtime: Runtime) -> None:
        self._backend = backend
        self.env_vars = env_vars
        self.worker: RemoteWorker | None = None
        self._runtime = runtime

    def open(self) -> None:
        self._backend.begin_use(self, self._runtime)

    def start(self, name: str, memory: MirroredMemory | None, envs: int) -> RemoteWorker:
        """Start a worker on a node; see `envactors.backends.base.Use.start`."""
        return self._backend.start_worker(self, name, memory, envs)

    def close(self) -> None:
        self._backend.end_use(self)
