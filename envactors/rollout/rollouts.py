"""The rollouts of a vector whose envs run in workers. At most two are in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from envactors.actor.exits import Step
from envactors.actor.future import ActorFuture, results_of
from envactors.actor.jobs import Call, ErrorOf
from envactors.backends.base import RowMemory
from envactors.errors import AlreadyPendingError, VectorInputError
from envactors.mailbox.messages import Extend, Kind
from envactors.mailbox.pickling import dumps_by_value
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import ArraySpec, Spec
from envactors.rollout import runner
from envactors.rollout.assembly import Contents, assemble, read_contents, report_failures, result_of
from envactors.rollout.memory import ParameterStore, TrajectoryBuffer, TrajectoryBuffers
from envactors.rollout.messages import Policy, Stop
from envactors.rollout.part import RolloutPart
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import TrajectoryLayout
from envactors.runtime import Runtime
from envactors.vector.actor_envs import ActorEnvs
from envactors.vector.engine import RowEngine

# Most rollouts in flight.
_MOST = 2


class Rollouts:
    """Runs the rollouts of a vector.

    Args:
        engine: Steps the envs.
        memory: Shared memory of the vector.
    """

    def __init__(self, engine: RowEngine, memory: RowMemory) -> None:
        self._engine = engine
        self._table = engine.table
        self._memory = memory
        for envs in engine.actors:
            envs.rollouts = self
        self._actors = [envs.actor for envs in engine.actors]
        self._policy_ids = itertools.count(1)
        self._policy: Policy | None = None
        # The last policy of each actor's process, and the incarnation of that process.
        self._policies: dict[ActorEnvs, tuple[int, int]] = {}
        # Whether the policy can load parameters.
        self._loads = False
        self._parameters = ParameterStore(memory)
        # Rollouts in flight, oldest first.
        self._runs: list[Run] = []
        # Index of the next rollout since the policy was set.
        self._next = 0
        self._buffers = TrajectoryBuffers(memory)
        # The specs of the policy's extras, and of actions if the envs have no action space.
        self.extras: tuple[tuple[str, ArraySpec], ...] = ()
        self.action: Spec | None = None
        # Last error of each env that failed.
        self.lost: dict[int, BaseException] = {}

    # The policy ------------------------------------------------------------------------------------------

    def set_policy(self, make_policy: Any, seed: int) -> None:
        """Have each worker make the policy, and wait until all have; see `RolloutMethods.set_policy`."""
        self.check_idle()
        if self._engine.reader.learns:
            raise VectorInputError("rollouts need envs with an observation space: give the envs one")
        policy = Policy(next(self._policy_ids), bytes(dumps_by_value(make_policy)), seed)
        before = [actor.incarnation.index for actor in self._actors]
        futures: list[ActorFuture[Any]] = []
        for actor in self._actors:
            future: ActorFuture[Any] = ActorFuture(actor, None)
            deadline = actor.config.deadlines.start
            call = Call("set_policy", actor.config.first_index, Kind.EXTEND, future, deadline)
            actor.submit(call, Extend(runner.set_policy, tuple(policy)))
            futures.append(future)
        self._loads = all(results_of(futures))
        for envs, incarnation in zip(self._engine.actors, before, strict=True):
            if envs.actor.incarnation.index == incarnation:
                self._policies[envs] = policy.policy_id, incarnation
        self._policy, self._next, self.extras, self.action = policy, 0, (), None
        self._parameters = ParameterStore(self._memory)

    def policy_of(self, envs: ActorEnvs) -> tuple[int, int]:
        """Return the id of the last policy of an actor's process, and the incarnation of that process."""
        return self._policies.get(envs, (0, 0))

    def set_policy_of(self, envs: ActorEnvs, policy_id: int) -> None:
        """Record that an actor's current process has a policy."""
        self._policies[envs] = policy_id, envs.actor.incarnation.index

    @property
    def runtime(self) -> Runtime:
        """The threads that serve the actors."""
        return self._actors[0].runtime

    @property
    def has_policy(self) -> bool:
        """Whether `set_policy` has succeeded."""
        return self._policy is not None

    def give(self, parameters: Any) -> None:
        """Have the policy load parameters before its next step; None keeps the current ones.

        Raises:
            TypeError: The policy has no method ``load``.
        """
        if parameters is not None:
            check_loads(self._loads)
            self._parameters.give(parameters)

    # Evaluations -----------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """Number of envs."""
        return len(self._table.status)

    @property
    def reward_shape(self) -> tuple[int, ...]:
        """Shape of one env's reward."""
        return (self._table.slab.layout.reward or PLAIN_REWARD).shape

    def seed_of_episode(self, number: int) -> int:
        """Return the seed of an episode of `evaluate`."""
        assert self._policy is not None, "the caller has checked it"
        return evaluation_seed(self._policy.seed, number)

    def end_episodes(self) -> None:
        """Require a reset of every env before its next step."""
        table, lock = self._table, self._table.lock
        with lock, lock.change(*self._actors):
            for index in range(self.num_envs) if not table.rollouts else ():  # else it was interrupted
                table.episodes.lose(index)

    # Rollouts --------------------------------------------------------------------------------------------

    def start(
        self, steps: int, parameters: Any, *, each: bool = False, copy: bool | None = None
    ) -> list[ActorFuture[Rollout]]:
        """Start a rollout.

        Args:
            steps: Number of steps.
            parameters: Parameters that the policy loads first; None keeps the current ones.
            each: True to return one future per actor.
            copy: Whether results stay valid for as long as the user keeps them; None for the option of the vector.

        Raises:
            AlreadyPendingError: Two rollouts are in flight, or results are pending.
            VectorInputError: An env needs a reset first.
            TypeError: The policy has no method ``load``.
        """
        assert self._policy is not None, "the caller has checked it"
        table, lock = self._table, self._table.lock
        lock.reset_if_interrupted()
        self._check_free(_MOST)
        if not table.rollouts:
            self._engine.check_steppable(self._engine.all)
        self.give(parameters)
        copies = self._engine.reader.copies if copy is None else copy
        run = Run(self, steps, len(self._actors) if each else 1, copies=copies)
        fields = run, self._policy, self._next, self._parameters.last
        run.parts = [RolloutPart(envs, *fields) for envs in self._engine.actors]
        futures = list(run.futures)
        for envs in self._engine.actors:
            envs.measure_memory()
        with lock, lock.change(*self._actors):
            closing = next((actor for actor in self._actors if actor.is_closing), None)
            if closing is None:
                self._next += 1
                self._runs.append(run)
                for part in run.parts:
                    part.enqueue()
                table.rollouts = len(self._runs)
        if closing is not None:
            raise closing.errors.closed(Step("rollout", closing.config.first_index), closing.incarnation.index)
        return futures

    def check_idle(self) -> None:
        """Raise `AlreadyPendingError` if a rollout is in flight or a result is pending."""
        self._check_free(1)

    def _check_free(self, most: int) -> None:
        count, busy = self._table.rollouts, self._engine.busy()
        if count >= most:
            raise AlreadyPendingError(f"{count} rollouts are in flight: wait for the oldest one first")
        if busy:
            raise AlreadyPendingError(f"the envs {busy} have results pending: receive them before a rollout")

    def take_buffer(self, steps: int) -> TrajectoryBuffer:
        """Return the memory of a rollout.

        Raises:
            OSError: There is not enough memory.
        """
        rows, observation = self._table.slab.layout, self._engine.observation_spec
        assert observation is not None, "set_policy has checked it"
        layout = TrajectoryLayout(observation, rows.action or self.action, rows.reward, self.extras, rows.envs, steps)
        with self._table.lock:
            return self._buffers.take(layout)

    def end(self, run: Run) -> None:
        """Record that all parts of a rollout have ended. Called under the lock, and again after an interrupt."""
        self._runs = [other for other in self._runs if other is not run]
        self._table.rollouts = len(self._runs)
        self._table.waiters.ring()

    def repair(self, envs: ActorEnvs, error_of: ErrorOf) -> None:
        """End the parts of an actor that it does not know of: the change that began the rollout was interrupted."""
        for run in list(self._runs):
            part = run.parts[self._engine.actors.index(envs)]
            part.fail(envs.actor, error_of)
        self._table.rollouts = len(self._runs)


class Run:
    """One rollout, which its futures belong to: nothing but closing the vector ends it.

    Args:
        rollouts: The rollouts of the vector.
        steps: Number of steps.
        count: Number of futures: one for all actors, or one for each.
        copies: Whether results stay valid for as long as the user keeps them.

    Attributes:
        parts: The part of each actor.
        futures: The futures; empty once all parts have ended.
        buffer: The memory of its trajectory.
        lost: Last error of each env that failed in a rollout.
    """

    _unread = 0  # of a rollout that was interrupted before it began

    def __init__(self, rollouts: Rollouts, steps: int, count: int, *, copies: bool) -> None:
        self.parts: list[RolloutPart] = []
        self.buffer: TrajectoryBuffer = rollouts.take_buffer(steps)
        self.buffer.hold(self)
        self.lost: dict[int, BaseException] = rollouts.lost
        self.runtime: Runtime = rollouts.runtime
        self.futures: list[ActorFuture[Rollout]] = [ActorFuture(self, None) for _ in range(count)]
        for future in self.futures:
            future.set_running()
        self.policy_of: Callable[[ActorEnvs], tuple[int, int]] = rollouts.policy_of
        self.set_policy_of: Callable[[ActorEnvs, int], None] = rollouts.set_policy_of
        self._rollouts = rollouts
        self._copies = copies
        self._unread = count
        self._ended: set[RolloutPart] = set()

    @property
    def is_read(self) -> bool:
        """Whether all futures were read, so that the memory may be used again."""
        return self._unread == 0

    # For futures -----------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture[Any]) -> bool:
        """Return False: rollouts cannot be canceled."""
        del future
        return False

    abort = cancel

    def read_reply(self, future: ActorFuture[Any], deadline: float | None) -> None:
        """Do nothing: the loop reads the replies."""

    # For parts, under the lock ---------------------------------------------------------------------------

    def learn(self, stop: Stop) -> None:
        """Make room for everything that the policy returns.

        Raises:
            OSError: There is not enough memory.
        """
        layout = self.buffer.trajectory.layout
        assert stop.layout is not None, "the worker has learned it"
        extras, action = layout.extras or stop.layout.extras, layout.action or stop.layout.action
        self._rollouts.extras, self._rollouts.action = extras, action
        self.buffer.set_layout(layout._replace(extras=extras, action=action))

    def has_ended(self, part: RolloutPart) -> bool:
        """Return whether a part has ended."""
        return part in self._ended

    def on_part_end(self, part: RolloutPart) -> None:
        """Deliver the result of a part, or that of all parts with the last one; again after an interrupt."""
        self._ended.add(part)
        is_over, futures = len(self._ended) == len(self.parts), self.futures
        if len(futures) > 1:
            futures[self.parts.index(part)].set_outcome(RolloutOutcome(self, [part]))
        elif futures and is_over:
            futures[0].set_outcome(RolloutOutcome(self, self.parts))
        if is_over:
            self._rollouts.end(self)
            self.futures = []  # they refer to this

    # The result ------------------------------------------------------------------------------------------

    def read(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        """Return the result of consecutive actors, or the error to raise. Runs code of users."""
        trajectory, contents = self.buffer.trajectory, Contents({}, {}, {})
        failures: dict[int, BaseException] = {}
        policy_error: BaseException | None = None
        for part in parts:
            envs = range(part.first, part.stop)
            read_contents(trajectory, envs, part.contents, part.large_infos, contents)
            contents.failures.update(part.failures)
            failures.update(part.errors if part.error is None else dict.fromkeys(envs, part.error))
            if part.policy_error is not None and policy_error is None:
                policy_error = part.policy_error.read()[1]
        report_failures(trajectory, contents)
        versions = np.array([part.version for part in parts])
        envs = range(parts[0].first, parts[-1].stop)
        rollout = assemble(trajectory, envs, contents, versions, copies=self._copies)
        self._unread -= 1
        return result_of(rollout, failures, policy_error)


class RolloutOutcome:
    """The outcome of a rollout, which the thread that waits for it puts together."""

    def __init__(self, run: Run, parts: list[RolloutPart]) -> None:
        self.is_failure: bool = any(part.errors or part.error or part.policy_error for part in parts)
        self._run, self._parts = run, parts

    def read(self) -> tuple[Rollout | None, BaseException | None]:
        """Return the rollout, or the error."""
        try:
            return self._run.read(self._parts)
        except (Exception, SystemExit) as error:  # of code that unpickles an info
            return None, error


def check_loads(loads: bool) -> None:
    """Raise `TypeError` unless the policy can load parameters."""
    if not loads:
        raise TypeError(
            "cannot give parameters to a policy that has no method load(parameters): add one, or leave them out"
        )


def evaluation_seed(policy_seed: int, number: int) -> int:
    """Return the seed of an episode of `evaluate`."""
    return int(np.random.SeedSequence(policy_seed, spawn_key=(1, number)).generate_state(1)[0])
