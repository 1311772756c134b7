"""How long steps and resets take, as measured where the envs run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from envactors.mailbox.control_page import METHOD, METHOD_RESET, METHOD_STEP, SINCE, ControlPage
from envactors.mailbox.durations import HISTOGRAM, Histograms, merge

if TYPE_CHECKING:
    from envactors.worker.context import ActorContext
    from envactors.worker.host import Fields, HostedEnv


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


class TimedEnv:
    """Times the steps and resets of an in-process env on the page of its actor, as a worker does.

    Args:
        env: The env.
        page: The page.

    Attributes:
        context: That of the env.
    """

    def __init__(self, env: HostedEnv, page: ControlPage) -> None:
        self.context: ActorContext | None = env.context
        self._env = env
        self._page = page

    def step(self, action: Any, resets_within_step: bool, next_seed: int | None) -> Fields:
        """Step the env; see `HostedEnv.step`."""
        return self._time(METHOD_STEP, self._env.step, action, resets_within_step, next_seed)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Fields:
        """Reset the env; see `HostedEnv.reset`."""
        return self._time(METHOD_RESET, self._env.reset, seed, options)

    def _time(self, method: int, function: Callable[..., Fields], *args: Any) -> Fields:
        page = self._page
        page.is_timing = True
        page.record_env(method, self._env.position)
        try:
            return function(*args)
        finally:
            page.is_timing = False
            # A reset within a step has changed the method and the time.
            page.spans.add(page.times[SINCE], time.monotonic(), 0, self._env.position, page.counters[METHOD])
