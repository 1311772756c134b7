"""The plugin that starts a node agent in each Dask worker.

A Dask worker that cannot load the plugins of its cluster cannot join it. So this one is pickled as the text of this
module, which needs nothing but distributed, in any version of Python: a worker that lacks envactors reports so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from distributed import WorkerPlugin


class NodeAgentPlugin(WorkerPlugin):  # type: ignore[misc] # its module is checked nowhere
    """Starts a node agent on each Dask worker, also on those that join later, and ends it with the worker.

    Args:
        terms: The fields of `envactors.integrations.dask.agents.AgentTerms`, by name.
    """

    def __init__(self, terms: dict[str, Any]) -> None:
        self.terms = terms
        self.name: Any = terms["topic"]
        self._host: Any = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how another process makes it, from text and plain values alone."""
        source = inspect.getsource(sys.modules[__name__])
        return eval, ("exec(source) or NodeAgentPlugin(terms)", {"source": source, "terms": self.terms})

    def setup(self, worker: Any) -> None:
        """Start the agent. What happens is reported on the topic, and never raised, which would disturb Dask."""
        try:
            from envactors.integrations.dask.agents import AgentHost, AgentTerms

            self._host = AgentHost(worker, AgentTerms(**self.terms))
            self._host.start()
        except Exception as error:
            refused = (
                f"envactors cannot be used there ({error}): install the caller's version of it on all nodes, or send a "
                "zip file of it by client.upload_file before the first actor starts"
            )
            worker.log_event(self.name, {"name": str(worker.name), "refused": refused})

    async def teardown(self, worker: Any) -> None:
        """End the agent with its workers."""
        del worker
        if self._host is not None:
            await self._host.end()
