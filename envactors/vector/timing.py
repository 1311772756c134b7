"""How long steps and resets take, as measured where the envs run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from envactors.mailbox.control_page import METHOD, SINCE, ControlPage
from envactors.mailbox.durations import HISTOGRAM, Histograms, merge


class StepTimes:
    """The durations of the steps and resets of one actor's envs, in all of its processes.

    Args:
        count: How many envs the actor has.
    """

    def __init__(self, count: int) -> None:
        self._ended: Histograms = np.zeros((count, 2), HISTOGRAM)

    def add(self, page: ControlPage | None) -> None:
        """Add the durations of a process that has ended; None if there was none."""
        self._ended = self.total(page)

    def total(self, page: ControlPage | None) -> Histograms:
        """Return the durations of the ended processes and of the current one; None if there is none."""
        total: Histograms = self._ended.copy()
        if page is not None:
            merge(total, page.histograms(len(total)))
        return total


def timed(page: ControlPage, position: int, method: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step or reset of an in-process env as one that is timed on the page of its actor, as in a worker."""

    def run(*args: Any) -> Any:
        page.is_timing = True
        page.record_env(method, position)
        try:
            return function(*args)
        finally:
            page.is_timing = False
            # A reset within a step has changed the method and the time.
            page.spans.add(page.times[SINCE], time.monotonic(), 0, position, page.counters[METHOD])

    return run
