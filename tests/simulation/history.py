"""One history: a vector at random, a user who does anything that the API allows, and checks of the promises."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import envactors as ea
from envactors.testing import EchoEnv
from simulation.checker import Checker
from simulation.companion import Companion
from simulation.envs import STEP_DEADLINE, SimulatedEnv
from simulation.invariants import Invariants
from simulation.processes import SimulatedBackend
from simulation.runtime import installed, run_to_end
from simulation.user import User
from simulation.world import Violation, World

# The most that a user does in one history.
_MOST_ACTIONS = 24
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
        self._num_envs = self._random.randint(1, 4)
        self._autoreset: Any = self._random.choice(("next_step", "same_step", "disabled"))
        self._on_failure: Any = self._random.choice(("raise", "renew", "replay"))
        self._seeds_episodes = self._random.random() < 0.35
        # Whether all that happens are crashes, of which a replay is to leave no trace.
        self._is_hidden = self._on_failure == "replay" and self._random.random() < 0.4
        self._checker = Checker(
            self.world,
            self._num_envs,
            autoreset=self._autoreset,
            on_failure=self._on_failure,
            seeds_episodes=self._seeds_episodes,
            is_hidden=self._is_hidden,
        )

    def run(self) -> None:
        """Run the history.

        Raises:
            Violation: A promise does not hold.
        """
        with installed(self.world):
            try:
                self._live()
                self._checker.check_log()
            finally:
                self.world.check = lambda: None
                self.world.end()

    def _live(self) -> None:
        try:
            envs = self._make_envs()
        except ea.RestartsExhaustedError:
            if self.world.troubles <= self._most_restarts:
                raise  # otherwise that many starts have failed
            run_to_end(self.world)
            return
        # Calls of another thread would leave traces.
        has_companion = self._random.random() < 0.15 and not self._is_hidden
        companion = Companion(envs, self._checker) if has_companion else None
        user = self._use(envs)
        run_to_end(self.world)
        user.check_ended()
        if companion is not None:
            companion.check_ended()

    def _make_envs(self) -> ea.VectorEnv:
        options = self._choose_failures()
        backend = SimulatedBackend(self.world, max_starting=self._random.choice((None, 1)))
        per_actor = self._random.choice((1, 1, 2, 3))
        length = SimulatedEnv.length = self._random.choice((1, 3))
        has_limit = per_actor == 1 and self._random.random() < 0.3
        recycle = ea.RecyclePolicy(max_steps=min(length, 2)) if has_limit else None
        self._checker.resets_later = recycle is not None and self._autoreset == "same_step"
        SimulatedEnv.most_episodes = None
        if recycle is not None and self._on_failure != "replay":
            SimulatedEnv.most_episodes = 1 + (self._autoreset == "same_step")
        has_space = self._random.random() < 0.7
        SimulatedEnv.action_space = EchoEnv.action_space if has_space else None  # type: ignore[assignment]
        self.world.note(
            f"{self._num_envs} envs, {per_actor} an actor, {self._on_failure}, {self._autoreset}, "
            f"hangs {SimulatedEnv.may_hang}, {recycle}, seeds {self._seeds_episodes}, spaces {has_space}, "
            f"hidden {self._is_hidden}, restarts {self._most_restarts}, {length} steps an episode"
        )
        return ea.VectorEnv(
            [SimulatedEnv] * self._num_envs,
            envs_per_actor=per_actor,
            backend=backend,
            autoreset=self._autoreset,
            max_journal=1000 if self._is_hidden else self._random.choice((1000, 6)),
            recycle=recycle,
            seed_episodes=self._seeds_episodes,
            **options,
        )

    def _choose_failures(self) -> dict[str, Any]:
        """Choose what goes wrong; return the options of the vector that are about it."""
        hangs = self._random.random() < 0.5 and not self._is_hidden
        SimulatedEnv.may_hang, SimulatedEnv.trouble = hangs, 0.0
        # Without deadlines no timers fire either, so that endless waits are detected.
        deadlines, slow = ea.Deadlines(slow=None), self._random.choice((0.5, 1.5, None))
        if hangs:
            deadlines = ea.Deadlines(start=5.0, call=3.0, step=STEP_DEADLINE, reset=2.0, slow=slow)
        self._most_restarts = 1000 if self._is_hidden else self._random.choice((1000, 1000, 2))
        restart = ea.RestartPolicy(max_restarts=self._most_restarts, backoff=0.01)
        SimulatedEnv.poison = 0 if self._is_hidden else self._random.choice((0, 7))
        SimulatedEnv.discards = self._on_failure == "renew"
        SimulatedEnv.ends_retries = self._on_failure != "replay"
        # So that a replay takes longer than the deadline of a step.
        SimulatedEnv.pace = 0.3 if hangs and self._on_failure == "replay" and self._random.random() < 0.3 else 0.0
        return {"deadlines": deadlines, "restart": restart, "on_failure": self._on_failure}

    def _use(self, envs: ea.VectorEnv) -> User:
        is_interrupted = self._random.random() < 0.3 and not self._is_hidden
        user = User(envs, self._checker, is_interrupted=is_interrupted)
        invariants = Invariants(envs)
        self.world.check = invariants.check
        self.world.on_signal = user.handle_signal
        SimulatedEnv.trouble = 0.0 if self._is_hidden else self._random.choice((0.0, 0.05, 0.2))
        self.world.interrupts = self._random.random() < 0.3 and not self._is_hidden
        try:
            user.reset(list(range(self._num_envs)), seed=7)
            for _ in range(self._random.randrange(_MOST_ACTIONS)):
                user.act()
                invariants.check()
            if self._random.random() < 0.5:
                user.take_all()
                invariants.check_idle()
        finally:
            SimulatedEnv.trouble = 0.0
            self.world.interrupts = False
            user.close()
        return user


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
    """Run one history; return what was violated, None if nothing was."""
    try:
        History(seed, trace).run()
    except Violation as violation:
        return violation
    except Exception as error:
        violation = Violation(f"the user is told {error!r}")
        violation.__cause__ = error
        return violation
    return None
