"""The env code of in-process actors: which request runs in which thread, and a warning if it takes long."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from envactors.actor import slow_calls
from envactors.actor.exits import Step
from envactors.system.threads import describe_stack
from envactors.worker import context
from envactors.worker.context import ActorContext

if TYPE_CHECKING:
    from envactors.actor.inline import InlineActor

# How often the env code that runs is looked at, as a fraction of ``Deadlines(slow=)``.
_LOOKS = 0.25


class RunningRequest:
    """A request that runs env code in the thread of its caller.

    Attributes:
        method: The method, for messages.
        index: The index of the env whose code is running.
        thread: The id of the thread.
    """

    __slots__ = ("index", "method", "thread")

    def __init__(self, method: str, index: int) -> None:
        self.method = method
        self.index = index
        self.thread: int = threading.get_ident()


class EnvCode:
    """Runs the env code of an in-process actor, or of all in-process actors of a vector.

    One thread at a time runs env code. It may use other actors of the vector, which run nested requests then.

    Args:
        actor: The first actor.
    """

    def __init__(self, actor: InlineActor) -> None:
        self._actors = [actor]
        self._lock = actor.config.lock
        self._loop = actor.runtime.loop
        self._slow = actor.config.deadlines.slow
        # The requests that are running, the outermost first. An interrupt may leave more.
        self._running: list[RunningRequest] = []
        self._next_look = math.inf if self._slow is not None else 0.0
        # The outermost request at the last look, its env, and when it was first seen there; 0.0 once it was reported.
        self._seen: tuple[RunningRequest | None, int, float] = (None, 0, 0.0)

    def add(self, actor: InlineActor) -> None:
        """Add another actor of the vector."""
        self._actors.append(actor)
        actor.env_code = self

    @contextmanager
    def run(
        self, method: str, index: int, find_context: Callable[[RunningRequest], ActorContext | None]
    ) -> Iterator[RunningRequest]:
        """Return the context in which a request runs env code.

        Args:
            method: The method, for messages.
            index: The index of the first env.
            find_context: Returns the context of the env that is running.
        """
        request, is_nested = RunningRequest(method, index), self.is_current_thread
        with self._lock:
            if not is_nested:
                self._running.clear()
            self._running.append(request)
            if self._next_look == math.inf:
                self._look_later()
            token = context.of_thread.set(functools.partial(find_context, request))
            try:
                yield request
            finally:
                context.of_thread.reset(token)
                self._running.remove(request)

    @property
    def is_current_thread(self) -> bool:
        """Whether the calling thread runs env code."""
        return bool(self._running) and self._lock.is_mine

    def request_of(self, actor: InlineActor) -> RunningRequest | None:
        """Return the innermost request that runs code of an env of this actor; None if there is none."""
        return next((request for request in self._running[::-1] if request.index in actor.range), None)

    def check_not_within(self, actor: InlineActor) -> None:
        """Raise if the calling thread runs code of an env of this actor, whose next request must run after that.

        Raises:
            RuntimeError: It does.
        """
        if self.is_current_thread and self.request_of(actor) is not None:
            raise actor.errors.within_envs()

    # Slow env code, in the loop --------------------------------------------------------------------------

    def _look_later(self) -> None:
        assert self._slow is not None, "otherwise nothing is slow"
        self._next_look = time.monotonic() + self._slow * _LOOKS
        self._loop.call_at(self._next_look, self._look)

    def _look(self) -> None:
        """Report the outermost request if its env has been running for too long."""
        now = time.monotonic()
        if now < self._next_look:
            return  # this was scheduled twice, by two threads
        self._next_look = math.inf
        request = next(iter(self._running), None)
        if request is None:
            return
        before, index, since = self._seen
        if (before, index) != (request, request.index):
            self._seen = request, request.index, now
        elif since and now >= since + (self._slow or 0.0):
            self._seen = request, index, 0.0
            self._warn(request, now - since)
        self._look_later()

    def _warn(self, request: RunningRequest, seconds: float) -> None:
        actor = next(actor for actor in self._actors if request.index in actor.range)
        step = Step(request.method, request.index)
        slow_calls.warn(actor, step, seconds, functools.partial(describe_stack, request.thread))
