"""What a user does with the envs of a vector in a history: steps, resets, calls, and futures, all checked at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

import envactors as ea
from simulation.checker import Checker
from simulation.envs import EnvFailedError
from simulation.rollouts import RolloutUser
from simulation.world import Interrupted, Violation, World


class User:
    """Does what the API allows, at random, and has what comes of it checked.

    Args:
        world: The world.
        checker: Checks each result.

    Attributes:
        world: As above.
        random: Decides what the user does.
        num_envs: How many envs there are.
        checker: As above.
        models: What is known of each env.
        futures: The futures that the user holds, by env.
        tokens: What actions and calls are told apart by.
        rollouts: What the user does with rollouts; None for nothing.
    """

    def __init__(self, world: World, checker: Checker) -> None:
        self.world = world
        self.random = world.random
        self.checker = checker
        self.models = checker.models
        self.num_envs = len(checker.models)
        self._is_hidden = checker.is_hidden
        self.futures: dict[int, Any] = {}
        self.tokens = iter(range(1, 1_000_000))
        self.rollouts: RolloutUser | None = None

    def begin(self, envs: ea.VectorEnv) -> None:
        """Note the vector, which was just made."""
        self._numbers = envs._core.slots.numbers

    def choose_actions(self, envs: ea.VectorEnv) -> list[Callable[[ea.VectorEnv], object]]:
        """Return what the user does at random."""
        actions: list[Callable[[ea.VectorEnv], object]]
        actions = [self._step, self._step, self._send, self._receive, self._submit, self._take_future, self._call]
        actions += [self._kill, self._step_impatiently, self._reset_some, self._step_all]
        actions += [self._kill] if self._is_hidden else [self._renew]
        if self.rollouts is None:
            return actions
        self.rollouts.begin(envs)
        return actions + self.rollouts.actions()

    def check_ended(self) -> None:
        """Check that everything has ended with the vector."""
        for env_id, future in self.futures.items():
            if not future.done():
                raise Violation(f"the future of env {env_id} outlives the vector")
        if self.rollouts is not None:
            self.rollouts.check_ended()

    # What the user does ----------------------------------------------------------------------------------

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

    def take_all(self, envs: ea.VectorEnv) -> None:
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

    def handle_signal(self, envs: ea.VectorEnv) -> None:
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
        if self.world.chance(0.0 if self._is_hidden else 0.1) and future.abort():
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
        if self.world.chance(0.0 if self._is_hidden else 0.1) and future.abort():
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
            self.checker.may_kill = not self._is_hidden  # the same inputs are not tried a third time
            process = self.random.choice(alive)
            self.world.note(f"process {process.number} is killed from outside")
            self.world.troubles += 1
            process.kill()
