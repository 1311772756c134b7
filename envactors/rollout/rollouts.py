"""The rollouts of a vector whose envs run in workers. At most two are in flight."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from envactors.actor.activity import Activity
from envactors.actor.future import ActorFuture, LazyOutcome, Outcome, results_of
from envactors.actor.handle import send_request
from envactors.actor.job import ErrorOf
from envactors.backends.base import RowMemory
from envactors.errors import AlreadyPendingError, VectorInputError
from envactors.mailbox.messages import Extend, Kind
from envactors.mailbox.pickling import dumps_by_value, try_to_read
from envactors.mailbox.specs import ArraySpec, Spec
from envactors.rollout import runner
from envactors.rollout.assembly import Contents, assemble, read_contents, report_failures, result_of
from envactors.rollout.base import RolloutsBase
from envactors.rollout.memory import ParameterStore, TrajectoryBuffer, TrajectoryBuffers
from envactors.rollout.messages import Parameters, Policy
from envactors.rollout.part import RolloutPart
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import TrajectoryLayout
from envactors.runtime import Runtime
from envactors.vector.actor_envs import ActorEnvs
from envactors.vector.engine import RowEngine

# Most rollouts in flight.
_MOST = 2


class Rollouts(RolloutsBase):
    """Runs the rollouts of a vector whose envs run in workers.

    Args:
        engine: Steps the envs.
        memory: Shared memory of the vector.

    Attributes:
        envs: The envs of each actor.
        runtime: The threads that serve the actors.
        last_errors: Last error of each env that failed in a rollout.
    """

    _engine: RowEngine

    next_index: int

    def __init__(self, engine: RowEngine, memory: RowMemory) -> None:
        super().__init__(engine)
        self.envs: Sequence[ActorEnvs] = engine.actors
        for envs in self.envs:
            envs.rollouts = self
        self._actors = [envs.actor for envs in self.envs]
        self.runtime: Runtime = self._actors[0].runtime
        self.last_errors: dict[int, Outcome] = {}
        self._table = engine.table
        self._memory = memory
        self._policy_ids = itertools.count(1)
        self._policy: Policy | None = None
        self._parameters = ParameterStore(memory)
        # Rollouts in flight, oldest first.
        self._runs: list[Run] = []
        self._buffers = TrajectoryBuffers(memory)
        # The specs of the policy's extras, and of actions if the envs have no action space.
        self._extras: tuple[tuple[str, ArraySpec], ...] = ()
        self._action: Spec | None = None

    def set_policy(self, make_policy: Any, seed: int) -> None:
        """Have each worker make the policy, and wait until all have; see `RolloutMethods.set_policy`."""
        self.check_idle()
        if self._engine.reader.learns:
            raise VectorInputError("rollouts need envs with an observation space: give the envs one")
        policy = Policy(next(self._policy_ids), bytes(dumps_by_value(make_policy)), seed)
        futures: list[ActorFuture[Any]] = []
        for actor in self._actors:
            message = Extend(runner.set_policy, tuple(policy))
            deadline = actor.config.deadlines.start
            futures.append(send_request(actor, Kind.EXTEND, message, "set_policy", deadline=deadline))
        self._loads = all(results_of(futures))
        self._policy, self._seed, self.next_index = policy, seed, 0
        self._extras, self._action, self._parameters = (), None, ParameterStore(self._memory)

    def _set_parameters(self, parameters: Any) -> None:
        self._parameters.set(parameters)

    def end_episodes(self) -> None:
        """Require a reset of every env before its next step."""
        table, lock = self._table, self._table.lock
        with lock, lock.change(*self._actors):
            for index in self._engine.all.ids if not table.rollouts else ():  # else it was interrupted
                table.episodes.lose(index)

    def start(
        self, steps: int, parameters: Any, *, each: bool = False, copy: bool | None = None
    ) -> list[ActorFuture[Rollout]]:
        """Start a rollout; see `RolloutsBase.start`."""
        assert self._policy is not None, "the caller has checked it"
        table, lock = self._table, self._table.lock
        lock.reset_if_interrupted()
        self._check_free(_MOST)
        if not table.rollouts:
            self._engine.check_steppable(self._engine.all)
        self.set_parameters(parameters)
        copies = self._engine.reader.copies if copy is None else copy
        buffer = self._take_buffer(steps)
        run = Run(self, self._policy, self._parameters.last, buffer, each=each, copies=copies)
        futures = list(run.futures)
        for envs in self._engine.actors:
            envs.measure_memory()
        with lock, lock.change(*self._actors):
            closing = next((actor for actor in self._actors if actor.is_closing), None)
            if closing is None:
                self.next_index += 1
                self._runs.append(run)
                for part in run.parts:
                    part.enqueue()
                table.rollouts = len(self._runs)
        if closing is not None:
            raise closing.errors.closed(Activity("rollout", closing.config.first_index), closing.incarnation.index)
        return futures

    def check_idle(self) -> None:
        """Raise `AlreadyPendingError` if a rollout is in flight or a result is pending."""
        self._check_free(1)

    def _check_free(self, most: int) -> None:
        count = self._table.rollouts
        if count >= most:
            raise AlreadyPendingError(f"{count} rollouts are in flight: wait for the oldest one first")
        super().check_idle()

    def _take_buffer(self, steps: int) -> TrajectoryBuffer:
        """Return the memory of a rollout.

        Raises:
            OSError: There is not enough memory.
        """
        rows, observation = self._table.slab.layout, self._engine.observation_spec
        assert observation is not None, "set_policy has checked it"
        layout = TrajectoryLayout(observation, rows.action or self._action, rows.reward, self._extras, rows.envs, steps)
        with self._table.lock:
            return self._buffers.take(layout)

    def end(self, run: Run) -> None:
        """Record that all parts of a rollout have ended. Called under the lock, and again after an interrupt."""
        layout = run.buffer.trajectory.layout
        self._extras, self._action = layout.extras, layout.action
        self._runs = [other for other in self._runs if other is not run]
        self._table.rollouts = len(self._runs)
        self._table.waiters.ring()

    def repair(self, envs: ActorEnvs, error_of: ErrorOf) -> None:
        """End the parts of an actor that it does not know of: the change that began the rollout was interrupted."""
        for run in list(self._runs):
            part = run.parts[self.envs.index(envs)]
            part.fail(error_of)
        self._table.rollouts = len(self._runs)


class Run:
    """One rollout, which its futures belong to: nothing but closing the vector ends it.

    Args:
        rollouts: The rollouts of the vector.
        policy: The policy.
        parameters: Parameters that the policy loads first; None if there are none.
        buffer: The memory of its trajectory.
        each: Whether each actor has a future.
        copies: Whether results stay valid for as long as the user keeps them.

    Attributes:
        policy, parameters, buffer: As above.
        index: Index of the rollout since the policy was set.
        last_errors: Last error of each env that failed in a rollout.
        parts: The part of each actor.
        futures: The futures; empty once all parts have ended.
    """

    # The first env of each future that was not read; none of a rollout that was interrupted before it began.
    _unread: AbstractSet[int] = frozenset()

    def __init__(
        self,
        rollouts: Rollouts,
        policy: Policy,
        parameters: Parameters | None,
        buffer: TrajectoryBuffer,
        *,
        each: bool,
        copies: bool,
    ) -> None:
        self.policy = policy
        self.parameters = parameters
        self.buffer = buffer
        self.buffer.hold(self)
        self.index: int = rollouts.next_index
        self.last_errors: dict[int, Outcome] = rollouts.last_errors
        self.runtime: Runtime = rollouts.runtime
        self.parts: list[RolloutPart] = [RolloutPart(envs, self) for envs in rollouts.envs]
        self.futures: list[ActorFuture[Rollout]] = [
            ActorFuture(self, None) for _ in range(len(self.parts) if each else 1)
        ]
        for future in self.futures:
            future.set_running()
        self._rollouts = rollouts
        self._copies = copies
        self._unread = {envs.range.start for envs in (rollouts.envs if each else rollouts.envs[:1])}

    @property
    def is_read(self) -> bool:
        """Whether all futures were read, so that the memory may be used again."""
        return not self._unread

    # For futures -----------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture[Any]) -> bool:
        """Return False: rollouts cannot be canceled."""
        del future
        return False

    abort = cancel

    def read_reply(self, future: ActorFuture[Any], deadline: float | None) -> None:
        """Do nothing: the loop reads the replies."""

    # For parts, under the lock ---------------------------------------------------------------------------

    def on_part_end(self, part: RolloutPart) -> None:
        """Deliver the result of a part, or that of all parts with the last one; again after an interrupt."""
        is_over, futures = all(other.has_ended for other in self.parts), self.futures
        if len(futures) > 1:
            futures[self.parts.index(part)].set_outcome(self._outcome_of([part]))
        elif futures and is_over:
            futures[0].set_outcome(self._outcome_of(self.parts))
        if is_over:
            self._rollouts.end(self)
            self.futures = []  # they refer to this

    # The result ------------------------------------------------------------------------------------------

    def _outcome_of(self, parts: list[RolloutPart]) -> LazyOutcome:
        """Return the outcome of consecutive actors, which the thread that waits for it puts together."""
        is_failure = any(part.errors or part.error or part.policy_error for part in parts)
        return LazyOutcome(functools.partial(self._read_parts, parts), is_failure=is_failure)

    def _read_parts(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        outcome, error = try_to_read(lambda: self._read(parts))
        return outcome or (None, error)

    def _read(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        """Return the result of consecutive actors, or the error to raise. Runs code of users."""
        trajectory, contents = self.buffer.trajectory, Contents({}, {}, {})
        failures: dict[int, BaseException] = {}
        policy_error: BaseException | None = None
        for part in parts:
            read_contents(part.columns, contents)
            contents.failures.update(_exceptions_of(part.failures))
            failures.update(
                _exceptions_of(part.errors) if part.error is None else dict.fromkeys(part.columns.envs, part.error)
            )
            if part.policy_error is not None and policy_error is None:
                policy_error = part.policy_error.read()[1]
        report_failures(trajectory, contents)
        versions = np.full(len(parts), 0 if self.parameters is None else self.parameters.version)
        envs = range(parts[0].columns.envs.start, parts[-1].columns.envs.stop)
        rollout = assemble(trajectory, envs, contents, versions, copies=self._copies)
        self._unread -= {envs.start}  # again, if an interrupt has followed
        return result_of(rollout, failures, policy_error)


def _exceptions_of(failures: dict[Any, Outcome]) -> dict[Any, BaseException]:
    """Return the exceptions of failures. Runs code of users."""
    errors = {key: failure.read()[1] for key, failure in failures.items()}
    return {key: error for key, error in errors.items() if error is not None}
