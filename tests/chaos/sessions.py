"""The session workload: users that crash, hang, abandon, and cancel their sessions, and a check of every outcome."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import faulthandler
import random
import signal
import sys
import time
from typing import Any

import envactors as ea
from chaos.ledger import Ledger
from chaos.leftovers import descendants, find_leftovers
from chaos.machine_watch import MachineWatch
from chaos.node_keeper import NodeKeeper
from envactors.remote import LocalNodes

# What share of the sessions ends in each way; the others complete.
_SHARES = {
    "crash": 0.05,
    "hang": 0.05,
    "abandon": 0.05,
    "cancel while waiting": 0.0125,
    "cancel while starting": 0.0125,
    "cancel in a call": 0.0125,
    "cancel while closing": 0.0125,
}
# The kinds of outcome that each may have.
_EXPECTED = {
    "complete": {"completed"},
    "crash": {"died"},
    "hang": {"timeout"},
    "abandon": {"idle"},
    "cancel while waiting": {"none"},
    "cancel while starting": {"none", "cancelled", "completed"},
    "cancel in a call": {"cancelled"},
    "cancel while closing": {"cancelled", "completed"},
}
_DEADLINE = 2.0  # seconds per call
_IDLE_TIMEOUT = 2.0  # seconds
_PATIENCE = 60.0  # seconds that anything may take
_LEASE = 3.0  # of nodes, in seconds


@dataclasses.dataclass
class SessionReport:
    """The result of a run.

    Attributes:
        sessions: How many users there were.
        outcomes: How many of them ended in each way.
        wrong: What should not have happened, in words.
    """

    sessions: int
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)


class SessionStorm:
    """Plays many sessions against one pool.

    Args:
        sessions: How many.
        seed: Decides what each does.
        size: How many may run at a time.
        nodes: Over how many local nodes; one of them is killed in the middle. 0 for none.
    """

    def __init__(self, sessions: int, *, seed: int = 0, size: int = 8, nodes: int = 0) -> None:
        self._dice = random.Random(seed)
        self._size = size
        self._nodes = nodes
        # The sessions whose blocks have not been left; the pool may have ended some of them before.
        self._entered: set[Any] = set()
        self._are_nodes_lost = False
        self._has_stalled = False
        self._keeper: NodeKeeper | None = None
        self.report = SessionReport(sessions)

    def run(self) -> SessionReport:
        """Play all sessions; return the result."""
        before = descendants()
        with contextlib.ExitStack() as stack:
            backend: Any = "process"
            if self._nodes:
                launcher = LocalNodes(self._nodes)
                backend = ea.RemoteBackend(launcher, lease=_LEASE, heartbeat=_LEASE / 5)
                lateness = stack.enter_context(MachineWatch()).lateness
                self._keeper = NodeKeeper(launcher, backend, _LEASE, lateness)
            pool: ea.SessionPool[Ledger] = stack.enter_context(
                ea.SessionPool(
                    Ledger,
                    self._size,
                    standbys=max(2, self._size // 4),
                    deadlines=_DEADLINE,
                    idle_timeout=_IDLE_TIMEOUT,
                    backend=backend,
                )
            )
            with self._keeper or contextlib.nullcontext():
                asyncio.run(self._play_all(pool))
                self._check_pool(pool)
            if self._keeper is not None and self._keeper.unexplained:
                self._complain(f"the nodes {self._keeper.unexplained} were lost while the machine was not late")
        if left := find_leftovers(before, _PATIENCE):
            self._complain(f"processes are left: {left}")
        return self.report

    async def _play_all(self, pool: ea.SessionPool[Ledger]) -> None:
        waiting = asyncio.Semaphore(3 * self._size)
        tasks = set()
        for user in range(self.report.sessions):
            await waiting.acquire()
            task = asyncio.ensure_future(self._play(pool, user))
            tasks.add(task)
            task.add_done_callback(lambda _: waiting.release())
            if self._nodes and user == self.report.sessions // 2:
                await self._lose_node()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if error is not None:
                self._complain(f"a user ended with {error!r}")

    async def _lose_node(self) -> None:
        """Kill the agent of one node."""
        assert self._keeper is not None, "there are nodes"
        while not self._keeper.nodes:
            await asyncio.sleep(0.02)
        self._are_nodes_lost = True
        self._keeper.end(self._keeper.nodes[0], signal.SIGKILL)

    async def _play(self, pool: ea.SessionPool[Ledger], user: int) -> None:
        fate = self._choose_fate()
        sessions: list[Any] = []
        task = asyncio.ensure_future(self._use(pool, user, fate, sessions))
        if fate == "cancel while waiting":
            task.cancel()
        elif fate == "cancel while starting":
            await asyncio.sleep(self._dice.random() * 0.05)
            task.cancel()
        try:
            await asyncio.wait_for(task, _PATIENCE)
        except (asyncio.CancelledError, ea.EnvActorsError):
            pass
        except (TimeoutError, asyncio.TimeoutError):
            self._complain(f"user {user} ({fate}) has waited for {_PATIENCE:g} s")
            self._describe_stall(pool)
        self._check_outcome(user, fate, sessions)

    def _choose_fate(self) -> str:
        number = self._dice.random()
        for fate, share in _SHARES.items():
            number -= share
            if number < 0:
                return fate
        return "complete"

    async def _use(self, pool: ea.SessionPool[Ledger], user: int, fate: str, sessions: list[Any]) -> None:
        """Play one session."""
        async with pool.session(user) as env:
            sessions.append(env)
            self._entered.add(env)
            count = sum(session.outcome is None for session in self._entered)
            if count > self._size:
                self._complain(f"{count} sessions were open at a time: expected at most {self._size}")
            try:
                await self._work(env, user, fate)
            finally:
                self._entered.discard(env)

    async def _work(self, env: Any, user: int, fate: str) -> None:
        if before := await env.enter(user):
            self._complain(f"the session of user {user} has seen the state of {before}")
        value = (user, self._dice.random())
        if (echo := await env.echo(value)) != value:
            self._complain(f"user {user} sent {value} and got {echo}")
        if fate == "crash":
            await env.crash()
        elif fate == "hang":
            await env.hang()
        elif fate == "abandon":
            while env.outcome is None:
                await asyncio.sleep(0.02)
        elif fate == "cancel in a call":
            asyncio.get_running_loop().call_later(self._dice.random() * 0.05, _cancel, asyncio.current_task())
            await env.hang()
        elif fate == "cancel while closing":
            asyncio.get_running_loop().call_soon(_cancel, asyncio.current_task())

    def _check_outcome(self, user: int, fate: str, sessions: list[Any]) -> None:
        outcome = sessions[0].outcome if sessions else None
        kind = "none" if outcome is None else getattr(outcome, "kind", "completed")
        self.report.outcomes[kind] += 1
        if sessions and outcome is None:
            self._complain(f"the session of user {user} ({fate}) has not ended")
        are_lost = self._are_nodes_lost or (self._keeper is not None and self._keeper.replaced)
        allowed = _EXPECTED[fate] | ({"node", "start", "none", "died"} if are_lost else set())
        if kind not in allowed:
            self._complain(f"user {user} ({fate}) had the outcome {kind}: {outcome}")

    def _check_pool(self, pool: ea.SessionPool[Ledger]) -> None:
        """Check that the pool still has all its places, and that it counted each session once."""
        deadline = time.monotonic() + _PATIENCE
        while (stats := pool.stats()).idle < self._size and time.monotonic() < deadline:
            time.sleep(0.02)
        if stats.idle < self._size or stats.leased or stats.waiting:
            self._complain(f"places of the pool are lost: {stats}")
        counted = collections.Counter({kind: count for kind, count in stats.outcomes.items() if count})
        seen = self.report.outcomes.copy()
        refused = counted["start"] - seen["start"]  # those have raised before there was a session
        seen["start"] += refused
        seen["none"] -= refused
        del seen["none"]
        if +counted != +seen:
            self._complain(f"the pool has counted {dict(counted)}, the users {dict(seen)}")

    def _describe_stall(self, pool: ea.SessionPool[Ledger]) -> None:
        """Print what every actor and thread was doing when a user had waited too long for the first time."""
        if self._has_stalled:
            return
        self._has_stalled = True
        nodes = [] if self._keeper is None else self._keeper.nodes
        places = [str(handle.stats()) for handle in pool._handles]
        print(f"stalled, on the nodes {nodes}: {pool.stats()}", *places, sep="\n", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()

    def _complain(self, text: str) -> None:
        self.report.wrong.append(text)


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()
