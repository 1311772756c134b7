"""The pool of sessions behind a drop-in whose objects come and go while its actors stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from envactors.integrations.options import preloading
from envactors.sessions.lease import Lease
from envactors.sessions.pool import SessionPool


class SharedPool:
    """A pool that is made when it is first needed: servers are often made by an import.

    Args:
        factory: Makes what an actor holds, in the worker.
        size: How many sessions run at a time.
        module: What takes long to import: the helper does so once for all workers.
        pool_options: Options of `envactors.SessionPool`.

    Attributes:
        start_timeout: How long a session waits for an actor, in seconds; None for no limit.
    """

    def __init__(self, factory: Callable[[], Any], size: int, module: str, pool_options: dict[str, Any]) -> None:
        pool_options.setdefault("backend", preloading(module))
        self._factory = factory
        self._size = size
        self._options = pool_options
        self.start_timeout: float | None = pool_options.get("start_timeout", 120.0)
        self._lock = threading.Lock()
        self._pools: dict[str, SessionPool[Any]] = {}

    def get(self) -> SessionPool[Any]:
        """Return the pool."""
        return self._open("session", self._size)

    def _open(self, name: str, size: int, **options: Any) -> SessionPool[Any]:
        with self._lock:
            if name not in self._pools:
                self._pools[name] = SessionPool(self._factory, size, **{"name": name, **self._options, **options})
            return self._pools[name]

    def lease(self, name: str) -> Lease[Any]:
        """Return a lease that waits for an actor as long as a start may take."""
        return self.get().session(name, timeout=self.start_timeout)

    def ask(self, method: str) -> Any:
        """Call a method of a new object, which does not wait until one of the pool's actors is free."""
        with self._open("question", 1, standbys=0).session(method) as session:
            return session.call(method).result()

    def close(self) -> None:
        """Close the pool, if there is one; it is made anew when it is needed again."""
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()
