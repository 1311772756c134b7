"""The plugin that starts a node agent in each Dask worker.

A Dask worker that cannot load a plugin of its cluster cannot join the cluster. This plugin is therefore pickled as the
source text of this module, which needs only distributed and runs in any version of Python. A worker without envactors
joins and reports that envactors is missing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from distributed import WorkerPlugin


class NodeAgentPlugin(WorkerPlugin):  # type: ignore[misc] # mypy skips its module
    """Starts a node agent on each Dask worker, including those that join later, and ends it with the worker.

    Args:
        terms: The fields of `envactors.integrations.dask.agents.AgentTerms`, by name.
    """

    def __init__(self, terms: dict[str, Any]) -> None:
        self.terms = terms
        self.name: Any = terms["topic"]
        self._host: Any = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how another process creates the plugin, from text and plain values only."""
        source = inspect.getsource(sys.modules[__name__])
        return eval, ("exec(source) or NodeAgentPlugin(terms)", {"source": source, "terms": self.terms})

    def setup(self, worker: Any) -> None:
        """Start the agent. Report errors on the topic, since raising one would keep the Dask worker from joining."""
        try:
            from envactors.integrations.dask.agents import AgentHost, AgentTerms

            self._host = AgentHost(worker, AgentTerms(**self.terms))
            self._host.start()
        except Exception as error:
            refused = (
                f"cannot use envactors there ({error}): install the caller's version of envactors on all nodes, or "
                "upload it as a zip file with client.upload_file before the first actor starts"
            )
            worker.log_event(self.name, {"name": str(worker.name), "refused": refused})

    async def teardown(self, worker: Any) -> None:
        """End the agent and its workers."""
        del worker
        if self._host is not None:
            await self._host.end()
