"""One history: a user who does anything that the API allows, and checks of the promises."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import envactors as ea
from envactors.testing import EchoEnv
from simulation.checker import Checker
from simulation.envs import EnvFailedError, SimulatedEnv, get_state, set_state
from simulation.installation import installed
from simulation.invariants import Invariants
from simulation.policies import SimulatedPolicy
from simulation.processes import SimulatedBackend
from simulation.rollouts import RolloutUser
from simulation.session_history import SessionHistory
from simulation.world import Interrupted, Violation, World

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
        self.random = self.world.random
        self.num_envs = self.random.randint(1, 4)
        self.autoreset = self.random.choice(("next_step", "same_step", "disabled"))
        self.on_failure = self.random.choice(("raise", "renew", "replay"))
        self.seeds_episodes = self.random.random() < 0.2
        # Whether all that happens are crashes, of which a replay is to leave no trace.
        self.is_hidden = self.on_failure == "replay" and self.random.random() < 0.4
        self.checker = Checker(
            self.world,
            self.num_envs,
            autoreset=self.autoreset,
            on_failure=self.on_failure,
            seeds_episodes=self.seeds_episodes,
            is_hidden=self.is_hidden,
        )
        self.models = self.checker.models
        self.futures: dict[int, Any] = {}
        self.tokens = iter(range(1, 1_000_000))
        # Most histories have none: those that have take longer.
        self.rollouts = RolloutUser(self) if self.random.random() < _WITH_ROLLOUTS else None

    def run(self) -> None:
        """Run the history.

        Raises:
            Violation: A promise does not hold.
        """
        with installed(self.world), self.rollouts.installed() if self.rollouts else contextlib.nullcontext():
            try:
                self._live()
                self.checker.check_log()
            finally:
                self.world.end()

    # What the user does ----------------------------------------------------------------------------------

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
        for env_id, future in self.futures.items():
            if not future.done():
                raise Violation(f"the future of env {env_id} outlives the vector")
        if self.rollouts is not None:
            self.rollouts.check_ended()
        left = [process.number for process in self.world.processes if not process.has_ended]
        if left:
            raise Violation(f"the processes {left} are left")

    def _make_envs(self) -> ea.VectorEnv:
        hangs = self.random.random() < 0.5 and not self.is_hidden
        SimulatedEnv.may_hang = SimulatedPolicy.may_hang = hangs
        SimulatedEnv.trouble = SimulatedPolicy.trouble = 0.0
        # Without deadlines no timers fire either, so that endless waits are detected.
        deadlines, slow = ea.Deadlines(slow=None), self.random.choice((0.5, 1.5, None))
        if hangs:
            deadlines = ea.Deadlines(start=5.0, call=3.0, step=1.0, reset=2.0, policy=2.5, slow=slow)
        self._most_restarts = 1000 if self.is_hidden else self.random.choice((1000, 1000, 2))
        policy = ea.RestartPolicy(max_restarts=self._most_restarts, backoff=0.01)
        SimulatedEnv.poison = 0 if self.is_hidden else self.random.choice((0, 7))
        SimulatedEnv.discards = self.on_failure == "renew"
        # So that a replay takes longer than the deadline of a step.
        SimulatedEnv.pace = 0.3 if hangs and self.on_failure == "replay" and self.random.random() < 0.3 else 0.0
        max_running = self.random.choice((None, None, None, 1))
        SimulatedEnv.limit = max_running
        standbys = self.random.choice((0, 0, 1))
        backend = SimulatedBackend(self.world, max_starting=self.random.choice((None, 1)))
        per_actor = self.random.choice((1, 1, 2, 3))
        recycle = ea.RecyclePolicy(max_steps=2) if per_actor == 1 and self.random.random() < 0.2 else None
        snapshot = ea.SnapshotPolicy(get_state, set_state, every=3) if self.random.random() < 0.2 else None
        SimulatedEnv.most_episodes = None
        if recycle is not None and self.on_failure != "replay" and self.rollouts is None:
            SimulatedEnv.most_episodes = 1 + (self.autoreset == "same_step")
        SimulatedEnv.action_space = EchoEnv.action_space if self.random.random() < 0.7 else None
        self.world.note(
            f"{self.num_envs} envs, {per_actor} an actor, {self.on_failure}, {self.autoreset}, hangs {hangs}, "
            f"{standbys} standbys, {max_running} running, {recycle}, snapshots {snapshot is not None}, "
            f"seeds {self.seeds_episodes}, {SimulatedEnv.action_space}, hidden {self.is_hidden}, "
            f"rollouts {self.rollouts is not None}"
        )
        return ea.VectorEnv(
            [SimulatedEnv] * self.num_envs,
            envs_per_actor=per_actor,
            backend=backend,
            deadlines=deadlines,
            restart=policy,
            autoreset=self.autoreset,
            on_failure=self.on_failure,
            standbys=standbys,
            max_running=max_running,
            max_journal=1000 if self.is_hidden else self.random.choice((1000, 6)),
            recycle=recycle,
            snapshot=snapshot,
            seed_episodes=self.seeds_episodes,
        )

    def _use(self, envs: ea.VectorEnv) -> None:
        self._numbers = envs._core.slots.numbers
        invariants = Invariants(envs)
        self.world.check = invariants.check
        SimulatedEnv.trouble = SimulatedPolicy.trouble = 0.0 if self.is_hidden else self.random.choice((0.0, 0.05, 0.2))
        self.world.interrupts = self.random.random() < 0.3 and not self.is_hidden
        self.world.on_signal = lambda: self._handle_signal(envs)
        try:
            self.reset(envs, list(range(self.num_envs)), seed=7)
            actions, most = self._choose_actions(envs)
            for _ in range(self.random.randrange(most)):
                self.random.choice(actions)(envs)
                invariants.check()
            if self.random.random() < 0.5:
                self._take_all(envs)
                invariants.check_idle()
        finally:
            SimulatedEnv.trouble = 0.0
            self.world.interrupts = False
            envs.close()
            SimulatedPolicy.trouble = 0.0
            self.world.check = lambda: None

    def _choose_actions(self, envs: ea.VectorEnv) -> tuple[list[Callable[[ea.VectorEnv], object]], int]:
        """Return what the user does at random, and at most how often."""
        actions: list[Callable[[ea.VectorEnv], object]]
        actions = [self._step, self._step, self._send, self._receive, self._submit, self._take_future, self._call]
        actions += [self._kill, self._step_impatiently, self._reset_some, self._step_all]
        actions += [self._kill] if self.is_hidden else [self._renew]
        if self.rollouts is None:
            return actions, _MOST_ACTIONS
        self.rollouts.begin(envs)
        return actions + self.rollouts.actions(), _MOST_ACTIONS_WITH_ROLLOUTS

    def _idle(self) -> list[int]:
        idle = [env_id for env_id, model in enumerate(self.models) if not model.is_pending]
        self.random.shuffle(idle)
        return idle if self.world.chance(0.5) else idle[: self.random.randint(0, len(idle))]

    def _ready(self, envs: ea.VectorEnv) -> list[int]:
        """Return some idle envs that can step."""
        ids = self._idle()
        lost = next((env_id for env_id in ids if self.models[env_id].must_reset), None)
        if lost is not None and self.world.chance(0.1):
            with contextlib.suppress(ea.VectorInputError):
                envs.step([0], env_ids=[lost])
                raise Violation(f"env {lost}, whose episode was lost, steps")
        if any(self.models[env_id].needs_reset for env_id in ids):
            self.reset(envs, [env_id for env_id in ids if self.models[env_id].needs_reset])
        return [env_id for env_id in ids if not self.models[env_id].needs_reset and not self.models[env_id].is_pending]

    def _take_all(self, envs: ea.VectorEnv) -> None:
        """Take all results that are to come."""
        self.world.interrupts = False
        if self.rollouts is not None:
            self.rollouts.take_all(envs)
        self.take_pending(envs)
        while self.world.step():
            pass

    def take_pending(self, envs: ea.VectorEnv) -> None:
        """Take all results of steps."""
        while self.futures:
            self._take_future(envs)
        while any(model.is_pending for model in self.models):
            self._receive(envs)

    def _handle_signal(self, envs: ea.VectorEnv) -> None:
        """Do what a handler may do while the user waits for something else."""
        ids = [env_id for env_id in self._idle() if not self.models[env_id].needs_reset]
        if ids and self.world.chance(0.7):
            envs.send(self._begin(ids), env_ids=ids)
        else:
            # Nobody knows whether a reset that the user waits for was asked yet.
            self.checker.uncertain.add(self._call(envs))

    def _begin(self, ids: list[int], *, resets: bool = False) -> np.ndarray:
        for env_id in ids:
            model = self.models[env_id]
            model.may_skip |= model.is_pending
            model.token = None if resets else next(self.tokens)
            model.is_pending = True
            model.seed = model.options = None
            model.posted = int(self._numbers[env_id])
            model.notes_before += model.notes
            model.notes = []
        self.world.note(f"the user asks {[(env_id, self.models[env_id].token) for env_id in ids]}")
        return np.array([self.models[env_id].token or 0 for env_id in ids], np.int64)

    def _reset_some(self, envs: ea.VectorEnv) -> None:
        if ids := self._idle():
            seed = self.random.choice((None, 3, 1 << 64))
            self.reset(envs, ids, seed, self.random.choice((None, {"token": next(self.tokens)})))

    def reset(self, envs: ea.VectorEnv, ids: list[int], seed: int | None = None, options: Any = None) -> None:
        self._begin(ids, resets=True)
        for env_id in ids:
            model = self.models[env_id]
            model.options = options
            if seed is not None:
                self.world.failed_seeds = {failed for failed in self.world.failed_seeds if failed[0] != env_id}
                model.seed = model.root_seed = seed + env_id
                model.episode = -1

        def reset() -> list[Any]:
            obs, infos = envs.reset(seed=seed, options=options, env_ids=ids)
            return [(obs[row], 0.0, False, False, infos[row]) for row in range(len(ids))]

        while True:
            with contextlib.suppress(Interrupted):
                return self._take(ids, reset)
            for env_id in ids:
                self.models[env_id].may_skip = True  # it may have been reset, and is once more

    def _step_all(self, envs: ea.VectorEnv) -> None:
        """Step all envs at once, a few times."""
        ids = list(range(self.num_envs))
        for _ in range(self.random.randint(1, 3)):
            if any(model.is_pending for model in self.models):
                return
            if needing := [env_id for env_id in ids if self.models[env_id].needs_reset]:
                self.reset(envs, needing)
            if any(model.is_pending or model.needs_reset for model in self.models):
                return
            actions = self._begin(ids)
            timeout = self.random.choice((None, None, None, 1e-4))
            try:
                self._take(ids, lambda: list(zip(*envs.step(actions, timeout=timeout), strict=True)))  # noqa: B023
            except Interrupted:
                self.reset(envs, ids)

    def _renew(self, envs: ea.VectorEnv) -> None:
        actor = self.random.choice(envs.actors)
        self.world.note(f"the user renews {actor.name}")
        self.world.troubles += 1
        with contextlib.suppress(ea.ActorError, Interrupted):
            actor.renew().result()

    def _step(self, envs: ea.VectorEnv, timeout: float | None = None) -> None:
        if ids := self._ready(envs):
            actions = self._begin(ids)
            self.world.signal_is_due = self.world.chance(0.3)
            try:
                self._take(ids, lambda: list(zip(*envs.step(actions, env_ids=ids, timeout=timeout), strict=True)))
            except Interrupted:
                self.reset(envs, ids)

    def _step_impatiently(self, envs: ea.VectorEnv) -> None:
        self._step(envs, timeout=self.random.choice((0.0, 1e-4, 0.05)))

    def _take(self, ids: list[int], ask: Callable[[], list[Any]]) -> None:
        """Check what is returned for envs, and what is raised."""
        try:
            rows = ask()
        except ea.VectorTimeoutError as error:
            if not {*error.env_ids} <= {*ids}:
                raise Violation(f"{error.env_ids} are late, and {ids} were asked") from error
            return
        except ea.VectorStepError as error:
            self._settle_failures(ids, error)
            return
        for env_id, row in zip(ids, rows, strict=True):
            self.checker.settle(env_id, row)

    def _settle_failures(self, ids: list[int], error: ea.VectorStepError) -> None:
        fine = [env_id for env_id in ids if env_id not in error.failures]
        batch = error.batch
        rows = [] if batch is None or not fine else list(zip(*batch[1:6], strict=True))
        for env_id, row in zip(fine, rows, strict=True):
            self.checker.settle(env_id, row)
        for env_id, failure in error.failures.items():
            self.checker.fail(env_id, failure)

    def _send(self, envs: ea.VectorEnv) -> None:
        if ids := self._ready(envs):
            envs.send(self._begin(ids), env_ids=ids)

    def _receive(self, envs: ea.VectorEnv) -> None:
        if self.rollouts is not None and self.rollouts.is_rolling:
            return
        pending = [
            env_id for env_id, model in enumerate(self.models) if model.is_pending and env_id not in self.futures
        ]
        if not pending:
            return
        timeout = self.random.choice((None, 0.01))
        try:
            batch = envs.recv(min_envs=self.random.choice((None, 1, 2)), timeout=timeout)
        except Interrupted:
            return  # another one may receive them
        except ea.VectorStepError as error:
            batch = error.batch
            for env_id, failure in error.failures.items():
                self.checker.fail(env_id, failure)
        if batch is None:
            return
        for row, env_id in enumerate(batch.env_ids):
            self.checker.settle(int(env_id), [column[row] for column in batch[1:6]])

    def _submit(self, envs: ea.VectorEnv) -> None:
        if ids := self._ready(envs):
            actions = self._begin(ids)
            self.futures.update(zip(ids, envs.submit(actions, env_ids=ids), strict=True))

    def _take_future(self, envs: ea.VectorEnv) -> None:
        del envs
        if not self.futures:
            return
        env_id = self.random.choice(list(self.futures))
        future = self.futures.pop(env_id)
        if self.world.chance(0.1) and future.cancel():
            self.models[env_id].is_pending = False
            self.models[env_id].needs_reset = True
            return
        if self.world.chance(0.0 if self.is_hidden else 0.1) and future.abort():
            self.world.note(f"the user aborts what env {env_id} was asked")
            self.world.troubles += 1
        try:
            step = future.result()
        except concurrent.futures.CancelledError:
            self.models[env_id].is_pending = False
            self.models[env_id].needs_reset = True
        except Interrupted:
            self.futures[env_id] = future
        except (ea.ActorError, EnvFailedError) as error:
            self.checker.fail(env_id, error)
        else:
            self.checker.settle(env_id, step[1:6])

    def _call(self, envs: ea.VectorEnv) -> int:
        env_id = self.random.randrange(self.num_envs)
        token = next(self.tokens)
        retries = self.checker.retries[token] = self.random.choice((0, 0, 1))
        self.world.note(f"the user calls env {env_id} with {token}, {retries} retries")
        model = self.models[env_id]
        future = envs[env_id].options(retries=retries).note(token)
        model.notes.append(token)
        if self.world.chance(0.0 if self.is_hidden else 0.1) and future.abort():
            self.world.troubles += 1  # it may have ended the process, which other envs are in
        elif self.world.chance(0.1) and future.cancel():
            (model.notes if token in model.notes else model.notes_before).remove(token)
            return token
        try:
            answer = future.result()
        except EnvFailedError:
            return token
        except (concurrent.futures.CancelledError, Interrupted):
            self.checker.uncertain.add(token)
            return token
        except ea.ActorError as error:
            self.checker.uncertain.add(token)
            if not self.world.troubles:
                self.checker.check_cause(env_id, error)
            return token
        if answer != token:
            raise Violation(f"a call with {token} returns {answer}")
        return token

    def _kill(self, envs: ea.VectorEnv) -> None:
        del envs
        alive = [process for process in self.world.processes if not process.has_ended]
        if alive and self.checker.may_kill:
            self.checker.may_kill = not self.is_hidden  # the same inputs are not tried a third time
            process = self.random.choice(alive)
            self.world.note(f"process {process.number} is killed from outside")
            self.world.troubles += 1
            process.kill()


def run_histories(seeds: Iterable[int]) -> Iterator[tuple[int, Violation | None]]:
    """Run histories; yield the seed of each one and what was violated.

    Garbage is collected between them, never in the middle of one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number, seed in enumerate(seeds):
            yield seed, run_history(seed)
            if number % _BETWEEN_COLLECTIONS == 0:
                gc.collect()
    finally:
        if was_enabled:
            gc.collect()
            gc.enable()


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
