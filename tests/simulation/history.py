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
from envactors.mailbox.control_page import BEGUN
from envactors.mailbox.messages import episode_seed
from envactors.testing import EchoEnv
from envactors.worker import main as worker
from simulation.envs import EnvFailedError, SimulatedEnv, checksum_of, get_state, set_state
from simulation.invariants import Invariants
from simulation.loop import Engine
from simulation.processes import FIRST_PID, End, Poller, SimulatedBackend
from simulation.world import Interrupted, Violation, World

# The most that a user does in one history.
_MOST_ACTIONS = 24
# How much longer than its deadline a close may take, in seconds.
_CLOSE_GRACE = 1.0
# The most episodes of an env one after the other that fail to begin.
_MOST_FAILURES = 100


@dataclasses.dataclass
class Model:
    """What is known of an env.

    Attributes:
        last: Its last observation, None before the first.
        ended: Whether its episode has ended, so that the next step resets it.
        needs_reset: Whether only a reset will do.
        token: The action of the step under way, None for a reset; nothing is under way if ``is_pending`` is False.
        is_pending: Whether a step or reset is under way.
        seed: The seed of the reset under way, if the user gave one.
        options: Its options.
        root_seed: The seed of the last reset that the user gave one.
        episode: The number of the last episode since then, if each has a seed of its own.
        notes: What the env was given since its last result, or since what is under way was asked.
        notes_before: What it was given before that.
        is_uncertain: Whether it may have been lost since its last result.
        posted: The call id of its last post when it was asked.
        must_reset: Whether its episode was lost.
        may_skip: Whether an episode may have failed to begin since the last one.
    """

    last: Any = None
    ended: bool = False
    needs_reset: bool = True
    token: int | None = None
    is_pending: bool = False
    seed: int | None = None
    options: Any = None
    root_seed: int | None = None
    episode: int = -1
    notes: list[int] = dataclasses.field(default_factory=list)
    notes_before: list[int] = dataclasses.field(default_factory=list)
    is_uncertain: bool = False
    posted: int = 0
    must_reset: bool = False
    may_skip: bool = False


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
        self.seeds_episodes = self.random.random() < 0.2
        # Whether all that happens are crashes, of which a replay is to leave no trace.
        self.is_hidden = self.on_failure == "replay" and self.random.random() < 0.4
        self._may_kill = True
        self.futures: dict[int, Any] = {}
        self._tokens = iter(range(1, 1_000_000))
        # How many more times calls may run than once, by their tokens.
        self._retries: collections.Counter[int] = collections.Counter()
        # The tokens of calls that nobody knows of whether they have run.
        self._uncertain: set[int] = set()

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
        hangs = self.random.random() < 0.5 and not self.is_hidden
        SimulatedEnv.may_hang = hangs
        SimulatedEnv.trouble = 0.0
        deadlines = ea.Deadlines(start=5.0, call=3.0, step=1.0, reset=2.0) if hangs else ea.Deadlines()
        most = 1000 if self.is_hidden else self.random.choice((1000, 1000, 2))
        policy = ea.RestartPolicy(max_restarts=most, backoff=0.01)
        SimulatedEnv.poison = 0 if self.is_hidden else self.random.choice((0, 7))
        SimulatedEnv.discards = self.on_failure == "renew"
        max_running = self.random.choice((None, None, None, 1))
        SimulatedEnv.limit = max_running
        standbys = self.random.choice((0, 0, 1))
        backend = SimulatedBackend(self.world, max_starting=self.random.choice((None, 1)))
        per_actor = self.random.choice((1, 1, 2, 3))
        recycle = ea.RecyclePolicy(max_steps=2) if per_actor == 1 and self.random.random() < 0.2 else None
        snapshot = ea.Snapshot(get_state, set_state, every=3) if self.random.random() < 0.2 else None
        SimulatedEnv.most_episodes = None
        if recycle is not None and self.on_failure != "replay":
            SimulatedEnv.most_episodes = 1 + (self.autoreset == "same_step")
        SimulatedEnv.action_space = EchoEnv.action_space if self.random.random() < 0.7 else None
        self.world.note(
            f"{self.num_envs} envs, {per_actor} an actor, {self.on_failure}, {self.autoreset}, hangs {hangs}, "
            f"{standbys} standbys, {max_running} running, {recycle}, snapshots {snapshot is not None}, "
            f"seeds {self.seeds_episodes}, {SimulatedEnv.action_space}, hidden {self.is_hidden}"
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
            max_journal=1000 if self.is_hidden else self.random.choice((1000, 6)),
            recycle=recycle,
            snapshot=snapshot,
            seed_episodes=self.seeds_episodes,
        )
        self._numbers = envs._slots.numbers
        invariants = Invariants(envs)
        self.world.check = invariants.check
        SimulatedEnv.trouble = 0.0 if self.is_hidden else self.random.choice((0.0, 0.05, 0.2))
        self.world.interrupts = self.random.random() < 0.3 and not self.is_hidden
        self.world.on_signal = lambda: self._handle_signal(envs)
        try:
            self._reset(envs, list(range(self.num_envs)), seed=7)
            actions = [self._step, self._step, self._send, self._receive, self._submit, self._take_future, self._call]
            actions += [self._kill, self._step_impatiently, self._reset_some, self._step_all]
            actions += [self._kill] if self.is_hidden else [self._renew]
            for _ in range(self.random.randrange(_MOST_ACTIONS)):
                self.random.choice(actions)(envs)
                invariants.check()
            if self.random.random() < 0.5:
                self._take_all(envs)
                invariants.check_idle()
        finally:
            SimulatedEnv.trouble = 0.0
            self.world.interrupts = False
            envs.close()
            self.world.check = lambda: None
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
        lost = next((env_id for env_id in ids if self.models[env_id].must_reset), None)
        if lost is not None and self.world.chance(0.1):
            with contextlib.suppress(ea.VectorInputError):
                envs.step([0], env_ids=[lost])
                raise Violation(f"env {lost}, whose episode was lost, steps")
        if any(self.models[env_id].needs_reset for env_id in ids):
            self._reset(envs, [env_id for env_id in ids if self.models[env_id].needs_reset])
        return [env_id for env_id in ids if not self.models[env_id].needs_reset and not self.models[env_id].is_pending]

    def _take_all(self, envs: ea.VectorEnv) -> None:
        """Take all results that are to come."""
        self.world.interrupts = False
        while self.futures:
            self._take_future(envs)
        while any(model.is_pending for model in self.models):
            self._receive(envs)
        while self.world.step():
            pass

    def _handle_signal(self, envs: ea.VectorEnv) -> None:
        """Do what a handler may do while the user waits for something else."""
        ids = [env_id for env_id in self._idle() if not self.models[env_id].needs_reset]
        if ids and self.world.chance(0.7):
            envs.send(self._begin(ids), env_ids=ids)
        else:
            # Nobody knows whether a reset that the user waits for was asked yet.
            self._uncertain.add(self._call(envs))

    def _begin(self, ids: list[int], *, resets: bool = False) -> np.ndarray:
        for env_id in ids:
            model = self.models[env_id]
            model.may_skip |= model.is_pending
            model.token = None if resets else next(self._tokens)
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
            self._reset(envs, ids, seed, self.random.choice((None, {"token": next(self._tokens)})))

    def _reset(self, envs: ea.VectorEnv, ids: list[int], seed: int | None = None, options: Any = None) -> None:
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
                self._reset(envs, needing)
            if any(model.is_pending or model.needs_reset for model in self.models):
                return
            actions = self._begin(ids)
            timeout = self.random.choice((None, None, None, 1e-4))
            try:
                self._take(ids, lambda: list(zip(*envs.step(actions, timeout=timeout), strict=True)))  # noqa: B023
            except Interrupted:
                self._reset(envs, ids)

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
        self._check_cause(env_id, failure)
        model.must_reset = self.on_failure == "raise" and isinstance(failure, ea.ActorError)
        model.is_pending = False
        model.needs_reset = model.is_uncertain = model.may_skip = True

    def _check_cause(self, env_id: int, failure: BaseException) -> None:
        if not self.world.troubles or self.is_hidden:
            raise Violation(f"nothing has happened, or what is to leave no trace, and {failure!r}")
        if not isinstance(failure, (ea.ActorError, EnvFailedError)) or isinstance(failure, ea.SerializationError):
            raise Violation(f"env {env_id} fails with {failure!r}") from failure
        is_blamed = isinstance(failure, ea.ActorTimeoutError) and failure.method and failure.pid is not None
        if is_blamed and (failure.pid - FIRST_PID, failure.index) not in self.world.hung:
            raise Violation(f"it does not hang, and {failure!r}")
        model = self.models[env_id]
        is_blamed = isinstance(failure, ea.ActorDiedError) and failure.method == "step" and failure.__cause__ is None
        is_blamed = is_blamed and not failure.aborted and failure.index == env_id and failure.pid is not None
        if is_blamed and failure.call_id > model.posted:
            page = self.world.processes[failure.pid - FIRST_PID].page
            if page.counters[BEGUN] < failure.call_id:
                raise Violation(f"it had not begun, and {failure!r}")
        # What was not posted when its process ended has the number of the request before.
        is_lost = isinstance(failure, ea.ActorDiedError) and failure.index is not None and failure.call_id is not None
        is_lost = is_lost and failure.call_id > self.models[failure.index].posted and failure.pid is not None
        is_lost = is_lost and not any(env == failure.index for _, env in self.world.hung)  # too late does not count
        if is_lost and (failure.index, failure.call_id) in self.world.completed:
            raise Violation(f"its result was complete, and {failure!r}")

    def _settle(self, env_id: int, row: Any) -> None:
        """Check one result."""
        model = self.models[env_id]
        obs, reward, terminated, truncated, info = row
        obs = np.array(obs)
        before = None if model.last is None else model.last.tolist()
        what = f"env {env_id}, asked {model.token}, answers {obs.tolist()}, {info}; before {before}"
        self.world.note(what)
        if not model.is_pending:
            raise Violation(f"two results of one request: {what}")
        if obs[0] != env_id:
            raise Violation(f"another env's result: {what}")
        failure = info.get("failure")
        if failure is not None and self.on_failure == "raise":
            raise Violation(f"a failure that is not raised: {what}")
        if failure is not None:
            self._check_cause(env_id, failure)
            model.may_skip = True
        final = np.array(info["final_obs"]) if "final_obs" in info else None
        shown = obs if final is None else final
        is_step = failure is None and model.token is not None and not model.ended
        if reward != (model.token if is_step else 0):
            raise Violation(f"another reward, {reward}: {what}")
        stands_in = failure is not None and truncated and self.autoreset != "same_step" and model.token is not None
        if stands_in:
            if not np.array_equal(obs, model.last):
                raise Violation(f"not the last observation: {what}")
        elif is_step:
            if terminated and final is None and self.autoreset == "same_step":
                raise Violation(f"an episode has ended, and no other has begun: {what}")
            self._check_step(model, shown, what)
            if (info if final is None else info["final_info"]).get("token", model.token) != model.token:
                raise Violation(f"another action's info: {what}")
        elif final is not None and not np.array_equal(final, model.last) and final[2] != model.token:
            raise Violation(f"not the last observation: {what}")
        if final is not None or not (is_step or stands_in):
            self._check_reset(env_id, obs, info, what)
        if final is not None and info["is_renewed"]:
            # Calls that waited behind the last step of a process that is recycled have run there, before the reset.
            self._uncertain.update(model.notes)
        model.last = obs
        model.is_pending = False
        model.is_uncertain, model.must_reset = failure is not None or model.token in self.world.raised, False
        model.notes_before = []
        self._may_kill |= not any(model.is_pending for model in self.models)
        model.needs_reset = self.autoreset == "disabled" and bool(terminated or truncated)
        model.ended = self.autoreset == "next_step" and bool(terminated or truncated)

    def _check_step(self, model: Model, obs: Any, what: str) -> None:
        assert model.token is not None
        if obs[2] != model.token:
            raise Violation(f"another action's result: {what}")
        if model.last is None:
            return
        wanted = int(model.last[3])
        for token in (*model.notes_before, model.token):
            wanted = zlib.crc32(struct.pack("<q", token), wanted)
        # A call may have run between a step that has raised and the same step after a replay.
        is_uncertain = model.is_uncertain or model.token in self.world.raised
        is_uncertain |= not self._uncertain.isdisjoint(model.notes_before)
        if obs[1] != model.last[1] + 1 or (obs[3] != wanted and not is_uncertain):
            raise Violation(f"a step or call that was repeated or skipped: {what}")

    def _check_reset(self, env_id: int, obs: Any, info: dict[str, Any], what: str) -> None:
        model = self.models[env_id]
        seed, failure = info["seed"], info.get("failure")
        if obs[1] != 0 or obs[2] != -1 or obs[3] != checksum_of(seed):
            raise Violation(f"no reset: {what}")
        if info["options"] != (model.options if model.token is None else None):
            raise Violation(f"other options: {what}")
        if model.token is None and model.seed not in (None, seed) and failure is None:
            raise Violation(f"another seed: {what}")
        if seed is None and info["is_renewed"]:
            raise Violation(f"no seed after the end of a process: {what}")
        was_given = (model.token is None and model.seed is not None) or info["is_renewed"] or self.seeds_episodes
        if seed is not None and not was_given and self.on_failure != "replay":
            raise Violation(f"a seed that nobody gave: {what}")
        # A reset within a step is no attempt of its own.
        counts_attempts = self.on_failure != "replay" and self.autoreset != "same_step"
        if counts_attempts and model.token is not None and (env_id, seed) in self.world.failed_seeds:
            raise Violation(f"the seed of a reset that has failed: {what}")
        if self.seeds_episodes:
            root = model.root_seed
            assert root is not None, "the first reset has a seed"
            later = range(model.episode + 1, model.episode + (_MOST_FAILURES if model.may_skip else 2))
            model.may_skip = False
            of_episode = ((number, episode_seed(root, number) if number else root) for number in later)
            model.episode = next((number for number, wanted in of_episode if wanted == seed), -1)
            if model.episode < 0:
                raise Violation(f"the seed of no episode, or of one before: {what}")

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
            self._fail(env_id, error)
        else:
            self._settle(env_id, step[1:6])

    def _call(self, envs: ea.VectorEnv) -> int:
        env_id = self.random.randrange(self.num_envs)
        token = next(self._tokens)
        retries = self._retries[token] = self.random.choice((0, 0, 1))
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
            self._uncertain.add(token)
            return token
        except ea.ActorError as error:
            self._uncertain.add(token)
            if not self.world.troubles:
                self._check_cause(env_id, error)
            return token
        if answer != token:
            raise Violation(f"a call with {token} returns {answer}")
        return token

    def _kill(self, envs: ea.VectorEnv) -> None:
        del envs
        alive = [process for process in self.world.processes if not process.has_ended]
        if alive and self._may_kill:
            self._may_kill = not self.is_hidden  # the same inputs are not tried a third time
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
            # It may have ended a process that was being ended for another env, which had raised: that is not counted.
            if is_fatal and count > 2 + len(self.world.raised):
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
