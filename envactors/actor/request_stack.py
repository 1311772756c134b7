"""The env code that runs in the threads of its callers: whose it is, in which thread, and whether it is slow.

In-process actors run each request in ``with lock, request:``. If env 0 calls env 1 of the same vector, the
stack has two requests then. From it come the state of an actor, its stack, the refusal of an env to wait for itself,
and warnings of slow code.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import traceback
from collections.abc import Callable

from envactors.actor.base import ActorBase
from envactors.actor.change import ChangeLock
from envactors.actor.job import Activity
from envactors.actor.log import warn_of_slow
from envactors.actor.timers import SHORTEST_PAUSE
from envactors.loop import Loop
from envactors.system.threads import current_frames
from envactors.worker import context
from envactors.worker.context import ActorContext

# How often a request is looked at within the time after which it is slow.
_LOOKS = 4


class InlineRequest:
    """A request that runs env code in the thread of its caller, and the context in which it does; see `RequestStack`.

    The thread makes it before it acquires the lock, and enters it under the lock.

    Args:
        stack: The requests that run under the same lock.
        index: The env whose code runs first.

    Attributes:
        index: The env whose code is running. A step of several envs changes this from env to env.
        is_nested: Whether the thread already holds the lock, as env code does that makes a request.
        thread: The identifier of the thread.
    """

    def __init__(self, stack: RequestStack, index: int) -> None:
        self._stack = stack
        self.index = index
        self.is_nested: bool = stack.lock.is_held_here()
        self.thread: int = threading.get_ident()

    def __enter__(self) -> None:
        self._depth = self._stack.push(self)
        self._token = context.of_thread.set(self._get_context_now)

    def __exit__(self, *_: object) -> None:
        del self._stack.requests[self._depth :]
        context.of_thread.reset(self._token)

    def _get_context_now(self) -> ActorContext | None:
        """Return None once the request has ended: an interrupt may have left its context behind."""
        return self.get_context() if self._stack.lock.is_held_here() else None

    def get_context(self) -> ActorContext | None:
        """Return the context of the env whose code is running."""
        raise NotImplementedError

    def describe(self) -> tuple[ActorBase, Activity] | None:
        """Return what is running, and the actor that runs it, for a warning; None if there is to be none."""
        raise NotImplementedError


class RequestStack:
    """The requests that run env code: those of one in-process actor, or of all that share a lock.

    There is more than one if env code makes requests of other envs. The loop looks at the innermost one a few times
    until it is slow. So requests need not record when they begin, and a warning comes up to a quarter later than in a
    worker.

    Args:
        lock: The lock.
        get_loop: Returns the loop that looks at them.
        slow: After how many seconds a request is slow; None to warn about none.

    Attributes:
        lock: As above.
        requests: The requests, the outermost one first. An interrupt may leave more.
    """

    def __init__(self, lock: ChangeLock, get_loop: Callable[[], Loop], slow: float | None) -> None:
        self.lock: ChangeLock = lock
        self._get_loop = get_loop
        self._slow = slow
        self.requests: list[InlineRequest] = []
        self._is_looking = False

    def push(self, request: InlineRequest) -> int:
        """Add the innermost request, under the lock; return how many are outside of it."""
        if not request.is_nested:
            self.requests.clear()
        self.requests.append(request)
        if not self._is_looking and self._slow is not None:
            self._look_later(self._slow, None, 0.0)
        return len(self.requests) - 1

    def thread_of(self, envs: range) -> int | None:
        """Return the thread that runs code of one of these envs; None if none does."""
        # An interrupt may have left a request of the calling thread behind, which then no longer has the lock.
        stale = None if self.lock.is_held_here() else threading.get_ident()
        threads = (request.thread for request in tuple(self.requests) if request.index in envs)
        return next((thread for thread in threads if thread != stale), None)

    def is_within(self, envs: range) -> bool:
        """Return whether the calling thread runs code of one of these envs."""
        return bool(self.requests) and self.thread_of(envs) == threading.get_ident()

    def _look_later(self, slow: float, seen: tuple[InlineRequest, int] | None, since: float) -> None:
        """Look again in a moment.

        Args:
            slow: After how many seconds a request is slow.
            seen: The request and the env that ran at the last look; None if this is the first one.
            since: When they were first seen (`time.monotonic`); infinity if they were reported.
        """
        self._is_looking = True
        when = time.monotonic() + max(slow / _LOOKS, SHORTEST_PAUSE)
        self._get_loop().call_at(when, functools.partial(self._look, slow, seen, since))

    def _look(self, slow: float, seen: tuple[InlineRequest, int] | None, since: float) -> None:
        """Warn of the innermost request if it is slow, and look again later. If there is none, stop to look."""
        self._is_looking = False
        for request in self.requests[-1:]:  # at most one, and another thread may be removing it
            running, now = (request, request.index), time.monotonic()
            if running != seen:
                since = now
            elif now - since >= slow:
                if (described := request.describe()) is not None:
                    warn_of_slow(*described, now - since, functools.partial(stack_of, request.thread))
                since = math.inf
            self._look_later(slow, running, since)


def stack_of(thread: int | None) -> str:
    """Return the stack of a thread that runs env code; if the thread is None, a line that says that none does."""
    frame = None if thread is None else current_frames().get(thread)
    return "no env code is running\n" if frame is None else "".join(traceback.format_stack(frame))
