"""Users of simulated sessions: what they do, and how their sessions may end because of that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import envactors as ea
from simulation.envs import EnvFailedError
from simulation.processes import FIRST_PID
from simulation.session_env import SessionEnv
from simulation.world import Interrupted, Violation, World

# The most that a user does in one session.
_MOST_ACTIONS = 5
# How long a user may do nothing, in seconds.
_PAUSES = (0.0, 0.01, 0.4, 2.0, 3.0)
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError)  # one class since Python 3.11


class UserError(Exception):
    """What the code of a user raises."""


@dataclasses.dataclass
class Plan:
    """What users may do in one history.

    Attributes:
        idle_timeout: The limit of the pool, in seconds.
        is_closed: Whether the pool may be closed already.
        cancels: Whether sessions may be cancelled.
    """

    idle_timeout: float | None
    is_closed: bool = False
    cancels: bool = True


@dataclasses.dataclass(eq=False)
class Visit:
    """One request for a session, and what is known of it.

    Attributes:
        name: Its name.
        timeout: How long the user waits for it, in seconds; None: without limit.
        asked_at: When it was asked for.
        session: The session; None before it was granted, and if it never was.
        process: The number of its process; None if it has none any more when it is granted.
        called_at: When the user made the last call.
        error: What has ended the block.
        first_outcome: The outcome that was seen first.
        is_cancelled: Whether somebody cancels it.
        is_aborted: Whether the user has aborted or cancelled a call.
        fatal: The first fatal error that a call has ended with while the user waited for it.
    """

    name: str
    timeout: float | None
    asked_at: float
    session: Any = None
    process: int | None = None
    called_at: float = 0.0
    error: BaseException | None = None
    first_outcome: Any = None
    is_cancelled: bool = False
    is_aborted: bool = False
    fatal: BaseException | None = None

    @property
    def kind(self) -> str:
        """How the session has ended; empty if there was none."""
        if self.session is None:
            return ""
        return getattr(self.session.outcome, "kind", "completed")


class Users:
    """Whoever uses the sessions of one pool.

    Args:
        world: The world.
        plan: What they may do.

    Attributes:
        visits: All requests for sessions, oldest first.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._random = world.random
        self._plan = plan
        self._tokens = itertools.count()
        self.visits: list[Visit] = []

    # Visits ----------------------------------------------------------------------------------------------

    async def visit(self, pool: ea.SessionPool[Any], name: str) -> None:
        """Use one session, and check how it has ended."""
        timeout = self._random.choice((None, None, 0.0, 0.5))
        visit = self._make_visit(name, timeout)
        use = self._use_in_thread if self._world.chance(0.1) else self._use
        if use == self._use_in_thread and timeout is None and self._plan.idle_timeout is None:
            visit.timeout = 0.5  # no actor is given back while the loop is blocked
        task = asyncio.ensure_future(use(pool, visit))
        if self._plan.cancels and self._world.chance(0.3):
            await asyncio.wait([task], timeout=self._random.choice(_PAUSES))
            if not task.done():
                self._world.note(f"{name} is cancelled")
                visit.is_cancelled = True
                task.cancel()
        await asyncio.wait([task])
        if visit.error is None and not task.cancelled():
            visit.error = task.exception()
        elif visit.error is None:
            visit.error = asyncio.CancelledError()
        if isinstance(visit.error, Violation):
            raise visit.error
        self._check(visit)

    async def episode(self, env: Any, task: str) -> int:
        """Use one session of a run."""
        visit = self._make_visit(task, None)
        self._enter(visit, env)
        visit.is_cancelled = True  # the run may be ended at any time
        await self._act(visit)
        return len(task)

    def _make_visit(self, name: str, timeout: float | None) -> Visit:
        visit = Visit(name, timeout, self._world.now)
        self.visits.append(visit)
        return visit

    async def _use(self, pool: ea.SessionPool[Any], visit: Visit) -> None:
        try:
            async with pool.session(visit.name, visit.timeout) as env:
                self._enter(visit, env)
                await self._act(visit)
        except BaseException as error:
            visit.error = error
            raise

    async def _use_in_thread(self, pool: ea.SessionPool[Any], visit: Visit) -> None:
        """Use a session without an event loop."""
        try:
            with pool.session(visit.name, visit.timeout) as env:
                self._enter(visit, env)
                for _ in range(self._random.randrange(_MOST_ACTIONS)):
                    future = self._call(visit)
                    self._meddle(visit, future)
                    with self._noted(visit):
                        future.result(self._random.choice((None, None, 0.01)))
        except BaseException as error:
            visit.error = error
            raise

    def _enter(self, visit: Visit, env: Any) -> None:
        process = env._supervisor.core.process
        visit.session = env
        visit.called_at = self._world.now - env.seconds
        visit.process = None if process is None else process.worker.pid - FIRST_PID
        self._world.note(f"{visit.name} has a session in process {visit.process}")

    # Within a session ------------------------------------------------------------------------------------

    async def _act(self, visit: Visit) -> None:
        actions: list[Callable[[Visit], Coroutine[Any, Any, None]]]
        actions = [self._wait_for_call] * 5 + [self._pause] * 2 + [self._wait_impatiently, self._wait_for_two]
        actions += [self._leave_call, self._raise, self._abandon]
        for _ in range(self._random.randrange(_MOST_ACTIONS)):
            await self._random.choice(actions)(visit)

    def _call(self, visit: Visit) -> Any:
        token = next(self._tokens)
        self._world.note(f"{visit.name} calls with {token}")
        future = visit.session.note(visit.name, token)
        visit.called_at = self._world.now
        return future

    async def _wait_for_call(self, visit: Visit) -> None:
        future = self._call(visit)
        self._meddle(visit, future)
        with self._noted(visit):
            await future

    async def _wait_impatiently(self, visit: Visit) -> None:
        with self._noted(visit), contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._call(visit), 0.01)
            return
        visit.is_aborted = True  # the loop has cancelled the call

    async def _wait_for_two(self, visit: Visit) -> None:
        first, second = self._call(visit), self._call(visit)
        with self._noted(visit):
            await second
        with self._noted(visit):
            await first

    async def _leave_call(self, visit: Visit) -> None:
        self._call(visit)

    async def _pause(self, visit: Visit) -> None:
        await asyncio.sleep(self._random.choice(_PAUSES))

    async def _raise(self, visit: Visit) -> None:
        raise UserError(visit.name)

    async def _abandon(self, visit: Visit) -> None:
        """Do nothing until the session has ended by itself."""
        while self._plan.idle_timeout is not None and visit.session.outcome is None:
            await asyncio.sleep(1.0)

    def _meddle(self, visit: Visit, future: Any) -> None:
        """End a call in other ways, now and then."""
        if not self._world.chance(0.15):
            return
        visit.is_aborted = True
        self._random.choice((future.cancel, future.abort))()

    @contextlib.contextmanager
    def _noted(self, visit: Visit) -> Any:
        """Note the error of a call, and catch it now and then."""
        try:
            yield
        except (ea.ActorError, EnvFailedError, concurrent.futures.TimeoutError) as error:
            if isinstance(error, (ea.ActorDiedError, ea.ActorTimeoutError)) and visit.fatal is None:
                visit.fatal = error
            if self._world.chance(0.5):
                raise

    # Checks ----------------------------------------------------------------------------------------------

    def see_outcomes(self) -> None:
        """Check that no outcome changes; called at any time."""
        for visit in self.visits:
            outcome = None if visit.session is None else visit.session.outcome
            if visit.first_outcome is None:
                visit.first_outcome = outcome
            elif visit.first_outcome is not outcome:
                raise Violation(f"the session {visit.name} ends twice: {visit.first_outcome}, and {outcome}")

    def check_all(self) -> None:
        """Check the outcomes of all sessions, once all blocks have been left."""
        for visit in self.visits:
            if visit.session is not None:
                self._check_outcome(visit)

    def check_episode(self, outcome: Any, retries: int) -> None:
        """Check the outcome of an episode against those of its sessions."""
        attempts = [visit for visit in self.visits if visit.name == outcome.task]
        is_completed = isinstance(outcome, ea.Completed)
        if is_completed and outcome.value != len(outcome.task):
            raise Violation(f"the episode of {outcome.task} has returned {outcome.value}")
        if is_completed != (bool(attempts) and attempts[-1].kind == "completed"):
            raise Violation(f"{outcome} comes of {[visit.kind for visit in attempts]}")
        if len(attempts) > 1 + retries:
            raise Violation(f"{outcome.task} was tried {len(attempts)} times, with {retries} retries")

    def _check(self, visit: Visit) -> None:
        self._world.note(f"{visit.name} ends: {visit.kind}, {visit.error!r}")
        if visit.session is not None:
            self._check_outcome(visit)
        elif not self._may_be_refused(visit, visit.error):
            raise Violation(f"{visit.name} gets no session: {visit.error!r}") from visit.error

    def _may_be_refused(self, visit: Visit, error: BaseException | None) -> bool:
        if isinstance(error, ea.ActorStartError):
            return self._world.troubles > 0
        if isinstance(error, ea.ActorClosedError):
            return self._plan.is_closed
        if isinstance(error, _TIMEOUTS):
            return visit.timeout is not None and self._world.now >= visit.asked_at + visit.timeout
        if isinstance(error, asyncio.CancelledError):
            return visit.is_cancelled
        return isinstance(error, Interrupted)

    def _check_outcome(self, visit: Visit) -> None:
        outcome = visit.session.outcome
        if outcome is None:
            raise Violation(f"the block of {visit.name} was left, and its session goes on")
        if isinstance(outcome, ea.Completed):
            if visit.error is not None or visit.fatal is not None:
                raise Violation(f"{visit.name} counts as completed after {visit.error or visit.fatal!r}")
            return
        if not self._may_fail(visit, outcome):
            raise Violation(f"{visit.name} ends as {outcome.kind!r}: {outcome.error!r}") from outcome.error
        if outcome.retryable != (outcome.kind in ("timeout", "died")):
            raise Violation(f"{visit.name} ends as {outcome.kind!r}, retryable {outcome.retryable}")

    def _may_fail(self, visit: Visit, outcome: ea.Failed) -> bool:
        """Return whether something has happened for which a session may end in this way."""
        if outcome.kind == "died":
            return visit.process is None or visit.process in SessionEnv.crashed
        if outcome.kind == "timeout":
            return any(number == visit.process for number, _ in self._world.hung)
        if outcome.kind == "idle":
            limit = self._plan.idle_timeout
            return limit is not None and self._world.now >= visit.called_at + limit
        if outcome.kind == "exception":
            return isinstance(outcome.error, (UserError, EnvFailedError, Interrupted, ea.ActorClosedError, *_TIMEOUTS))
        return outcome.kind == "cancelled" and (visit.is_cancelled or visit.is_aborted or self._plan.is_closed)
