"""One history: a vector at random, a user who does anything that the API allows, and checks of the promises."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import envactors as ea
from envactors.testing import EchoEnv
from simulation.checker import Checker
from simulation.envs import SimulatedEnv, get_state, set_state
from simulation.installation import installed
from simulation.invariants import Invariants
from simulation.policies import SimulatedPolicy
from simulation.processes import SimulatedBackend
from simulation.rollouts import RolloutUser
from simulation.session_history import SessionHistory
from simulation.user import User
from simulation.world import Violation, World

# The most that a user does in one history.
_MOST_ACTIONS = 24
# How many of all histories have rollouts, and the most that a user does in one of those.
_WITH_ROLLOUTS = 0.25
_MOST_ACTIONS_WITH_ROLLOUTS = 16
# One of this many histories is that of a pool of sessions.
_ONE_IN = 5
# How many histories run until garbage is collected.
_BETWEEN_COLLECTIONS = 10


class History:
    """The actions of one user in one world.

    Args:
        seed: Decides everything.
        trace: Gets a line per event.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.world = World(seed, trace)
        self._random = self.world.random
        num_envs = self._random.randint(1, 4)
        self._autoreset = self._random.choice(("next_step", "same_step", "disabled"))
        self._on_failure = self._random.choice(("raise", "renew", "replay"))
        self._seeds_episodes = self._random.random() < 0.2
        # Whether all that happens are crashes, of which a replay is to leave no trace.
        self._is_hidden = self._on_failure == "replay" and self._random.random() < 0.4
        self._checker = Checker(
            self.world,
            num_envs,
            autoreset=self._autoreset,
            on_failure=self._on_failure,
            seeds_episodes=self._seeds_episodes,
            is_hidden=self._is_hidden,
        )
        self._user = User(self.world, self._checker)
        # Most histories have none: those that have take longer.
        if self._random.random() < _WITH_ROLLOUTS:
            self._user.rollouts = RolloutUser(self._user, self._autoreset)

    def run(self) -> None:
        """Run the history.

        Raises:
            Violation: A promise does not hold.
        """
        rollouts = self._user.rollouts
        with installed(self.world), contextlib.nullcontext() if rollouts is None else rollouts.installed():
            try:
                self._live()
                self._checker.check_log()
            finally:
                self.world.end()

    def _live(self) -> None:
        try:
            envs = self._make_envs()
        except ea.RestartsExhaustedError:
            if self.world.troubles <= self._most_restarts:
                raise  # otherwise that many starts have failed
        else:
            self._use(envs)
        while self.world.step():
            pass
        self._user.check_ended()
        left = [process.number for process in self.world.processes if not process.has_ended]
        if left:
            raise Violation(f"the processes {left} are left")

    def _make_envs(self) -> ea.VectorEnv:
        options = self._choose_failures()
        max_running = SimulatedEnv.limit = self._random.choice((None, None, None, 1))
        standbys = self._random.choice((0, 0, 1))
        backend = SimulatedBackend(self.world, max_starting=self._random.choice((None, 1)))
        per_actor = self._random.choice((1, 1, 2, 3))
        recycle = ea.RecyclePolicy(max_steps=2) if per_actor == 1 and self._random.random() < 0.2 else None
        snapshot = ea.SnapshotPolicy(get_state, set_state, every=3) if self._random.random() < 0.2 else None
        SimulatedEnv.most_episodes = None
        if recycle is not None and self._on_failure != "replay" and self._user.rollouts is None:
            SimulatedEnv.most_episodes = 1 + (self._autoreset == "same_step")
        SimulatedEnv.action_space = EchoEnv.action_space if self._random.random() < 0.7 else None
        self.world.note(
            f"{self._user.num_envs} envs, {per_actor} an actor, {self._on_failure}, {self._autoreset}, "
            f"hangs {SimulatedEnv.may_hang}, {standbys} standbys, {max_running} running, {recycle}, "
            f"snapshots {snapshot is not None}, seeds {self._seeds_episodes}, {SimulatedEnv.action_space}, "
            f"hidden {self._is_hidden}, rollouts {self._user.rollouts is not None}"
        )
        return ea.VectorEnv(
            [SimulatedEnv] * self._user.num_envs,
            envs_per_actor=per_actor,
            backend=backend,
            autoreset=self._autoreset,
            standbys=standbys,
            max_running=max_running,
            max_journal=1000 if self._is_hidden else self._random.choice((1000, 6)),
            recycle=recycle,
            snapshot=snapshot,
            seed_episodes=self._seeds_episodes,
            **options,
        )

    def _choose_failures(self) -> dict[str, Any]:
        """Choose what goes wrong; return the options of the vector that are about it."""
        hangs = self._random.random() < 0.5 and not self._is_hidden
        SimulatedEnv.may_hang = SimulatedPolicy.may_hang = hangs
        SimulatedEnv.trouble = SimulatedPolicy.trouble = 0.0
        # Without deadlines no timers fire either, so that endless waits are detected.
        deadlines, slow = ea.Deadlines(slow=None), self._random.choice((0.5, 1.5, None))
        if hangs:
            deadlines = ea.Deadlines(start=5.0, call=3.0, step=1.0, reset=2.0, policy=2.5, slow=slow)
        self._most_restarts = 1000 if self._is_hidden else self._random.choice((1000, 1000, 2))
        restart = ea.RestartPolicy(max_restarts=self._most_restarts, backoff=0.01)
        SimulatedEnv.poison = 0 if self._is_hidden else self._random.choice((0, 7))
        SimulatedEnv.discards = self._on_failure == "renew"
        # So that a replay takes longer than the deadline of a step.
        SimulatedEnv.pace = 0.3 if hangs and self._on_failure == "replay" and self._random.random() < 0.3 else 0.0
        return {"deadlines": deadlines, "restart": restart, "on_failure": self._on_failure}

    def _use(self, envs: ea.VectorEnv) -> None:
        user = self._user
        user.begin(envs)
        invariants = Invariants(envs)
        self.world.check = invariants.check
        trouble = 0.0 if self._is_hidden else self._random.choice((0.0, 0.05, 0.2))
        SimulatedEnv.trouble = SimulatedPolicy.trouble = trouble
        self.world.interrupts = self._random.random() < 0.3 and not self._is_hidden
        self.world.on_signal = lambda: user.handle_signal(envs)
        try:
            user.reset(envs, list(range(user.num_envs)), seed=7)
            actions = user.choose_actions(envs)
            most = _MOST_ACTIONS if user.rollouts is None else _MOST_ACTIONS_WITH_ROLLOUTS
            for _ in range(self._random.randrange(most)):
                self._random.choice(actions)(envs)
                invariants.check()
            if self._random.random() < 0.5:
                user.take_all(envs)
                invariants.check_idle()
        finally:
            SimulatedEnv.trouble = 0.0
            self.world.interrupts = False
            envs.close()
            SimulatedPolicy.trouble = 0.0
            self.world.check = lambda: None


def run_histories(seeds: Iterable[int]) -> Iterator[tuple[int, Violation | None]]:
    """Run histories; yield the seed of each one and what was violated.

    Garbage is collected between them, never in the middle of one; what is here already is not looked at.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        for number, seed in enumerate(seeds):
            yield seed, run_history(seed)
            if number % _BETWEEN_COLLECTIONS == 0:
                gc.collect()
    finally:
        if was_enabled:
            gc.collect()
            gc.enable()
        gc.unfreeze()


def run_history(seed: int, trace: Callable[[str], None] | None = None) -> Violation | None:
    """Run one history, of a vector or of a pool of sessions; return what was violated, None if nothing was."""
    kind = History if seed % _ONE_IN else SessionHistory
    try:
        kind(seed, trace).run()
    except Violation as violation:
        return violation
    except Exception as error:
        violation = Violation(f"the user is told {error!r}")
        violation.__cause__ = error
        return violation
    return None
