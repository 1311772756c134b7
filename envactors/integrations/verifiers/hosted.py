"""The worker's side: the rewards and metrics of a task, in an event loop that lasts as long as the process.

Nothing here imports verifiers; the task does.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, NamedTuple


class Score(NamedTuple):
    """The result of a scoring function.

    Attributes:
        value: What it returned.
        info: What the ``info`` of the trace is after it; None if the function was not given the trace.
    """

    value: Any
    info: dict[str, Any] | None


class Scorer:
    """Computes rewards and metrics."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def score(self, task: Any, kind: str, name: str, arguments: dict[str, Any]) -> Score:
        """Call a scoring function of a task.

        Args:
            task: The task.
            kind: ``"reward"`` or ``"metric"``.
            name: The name of the function.
            arguments: Its arguments.
        """
        function = next(function for function in task.hooks(kind) if function.__name__ == name)
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = self._loop.run_until_complete(value)
        trace = arguments.get("trace")
        return Score(value, None if trace is None else trace.info)

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()
