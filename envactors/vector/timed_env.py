"""Times the steps and resets of in-process envs."""

from __future__ import annotations

import time
from typing import Any

from envactors.mailbox.control_page import METHOD, METHOD_RESET, METHOD_STEP, SINCE, ControlPage
from envactors.worker.context import ActorContext
from envactors.worker.host import Fields, HostedEnv


class TimedEnv:
    """Times the steps and resets of an in-process env on the page of its actor, as a worker does.

    Args:
        env: The env.
        page: The page.

    Attributes:
        context: That of the env.
    """

    def __init__(self, env: HostedEnv, page: ControlPage) -> None:
        self._env, self._page, self._position = env, page, env.position
        self.context: ActorContext | None = env.context

    def step(self, action: Any, autoreset: bool, next_seed: int | None) -> Fields:
        """Step the env; see `HostedEnv.step`."""
        self._begin(METHOD_STEP)
        try:
            return self._env.step(action, autoreset, next_seed)
        finally:
            self._end()

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Fields:
        """Reset the env; see `HostedEnv.reset`."""
        self._begin(METHOD_RESET)
        try:
            return self._env.reset(seed, options)
        finally:
            self._end()

    def _begin(self, method: int) -> None:
        self._page.is_timing = True
        self._page.record_env(method, self._position)

    def _end(self) -> None:
        page = self._page
        page.is_timing = False
        # A reset within a step has changed the method and the time.
        page.spans.add(page.times[SINCE], time.monotonic(), 0, self._position, page.counters[METHOD])
