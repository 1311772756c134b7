"""A user who does everything at random that the API allows, and has every result checked at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np

import envactors as ea
from simulation.checker import Checker
from simulation.envs import EnvFailedError, SimulatedEnv
from simulation.interrupts import InterruptedInside, Interrupter
from simulation.world import Interrupted, Violation

# How often the user resets all envs after an interrupt until that must have worked.
_MOST_RESETS = 30
_ERRORS = (ea.ActorError, EnvFailedError, concurrent.futures.CancelledError)


class User:
    """Does what the API allows, at random.

    Args:
        envs: The vector.
        checker: Checks each result.
        is_interrupted: Whether signal handlers run anywhere in the library, not only where the user waits.

    Attributes:
        world, random: The world, and what decides what the user does.
        models: What is known of each env.
        futures: The futures of steps that the user holds, by env.
        calls: The futures of calls that the user holds, with their envs and tokens.
    """

    def __init__(self, envs: ea.VectorEnv, checker: Checker, *, is_interrupted: bool) -> None:
        self.envs = envs
        self.world = checker.world
        self.random = self.world.random
        self.checker = checker
        self.models = checker.models
        self._is_hidden = checker.is_hidden
        self.futures: dict[int, Any] = {}
        self.calls: list[tuple[int, int, Any]] = []
        self._call_ids = envs._engine.table.rows.posted_ids
        self._interrupter = Interrupter(self.world) if is_interrupted else None
        actions = [self._step, self._step, self._send, self._receive, self._receive, self._submit, self._take_future]
        actions += [self._call, self._call_later, self._take_call, self._kill, self._step_impatiently]
        actions += [self._reset_some, self._step_all, self._set_attr, self._get_attr, self._look]
        actions += [] if self._is_hidden else [self._renew, self._restart]
        # Whether a signal handler has received results while the user did something.
        self._has_received_inside = False
        self._actions: list[Callable[[], object]] = actions

    def act(self) -> None:
        """Do something."""
        self._has_received_inside = False
        action = self.random.choice(self._actions)
        if self._interrupter is None or self.world.chance(0.6):
            action()
            return
        raises = self.world.chance(0.7)
        try:
            with self._interrupter.armed(None if raises else self._handle_inside):
                action()
        except InterruptedInside:
            self._recover()

    def _handle_inside(self) -> None:
        """Use the vector in a signal handler at any line; where its thread has the lock, that is refused."""
        interrupts, self.world.interrupts = self.world.interrupts, False
        ids = [env_id for env_id in self._idle() if not self.models[env_id].needs_reset]
        models = copy.deepcopy(self.models)
        for model in models:
            self.checker.unordered.update(model.notes)  # the last one may come before or after what the handler does
        try:
            if ids and self.world.chance(0.7):
                self.envs.send(self._begin(ids), env_ids=ids)
        except RuntimeError:
            for model, before in zip(self.models, models, strict=True):
                vars(model).update(vars(before))
        if self.world.chance(0.3):
            self._receive_inside()
        with contextlib.suppress(RuntimeError):
            self._call_later()
            self.checker.unordered.add(self.calls[-1][1])
            if self.world.chance(0.5):
                self._take_call()
        self.world.interrupts = interrupts

    def _receive_inside(self, timeout: float | None = 0.0) -> None:
        """Receive a result in a signal handler, so that the interrupted call may find nothing."""
        try:
            batch = self.envs.recv(min_envs=1, timeout=timeout)
        except (RuntimeError, ea.NothingPendingError):
            return
        except ea.VectorStepError as error:
            batch = error.batch
            for env_id, failure in error.failures.items():
                self.checker.fail(env_id, failure)
            self._has_received_inside = True
        if batch is None:
            return
        self._has_received_inside |= len(batch.env_ids) > 0
        for row, env_id in enumerate(batch.env_ids):
            self.checker.settle(int(env_id), [column[row] for column in batch[1:6]])

    def _recover(self) -> None:
        """Continue after an exception at any line: all that it takes is a reset."""
        interrupts, self.world.interrupts = self.world.interrupts, False
        self.world.troubles += 1
        self.world.signal_is_due = False
        for model in self.models:
            self.checker.unordered.update(model.notes + model.notes_before)
            model.is_tag_known = False
        if self.world.chance(0.3):
            self._receive_leftovers()
        for env_id in list(self.futures):
            future, model = self.futures.pop(env_id), self.models[env_id]
            with contextlib.suppress(*_ERRORS):
                self.checker.check_process(env_id, model, future.result())
        while self.calls:
            self._take_call()
        ids = list(range(len(self.models)))
        for model in self.models:
            model.is_pending = False
        for attempt in range(_MOST_RESETS):
            self._begin(ids, resets=True)
            for env_id in ids:
                self.checker.expect_seed(env_id, 1000 * attempt + env_id)
            self._take(ids, self._reset_call(ids, seed=1000 * attempt))
            if not any(model.needs_reset for model in self.models) or self.checker.has_exhausted:
                break
        else:
            raise Violation("reset never works after an interrupt")
        self.world.interrupts = interrupts

    def _receive_leftovers(self) -> None:
        """Receive what an interrupt has left: every result still belongs to the last request of its env."""
        try:
            batch = self.envs.recv(timeout=self.random.choice((0.0, 0.01)))
        except ea.NothingPendingError:
            return
        except ea.VectorStepError as error:
            batch = error.batch
        if batch is not None:
            for row, env_id in enumerate(batch.env_ids):
                step = ea.EnvStep(int(env_id), *[column[row] for column in batch[1:]])
                self.checker.check_process(int(env_id), self.models[env_id], step)

    def take_all(self) -> None:
        """Take all results that are to come."""
        self.world.interrupts = False
        while self.calls:
            self._take_call()
        while self.futures:
            self._take_future()
        while any(model.is_pending for model in self.models):
            self._receive()

    def check_ended(self) -> None:
        """Check that everything has ended with the vector."""
        for future in [*self.futures.values(), *(future for _, _, future in self.calls)]:
            if not future.done():
                raise Violation("a future outlives the vector")

    def handle_signal(self) -> None:
        """Do what a handler may do while the user waits for something else."""
        ids = [env_id for env_id in self._idle() if not self.models[env_id].needs_reset]
        if ids and self.world.chance(0.7):
            for model in self.models:
                self.checker.uncertain.update(model.notes)  # the call that the user waits for may have failed by now
            self.envs.send(self._begin(ids), env_ids=ids)
            is_resetting = any(model.is_pending and model.token is None for model in self.models)
            if self.world.chance(0.3) and not is_resetting:
                self._receive_inside(timeout=None)
        else:
            # Nobody knows whether a reset that the user waits for was asked yet.
            self.checker.unordered.add(self._call())

    # Steps and resets ------------------------------------------------------------------------------------

    def _idle(self) -> list[int]:
        idle = [env_id for env_id, model in enumerate(self.models) if not model.is_pending]
        self.random.shuffle(idle)
        return idle if self.world.chance(0.5) else idle[: self.random.randint(0, len(idle))]

    def _ready(self) -> list[int]:
        """Return some idle envs that can step."""
        ids = self._idle()
        lost = next((env_id for env_id in ids if self.models[env_id].must_reset), None)
        if lost is not None and self.world.chance(0.1):
            with contextlib.suppress(ea.VectorInputError):
                self.envs.step([0], env_ids=[lost])
                raise Violation(f"env {lost}, whose episode was lost, steps")
        if needing := [env_id for env_id in ids if self.models[env_id].needs_reset]:
            self.reset(needing)
        return [env_id for env_id in ids if not self.models[env_id].needs_reset and not self.models[env_id].is_pending]

    def _begin(self, ids: list[int], *, resets: bool = False) -> np.ndarray:
        for env_id in ids:
            model = self.models[env_id]
            model.may_skip |= model.is_pending
            model.token_before = model.token if model.is_pending else None
            model.token = None if resets else self.checker.next_token()
            model.is_pending = True
            model.seed = model.options = None
            model.posted = int(self._call_ids[env_id])
            model.notes_before += model.notes
            model.notes = []
        self.world.note(f"the user asks {[(env_id, self.models[env_id].token) for env_id in ids]}")
        return np.array([self.models[env_id].token or 0 for env_id in ids], np.int64)

    def _reset_some(self) -> None:
        if ids := self._idle():
            seed = self.random.choice((None, 3, 1 << 64))
            self.reset(ids, seed, self.random.choice((None, {"token": self.checker.next_token()})))

    def reset(self, ids: list[int], seed: int | None = None, options: Any = None) -> None:
        """Reset envs, until no signal handler raises meanwhile."""
        self._begin(ids, resets=True)
        for env_id in ids:
            self.models[env_id].options = options
            if seed is not None:
                self.checker.expect_seed(env_id, seed + env_id)
        while True:
            with contextlib.suppress(Interrupted):
                return self._take(ids, self._reset_call(ids, seed, options))
            for env_id in ids:
                self.models[env_id].may_skip = True  # it may have been reset, and is once more

    def _reset_call(self, ids: list[int], seed: int | None, options: Any = None) -> Callable[[], list[Any]]:
        def reset() -> list[Any]:
            obs, infos = self.envs.reset(seed=seed, options=options, env_ids=ids)
            return [(obs[row], 0.0, False, False, infos[row]) for row in range(len(ids))]

        return reset

    def _step_all(self) -> None:
        """Step all envs at once, a few times."""
        ids = list(range(len(self.models)))
        for _ in range(self.random.randint(1, 3)):
            if any(model.is_pending for model in self.models):
                return
            if needing := [env_id for env_id in ids if self.models[env_id].needs_reset]:
                self.reset(needing)
            if any(model.is_pending or model.needs_reset for model in self.models):
                return
            self._step_envs(ids, self.random.choice((None, None, None, 1e-4)))

    def _step(self, timeout: float | None = None) -> None:
        if ids := self._ready():
            self.world.signal_is_due = self.world.chance(0.3)
            self._step_envs(ids, timeout)

    def _step_impatiently(self) -> None:
        self._step(timeout=self.random.choice((0.0, 1e-4, 0.05)))

    def _step_envs(self, ids: list[int], timeout: float | None) -> None:
        actions, env_ids = self._begin(ids), None if len(ids) == len(self.models) and ids == sorted(ids) else ids
        try:
            self._take(ids, lambda: list(zip(*self.envs.step(actions, env_ids, timeout), strict=True)))
        except Interrupted:
            self.reset(ids)

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
        except ea.NothingPendingError:
            if self._has_received_inside:
                return
            raise
        for env_id, row in zip(ids, rows, strict=True):
            self.checker.settle(env_id, row)

    def _settle_failures(self, ids: list[int], error: ea.VectorStepError) -> None:
        fine = [env_id for env_id in ids if env_id not in error.failures]
        rows = [] if error.batch is None or not fine else list(zip(*error.batch[1:6], strict=True))
        for env_id, row in zip(fine, rows, strict=True):
            self.checker.settle(env_id, row)
        for env_id, failure in error.failures.items():
            self.checker.fail(env_id, failure)

    def _send(self) -> None:
        if ids := self._ready():
            self.envs.send(self._begin(ids), env_ids=ids)

    def _receive(self) -> None:
        pending = [each for each, model in enumerate(self.models) if model.is_pending and each not in self.futures]
        if not pending:
            return
        min_envs, max_envs = self.random.choice(((None, None), (None, 1), (1, None), (1, 1), (2, None), (2, 3)))
        timeout = self.random.choice((None, 0.01))
        try:
            batch = self.envs.recv(min_envs=min_envs, max_envs=max_envs, timeout=timeout)
        except Interrupted:
            return  # another one may receive them
        except ea.NothingPendingError:
            if self._has_received_inside:
                return
            raise
        except ea.VectorStepError as error:
            batch = error.batch
            for env_id, failure in error.failures.items():
                self.checker.fail(env_id, failure)
        else:
            wanted = min([len(pending), *(limit for limit in (min_envs, max_envs) if limit is not None)])
            if timeout is None and len(batch.env_ids) < wanted and not self._has_received_inside:
                raise Violation(f"recv returns {len(batch.env_ids)} results, and {wanted} were wanted")
        if batch is None:
            return
        for row, env_id in enumerate(batch.env_ids):
            self.checker.settle(int(env_id), [column[row] for column in batch[1:6]])

    def _submit(self) -> None:
        if ids := self._ready():
            actions = self._begin(ids)
            self.futures.update(zip(ids, self.envs.submit(actions, env_ids=ids), strict=True))

    def _take_future(self) -> None:
        if not self.futures:
            return
        env_id = self.random.choice(list(self.futures))
        future, model = self.futures[env_id], self.models[env_id]
        if self.world.chance(0.1) and future.cancel():
            del self.futures[env_id]
            model.is_pending, model.needs_reset = False, True
            return
        if self.world.chance(0.0 if self._is_hidden else 0.1) and future.abort():
            self.world.note(f"the user aborts what env {env_id} was asked")
            self.world.troubles += 1
            self.world.aborts += 1
        timeout = self.random.choice((None, None, 0.001))
        try:
            step = future.result(timeout)
        except concurrent.futures.CancelledError:
            model.is_pending, model.needs_reset = False, True
        except (Interrupted, concurrent.futures.TimeoutError) as error:
            if not isinstance(error, _ERRORS):
                return  # the user keeps it
            self.checker.fail(env_id, error)
        except (ea.ActorError, EnvFailedError) as error:
            self.checker.fail(env_id, error)
        else:
            self.checker.settle(env_id, step[1:6])
        del self.futures[env_id]

    # Calls and attributes --------------------------------------------------------------------------------

    def _start_call(self, *, is_certain: bool = True) -> tuple[int, int, Any]:
        env_id, token = self.random.randrange(len(self.models)), self.checker.next_token()
        if not is_certain:
            self.checker.uncertain.add(token)
        retries = self.checker.retries[token] = self.random.choice((0, 0, 1))
        self.world.note(f"the user calls env {env_id} with {token}, {retries} retries")
        self.models[env_id].notes.append(token)
        return env_id, token, self.envs[env_id].options(retries=retries).note(token)

    def _call(self) -> int:
        call = self._start_call()
        self._end_call(*call)
        return call[1]

    def _call_later(self) -> None:
        """Leave the result of a call for later; nobody knows until then whether it has run."""
        self.calls.append(self._start_call(is_certain=False))

    def _take_call(self) -> None:
        if self.calls:
            self._end_call(*self.calls.pop(self.random.randrange(len(self.calls))))

    def _end_call(self, env_id: int, token: int, future: Any) -> None:
        model = self.models[env_id]
        if self.world.chance(0.0 if self._is_hidden else 0.1) and future.abort():
            self.world.troubles += 1  # it may have ended the process, which other envs are in
        elif self.world.chance(0.1) and future.cancel():
            self.checker.canceled.add(token)
            for notes in (model.notes, model.notes_before):
                if token in notes:
                    notes.remove(token)
            return
        try:
            answer = future.result()
        except EnvFailedError:
            return
        except (concurrent.futures.CancelledError, Interrupted):
            self.checker.uncertain.add(token)
            return
        except ea.ActorError as error:
            self.checker.uncertain.add(token)
            self.checker.check_call(env_id, token, error)
            return
        if answer != token:
            raise Violation(f"a call with {token} returns {answer}")

    def _set_attr(self) -> None:
        env_id, token = self.random.randrange(len(self.models)), self.checker.next_token()
        model = self.models[env_id]
        model.tags.append(token)
        self.world.note(f"the user sets the attribute of env {env_id} to {token}")
        try:
            self.envs.set_attr("tag", token, env_ids=[env_id])
        except (*_ERRORS, Interrupted):
            return  # it may be set, or not
        model.tags = [token]

    def _get_attr(self) -> None:
        env_id = self.random.randrange(len(self.models))
        model = self.models[env_id]
        try:
            (tag,) = self.envs.get_attr("tag", env_ids=[env_id])
        except (*_ERRORS, Interrupted):
            return
        gets_new_processes = self.world.troubles or SimulatedEnv.most_episodes is not None
        is_lost = tag == 0 and gets_new_processes and not self._is_hidden
        if model.is_tag_known and tag not in model.tags and not is_lost:
            raise Violation(f"the attribute of env {env_id} is {tag}, and {model.tags} was set")

    def _look(self) -> None:
        """Look at everything that may be looked at."""
        repr(self.envs.actors[0])
        stats = self.envs.stats()
        if len(stats.actors) != len(self.envs.actors):
            raise Violation("an actor is not counted")

    # Ends of processes -----------------------------------------------------------------------------------

    def _renew(self) -> None:
        actor = self.random.choice(self.envs.actors)
        self.world.note(f"the user renews {actor.name}")
        self.world.troubles += 1
        future = actor.renew()
        if self.world.chance(0.3):
            return
        if self.world.chance(0.1):
            future.abort()
        with contextlib.suppress(*_ERRORS, Interrupted):
            future.result()

    def _restart(self) -> None:
        actor = self.random.choice(self.envs.actors)
        self.world.note(f"the user restarts {actor.name}")
        self.world.troubles += 1
        actor.kill(restart=True)

    def _kill(self) -> None:
        alive = [process for process in self.world.processes if not process.has_ended]
        if alive and self.checker.may_kill:
            self.checker.may_kill = not self._is_hidden  # the same inputs are not tried a third time
            process = self.random.choice(alive)
            self.world.note(f"process {process.number} is killed from outside")
            self.world.troubles += 1
            process.kill()

    def close(self) -> None:
        """Close the vector, perhaps after an actor, or with everything under way."""
        if self.world.chance(0.1):
            actor = self.random.choice(self.envs.actors)
            self.world.note(f"the user kills {actor.name}")
            actor.kill()
        if self._interrupter is not None and self.world.chance(0.5):
            with contextlib.suppress(InterruptedInside), self._interrupter.armed(None):
                self.envs.close()
        self.envs.close(self.random.choice((None, None, 0.0, 1.0)))
