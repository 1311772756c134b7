"""One history of a pool of sessions: users at random, and what has been promised to them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable
from typing import Any

import envactors as ea
from envactors.actor.handle import close_all
from envactors.sessions.places import Phase
from simulation.event_loop import WorldEventLoop
from simulation.installation import installed
from simulation.processes import SimulatedBackend
from simulation.session_env import SessionEnv
from simulation.session_users import Plan, Users
from simulation.world import Interrupted, Violation, World

# The most users of one history, and how long passes between two of them, in seconds.
_MOST_USERS = 12
_BETWEEN = (0.0, 0.0, 0.01, 0.5)
# The most tasks of a run of episodes.
_MOST_TASKS = 8
# How often a session is asked for that cannot be started because the system has no process to spare.
_MOST_STARTS = 20


class SessionHistory:
    """What the users of one pool do in one world.

    Args:
        seed: Decides everything.
        trace: Gets a line per event.

    Attributes:
        world: The world.
        users: The users.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.world = World(seed, trace)
        self.random = self.world.random
        self._size = self.random.randint(1, 3)
        self._plan = Plan(self.random.choice((None, 2.0, 5.0)))
        self.users = Users(self.world, self._plan)
        self._tasks: list[asyncio.Task[None]] = []

    def run(self) -> None:
        """Live through it.

        Raises:
            Violation: A promise does not hold.
        """
        with installed(self.world):
            loop = WorldEventLoop(self.world)
            asyncio.set_event_loop(loop)
            try:
                self._live(loop)
            finally:
                self.world.check = lambda: None
                asyncio.set_event_loop(None)
                loop.close()
                self.world.end()

    def _live(self, loop: WorldEventLoop) -> None:
        pool = self._make_pool()
        self.world.check = lambda: self._check_places(pool)
        self.world.on_signal = lambda: self._handle_signal(pool)
        SessionEnv.trouble = self.random.choice((0.0, 0.05, 0.2))
        try:
            loop.run_until_complete(self._play(pool))
        finally:
            SessionEnv.trouble = 0.0
            self.world.interrupts = False
            self._close(pool)
            self.world.check = lambda: None
        while self.world.step():
            pass
        self.users.check_all()
        if left := [process.number for process in self.world.processes if not process.has_ended]:
            raise Violation(f"the processes {left} are left")

    def _make_pool(self) -> ea.SessionPool[Any]:
        SessionEnv.may_hang = hangs = self.random.random() < 0.5
        SessionEnv.trouble = 0.0
        SessionEnv.crashed = set()
        deadlines = ea.Deadlines(call=1.0, reset=2.0, slow=self.random.choice((0.5, None)))
        fresh = self.random.choice(("process", "process", "reset"))
        SessionEnv.may_reset = fresh == "reset"
        standbys = self.random.choice((0, 0, 1, 2))
        self.world.note(
            f"{self._size} actors and {standbys} standbys, fresh {fresh}, idle {self._plan.idle_timeout}, hangs {hangs}"
        )
        return ea.SessionPool(
            SessionEnv,
            self._size,
            fresh=fresh,
            idle_timeout=self._plan.idle_timeout,
            start_timeout=5.0 if hangs else None,
            deadlines=deadlines if hangs else ea.Deadlines(slow=None),
            standbys=standbys,
            backend=SimulatedBackend(self.world, max_starting=self.random.choice((None, 1))),
        )

    # What happens ----------------------------------------------------------------------------------------

    async def _play(self, pool: ea.SessionPool[Any]) -> None:
        self.world.interrupts = self.random.random() < 0.3
        for number in range(self.random.randint(1, _MOST_USERS)):
            self._tasks.append(asyncio.ensure_future(self.users.visit(pool, f"user-{number}")))
            if self.world.chance(0.2):
                await asyncio.sleep(self.random.choice(_BETWEEN))
            self.random.choice((self._kill, self._read_stats, self._begin_run, self._do_nothing))(pool)
        if self.world.chance(0.1):
            await asyncio.sleep(self.random.choice(_BETWEEN))
            self._close(pool)
        await asyncio.gather(*self._tasks)
        self.world.interrupts = False
        if not self._plan.is_closed:
            await self._check_none_lost(pool)

    def _do_nothing(self, pool: ea.SessionPool[Any]) -> None:
        """Go on with the next user."""

    def _kill(self, pool: ea.SessionPool[Any]) -> None:
        alive = [process for process in self.world.processes if not process.has_ended]
        if alive and self.world.chance(0.3):
            process = self.random.choice(alive)
            self.world.note(f"process {process.number} is killed from outside")
            self.world.troubles += 1
            SessionEnv.crashed.add(process.number)
            process.kill()

    def _read_stats(self, pool: ea.SessionPool[Any]) -> None:
        with contextlib.suppress(Interrupted):
            stats = pool.stats()
            if stats.leased > self._size:
                raise Violation(f"{stats.leased} of {self._size} actors are leased")

    def _handle_signal(self, pool: ea.SessionPool[Any]) -> None:
        """Do what a handler may do while the user waits for something else."""
        self._read_stats(pool)

    def _close(self, pool: ea.SessionPool[Any]) -> None:
        self._plan.is_closed = True
        interrupts, self.world.interrupts = self.world.interrupts, False
        if self.world.chance(0.2):
            self.world.note("the program ends, which closes all actors")
            close_all([place.actor for place in pool._places.all], None)
        self.world.note("the pool is closed")
        pool.close()
        self.world.interrupts = interrupts

    def _begin_run(self, pool: ea.SessionPool[Any]) -> None:
        if self.world.chance(0.2):
            number = len(self._tasks)
            tasks = [f"task-{number}-{index}" for index in range(self.random.randint(1, _MOST_TASKS))]
            self._tasks.append(asyncio.ensure_future(self._run_episodes(pool, tasks)))

    async def _run_episodes(self, pool: ea.SessionPool[Any], tasks: list[str]) -> None:
        """Run an episode for each task, or for the first ones."""
        left = set(tasks)
        most = self.random.choice((len(tasks), len(tasks), 1))
        retries = self.random.choice((0, 2))
        outcomes: Any = pool.arun(self.users.episode, tasks, retries=retries)
        async for outcome in outcomes:
            if outcome.task not in left:
                raise Violation(f"{outcome.task} has two outcomes")
            left.remove(outcome.task)
            self.users.check_episode(outcome, retries)
            if isinstance(getattr(outcome, "error", None), Violation):
                raise outcome.error
            if len(tasks) - len(left) == most:
                break
        await outcomes.aclose()
        if most == len(tasks) and left:
            raise Violation(f"{left} have no outcome")

    # Checks ----------------------------------------------------------------------------------------------

    def _check_places(self, pool: ea.SessionPool[Any]) -> None:
        """Check what holds whenever no thread is in the middle of a change."""
        places = pool._places
        leased = places.count(Phase.LEASED)
        if leased > self._size:
            raise Violation(f"{leased} of {self._size} actors are leased")
        for place in places.all:
            if (place.session is not None) != (place.phase is Phase.LEASED):
                raise Violation(f"a place is {place.phase.name}, and its session is {place.session}")
            if place.phase is Phase.PREPARING and place.preparation is None and not pool._is_closed:
                raise Violation("nobody prepares a place")
        sessions = [place.session for place in places.all if place.session is not None]
        if len({session._supervisor for session in sessions}) < len(sessions):
            raise Violation("two sessions use the same actor")
        is_ready = any(place.phase is Phase.READY and place.actor._supervisor.is_usable for place in places.all)
        if is_ready and places.waiting and leased < self._size and not pool._is_closed:
            raise Violation("a request waits, and an actor is ready")
        self.users.see_outcomes()

    async def _check_none_lost(self, pool: ea.SessionPool[Any]) -> None:
        """Check that as many sessions as ever can run at a time, and that each one was counted."""
        SessionEnv.trouble = 0.0
        await asyncio.sleep(0)
        self._check_counts(pool)
        everybody = asyncio.Event()
        inside = 0

        async def enter(number: int) -> None:
            nonlocal inside
            for _ in range(_MOST_STARTS):
                with contextlib.suppress(ea.ActorStartError, ea.ActorDiedError):  # what has crashed before
                    async with pool.session(f"last-{number}") as env:
                        await env.note(f"last-{number}", number)
                        inside += 1
                        everybody.set() if inside == self._size else None
                        return await everybody.wait()
            raise Violation("no session can be started any more")

        await asyncio.gather(*[enter(number) for number in range(self._size)])
        stats = pool.stats()
        if stats.leased or stats.waiting:
            raise Violation(f"nobody uses the pool, and it counts {stats}")

    def _check_counts(self, pool: ea.SessionPool[Any]) -> None:
        """Check that the pool has counted each session once, and nothing else."""
        counted = collections.Counter(pool.stats().outcomes)
        seen = collections.Counter(visit.kind for visit in self.users.visits if visit.session is not None)
        unseen = counted - seen
        # A session may have begun for a user who then gave up, and a process that does not start ends a request.
        if seen - counted or set(+unseen) - {"cancelled", "idle", "start"}:
            raise Violation(f"the pool has counted {dict(counted)}, and its users have seen {dict(seen)}")
