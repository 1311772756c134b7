"""One history: a user who does whatever a user may do with a vector, and what has been promised about it."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import envactors as ea
from envactors.actor import engine as engines
from envactors.actor.supervisor import Supervisor
from envactors.worker import main as worker
from simulation.envs import EnvFailedError, SimulatedEnv
from simulation.loop import Engine
from simulation.processes import End, Poller, SimulatedBackend
from simulation.world import Interrupted, Violation, World

# The most that a user does in one history.
_MOST_ACTIONS = 30
# How much longer than its deadline a close may take, in seconds.
_CLOSE_GRACE = 1.0


@dataclasses.dataclass
class Model:
    """What is known of an env.

    Attributes:
        last: Its last observation, None before the first.
        ended: Whether its episode has ended, so that the next step resets it.
        needs_reset: Whether only a reset will do.
        token: The action of the step under way, None for a reset; nothing is under way if ``is_pending`` is False.
        is_pending: Whether a step or reset is under way.
    """

    last: Any = None
    ended: bool = False
    needs_reset: bool = True
    token: int | None = None
    is_pending: bool = False


class History:
    """What one user does in one world.

    Args:
        seed: Decides everything.
        trace: Gets a line per event.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.world = World(seed, trace)
        self.random = self.world.random
        self.num_envs = self.random.randint(1, 4)
        self.models = [Model() for _ in range(self.num_envs)]
        self.autoreset = self.random.choice(("next_step", "same_step", "disabled"))
        self.on_failure = self.random.choice(("raise", "renew", "replay"))
        self.futures: dict[int, Any] = {}
        self._tokens = iter(range(1, 1_000_000))
        # How many more times calls may run than once, by their tokens.
        self._retries: collections.Counter[int] = collections.Counter()

    def run(self) -> None:
        """Live through it.

        Raises:
            Violation: A promise does not hold.
        """
        with self._installed():
            try:
                self._live()
                self._check_log()
            finally:
                self.world.end()

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        world = self.world
        real = engines._engine, worker.Poller, Supervisor.wait_closed
        engines._engine = Engine(world)  # type: ignore[assignment]
        worker.Poller = Poller  # type: ignore[assignment,misc]
        Poller.world = SimulatedEnv.world = world
        Supervisor.wait_closed = self._make_wait_closed()  # type: ignore[method-assign]
        End.by_fd.clear()
        try:
            with world.installed():
                yield
        finally:
            engines._engine, worker.Poller, Supervisor.wait_closed = real  # type: ignore[method-assign]

    def _make_wait_closed(self) -> Callable[[Supervisor, float | None], None]:
        world = self.world

        def wait_closed(supervisor: Supervisor, timeout: float | None) -> None:
            patience = supervisor.config.deadlines.close if timeout is None else timeout
            assert patience is not None, "closing always has a deadline here"
            deadline = world.now + patience + _CLOSE_GRACE
            while not supervisor.closed.is_set():
                if not world.step(deadline):
                    raise Violation(f"{supervisor.config.name} never closes")
                if world.now > deadline:
                    raise Violation(f"{supervisor.config.name} is not closed in time")

        return wait_closed

    # What the user does ----------------------------------------------------------------------------------

    def _live(self) -> None:
        hangs = self.random.random() < 0.5
        SimulatedEnv.may_hang = hangs
        SimulatedEnv.trouble = 0.0
        deadlines = ea.Deadlines(start=5.0, call=3.0, step=1.0, reset=2.0) if hangs else ea.Deadlines()
        policy = ea.RestartPolicy(max_restarts=self.random.choice((1000, 1000, 2)), backoff=0.01)
        SimulatedEnv.poison = self.random.choice((0, 7))
        max_running = self.random.choice((None, None, None, 1))
        SimulatedEnv.limit = max_running
        standbys = self.random.choice((0, 0, 1))
        backend = SimulatedBackend(self.world, max_starting=self.random.choice((None, 1)))
        per_actor = self.random.choice((1, 1, 2, 3))
        self.world.note(
            f"{self.num_envs} envs, {per_actor} an actor, {self.on_failure}, {self.autoreset}, hangs {hangs}, "
            f"{standbys} standbys, {max_running} running"
        )
        envs = ea.VectorEnv(
            [SimulatedEnv] * self.num_envs,
            envs_per_actor=per_actor,
            backend=backend,
            deadlines=deadlines,
            restart=policy,
            autoreset=self.autoreset,
            on_failure=self.on_failure,
            standbys=standbys,
            max_running=max_running,
        )
        SimulatedEnv.trouble = self.random.choice((0.0, 0.05, 0.2))
        self.world.interrupts = self.random.random() < 0.3
        try:
            self._reset(envs, list(range(self.num_envs)), seed=7)
            actions = [self._step, self._step, self._send, self._receive, self._submit, self._take_future, self._call]
            actions += [self._kill, self._step_impatiently, self._reset_some]
            for _ in range(self.random.randrange(_MOST_ACTIONS)):
                self.random.choice(actions)(envs)
        finally:
            SimulatedEnv.trouble = 0.0
            self.world.interrupts = False
            envs.close()
        while self.world.step():
            pass
        for env_id, future in self.futures.items():
            if not future.done():
                raise Violation(f"the future of env {env_id} outlives the vector")
        left = [process.number for process in self.world.processes if not process.has_ended]
        if left:
            raise Violation(f"the processes {left} are left")

    def _idle(self) -> list[int]:
        idle = [env_id for env_id, model in enumerate(self.models) if not model.is_pending]
        self.random.shuffle(idle)
        return idle if self.world.chance(0.5) else idle[: self.random.randint(0, len(idle))]

    def _ready(self, envs: ea.VectorEnv) -> list[int]:
        """Return some idle envs that can step."""
        ids = self._idle()
        if any(self.models[env_id].needs_reset for env_id in ids):
            self._reset(envs, [env_id for env_id in ids if self.models[env_id].needs_reset])
        return [env_id for env_id in ids if not self.models[env_id].needs_reset and not self.models[env_id].is_pending]

    def _begin(self, ids: list[int], *, resets: bool = False) -> np.ndarray:
        for env_id in ids:
            self.models[env_id].token = None if resets else next(self._tokens)
            self.models[env_id].is_pending = True
        self.world.note(f"the user asks {[(env_id, self.models[env_id].token) for env_id in ids]}")
        return np.array([self.models[env_id].token or 0 for env_id in ids], np.int64)

    def _reset_some(self, envs: ea.VectorEnv) -> None:
        if ids := self._idle():
            self._reset(envs, ids, seed=self.random.choice((None, 3)))

    def _reset(self, envs: ea.VectorEnv, ids: list[int], seed: int | None = None) -> None:
        self._begin(ids, resets=True)

        def reset() -> list[Any]:
            obs, infos = envs.reset(seed=seed, env_ids=ids)
            return [(obs[row], 0.0, False, False, infos[row]) for row in range(len(ids))]

        while True:
            with contextlib.suppress(Interrupted):
                return self._take(ids, reset)

    def _step(self, envs: ea.VectorEnv, timeout: float | None = None) -> None:
        if ids := self._ready(envs):
            actions = self._begin(ids)
            try:
                self._take(ids, lambda: list(zip(*envs.step(actions, env_ids=ids, timeout=timeout), strict=True)))
            except Interrupted:
                self._reset(envs, ids)

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
            self._settle(env_id, row)

    def _settle_failures(self, ids: list[int], error: ea.VectorStepError) -> None:
        fine = [env_id for env_id in ids if env_id not in error.failures]
        batch = error.batch
        rows = [] if batch is None or not fine else list(zip(*batch[1:6], strict=True))
        for env_id, row in zip(fine, rows, strict=True):
            self._settle(env_id, row)
        for env_id, failure in error.failures.items():
            self._fail(env_id, failure)

    def _fail(self, env_id: int, failure: BaseException) -> None:
        model = self.models[env_id]
        if not model.is_pending:
            raise Violation(f"env {env_id} fails twice: {failure!r}") from failure
        if not isinstance(failure, (ea.ActorError, EnvFailedError)):
            raise Violation(f"env {env_id} fails with {failure!r}") from failure
        self._check_cause(failure)
        model.is_pending = False
        model.needs_reset = True

    def _check_cause(self, failure: object) -> None:
        if not self.world.troubles:
            raise Violation(f"nothing has happened, and {failure!r}")

    def _settle(self, env_id: int, row: Any) -> None:
        """Check one result."""
        model = self.models[env_id]
        obs, _, terminated, truncated, info = row
        obs = np.array(obs)
        what = f"env {env_id}, asked {model.token}, answers {obs.tolist()}, {info}; before {model.last}"
        self.world.note(what)
        if not model.is_pending:
            raise Violation(f"two results of one request: {what}")
        if obs[0] != env_id:
            raise Violation(f"another env's result: {what}")
        failure = info.get("failure")
        if failure is not None and self.on_failure == "raise":
            raise Violation(f"a failure that is not raised: {what}")
        if failure is not None:
            self._check_cause(failure)
        final = np.array(info["final_obs"]) if "final_obs" in info else None
        shown = obs if final is None else final
        if failure is not None and truncated and self.autoreset != "same_step" and model.token is not None:
            if not np.array_equal(obs, model.last):
                raise Violation(f"not the last observation: {what}")
        elif failure is None and model.token is not None and not model.ended:
            self._check_step(model, shown, what)
        elif obs[1] != 0 or obs[2] != -1:
            raise Violation(f"no reset: {what}")
        model.last = obs
        model.is_pending = False
        model.needs_reset = self.autoreset == "disabled" and bool(terminated or truncated)
        model.ended = self.autoreset == "next_step" and bool(terminated or truncated)

    def _check_step(self, model: Model, obs: Any, what: str) -> None:
        assert model.token is not None
        if obs[2] != model.token:
            raise Violation(f"another action's result: {what}")
        if model.last is None:
            return
        wanted = zlib.crc32(struct.pack("<q", model.token), int(model.last[3]))
        if obs[1] != model.last[1] + 1 or obs[3] != wanted:
            raise Violation(f"a step that was repeated or skipped: {what}")

    def _send(self, envs: ea.VectorEnv) -> None:
        if ids := self._ready(envs):
            envs.send(self._begin(ids), env_ids=ids)

    def _receive(self, envs: ea.VectorEnv) -> None:
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
                self._fail(env_id, failure)
        if batch is None:
            return
        for row, env_id in enumerate(batch.env_ids):
            self._settle(int(env_id), [column[row] for column in batch[1:6]])

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
        try:
            step = future.result()
        except Interrupted:
            self.futures[env_id] = future
        except (ea.ActorError, EnvFailedError) as error:
            self._fail(env_id, error)
        else:
            self._settle(env_id, step[1:6])

    def _call(self, envs: ea.VectorEnv) -> None:
        env_id = self.random.randrange(self.num_envs)
        token = next(self._tokens)
        retries = self._retries[token] = self.random.choice((0, 0, 1))
        self.world.note(f"the user calls env {env_id} with {token}, {retries} retries")
        future = envs[env_id].options(retries=retries).note(token)
        if self.world.chance(0.1) and future.abort():
            self.world.troubles += 1  # it may have ended the process, which other envs are in
        elif self.world.chance(0.1):
            future.cancel()
        try:
            answer = future.result()
        except (concurrent.futures.CancelledError, EnvFailedError, Interrupted):
            return
        except ea.ActorError as error:
            self._check_cause(error)
            return
        if answer != token:
            raise Violation(f"a call with {token} returns {answer}")

    def _kill(self, envs: ea.VectorEnv) -> None:
        del envs
        alive = [process for process in self.world.processes if not process.has_ended]
        if alive:
            process = self.random.choice(alive)
            self.world.note(f"process {process.number} is killed from outside")
            self.world.troubles += 1
            process.kill()

    # What was promised -----------------------------------------------------------------------------------

    def _check_log(self) -> None:
        self.world.check_errors()
        runs = collections.Counter((env_id, token) for env_id, token, _ in self.world.log if token is not None)
        each = collections.Counter(entry for entry in self.world.log if entry[1] is not None)
        for (env_id, token), count in runs.items():
            if count > 1 + self._retries[token] and self.on_failure != "replay":
                raise Violation(f"env {env_id} ran {token} {count} times")
            is_fatal = SimulatedEnv.poison and token % SimulatedEnv.poison == 0 and token not in self._retries
            if is_fatal and count > 2:
                raise Violation(f"env {env_id} was asked {token}, which kills it, {count} times")
        for (env_id, token, process), count in each.items():
            if count > 1:
                raise Violation(f"process {process} ran {token} of env {env_id} {count} times")


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
    finally:
        gc.collect(0)
    return None
