"""How long steps and resets take, as measured where the envs run."""

from __future__ import annotations

import numpy as np

from envactors.mailbox.control_page import ControlPage
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
