"""The rollouts of a vector whose envs run in workers. At most two are in flight."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.actor.activity import Activity
from envactors.actor.future import ActorFuture, LazyOutcome, Outcome, results_of
from envactors.actor.handle import send_request
from envactors.actor.job import ErrorOf
from envactors.backends.base import RowMemory
from envactors.errors import AlreadyPendingError, EnvActorsError
from envactors.mailbox.messages import Extend, Kind
from envactors.mailbox.pickling import try_to_read
from envactors.rollout import policy_loop
from envactors.rollout.assembly import Sidecar, add_failure_infos, add_infos, assemble, rollout_or_error
from envactors.rollout.base import RolloutEngine, RolloutFutures
from envactors.rollout.memory import ParameterStore, TrajectoryBuffer, TrajectoryBuffers
from envactors.rollout.messages import Parameters, PolicyRecipe
from envactors.rollout.part import RolloutPart
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import TrajectoryLayout
from envactors.runtime import Runtime
from envactors.vector.engine import RowEngine
from envactors.vector.env_group import EnvGroup

# Most rollouts in flight.
_MOST = 2


class WorkerRolloutEngine(RolloutEngine):
    """Runs the rollouts of a vector whose envs run in workers.

    Args:
        engine: Steps the envs.
        memory: Shared memory of the vector.

    Attributes:
        groups: The envs of each actor.
        runtime: The threads that serve the actors.
        recipe: That of the policy; None before `set_policy`.
        parameters: The parameters that the user has given.
        last_errors_by_env: Last error of each env that failed since a rollout began that continues none.
    """

    _engine: RowEngine
    next_index: int
    # That of the last rollout which has ended, with the specs that the output of its policy has shown.
    _layout: TrajectoryLayout

    def __init__(self, engine: RowEngine, memory: RowMemory) -> None:
        super().__init__(engine)
        self.groups: Sequence[EnvGroup] = engine.groups
        for group in self.groups:
            group.end_rollout_parts = functools.partial(self._end_parts, group)
        self._actors = [group.actor for group in self.groups]
        self.runtime: Runtime = self._actors[0].runtime
        self.recipe: PolicyRecipe | None = None
        self.parameters: ParameterStore = ParameterStore(memory, engine.table.lock, self._parameters_in_flight)
        self.last_errors_by_env: dict[int, Outcome] = {}
        self._table = engine.table
        self._memory = memory
        self._policy_ids = itertools.count(1)
        self._buffers = TrajectoryBuffers(memory)
        # Oldest first.
        self._in_flight: list[RolloutInFlight] = []

    def _make_policies(self, make_policy: bytes, seed: int) -> bool:
        recipe = PolicyRecipe(next(self._policy_ids), make_policy, seed)
        futures: list[ActorFuture[Any]] = []
        for actor in self._actors:
            message = Extend(policy_loop.set_policy, (recipe,))
            deadline = actor.config.deadlines.start
            futures.append(send_request(actor, Kind.EXTEND, message, "set_policy", deadline=deadline))
        loads = all(results_of(futures))
        self.recipe = recipe
        self.parameters = ParameterStore(self._memory, self._table.lock, self._parameters_in_flight)
        rows = self._table.slab.layout
        learned = self._engine.observation_spec if self._engine.batcher.infers_spec else None
        self._layout = TrajectoryLayout(rows.observation, rows.action, rows.reward, (), rows.envs, 0, learned)
        return loads

    def _set_parameters(self, pickled: bytes, arrays: Sequence[memoryview]) -> None:
        written = self.parameters.write(pickled, arrays)
        with self._table.lock:
            self.parameters.record(*written)

    def _parameters_in_flight(self) -> list[Parameters | None]:
        return [rollout.parameters for rollout in self._in_flight]

    def end_episodes(self) -> None:
        lock = self._table.lock
        with lock, lock.change(*self._actors):
            if not self._in_flight:  # else an evaluation was interrupted
                super().end_episodes()

    def start(self, steps: int, parameters: Any, *, each: bool = False, copy: bool | None = None) -> RolloutFutures:
        lock = self._table.lock
        lock.repair_if_interrupted()
        # It continues the rollouts in flight, also if they end before it begins.
        continues = bool(self._in_flight)
        self._check_startable(continues=continues)  # once more in the change; one refused here takes no memory
        with lock:
            buffer = self._buffers.take(self._layout._replace(steps=steps))
        written = None if parameters is None else self.parameters.write(*self._pickle_parameters(parameters))
        copies = self._engine.reader.copies if copy is None else copy
        for group in self.groups:
            group.recycler.measure_memory()
        with lock, lock.change(*self._actors):
            try:
                self._check_startable(continues=continues)
            except EnvActorsError as refusal:
                raise lock.refuse(refusal)
            if not (continues or self._in_flight):
                self.last_errors_by_env = {}
            if written is not None:
                self.parameters.record(*written)
            rollout = RolloutInFlight(self, buffer, each=each, copies=copies)
            futures = list(rollout.futures)
            self._buffers.use(buffer)
            self.next_index += 1
            self._set_in_flight([*self._in_flight, rollout])
            for part in rollout.parts:
                part.enqueue()
        return futures

    def _check_startable(self, *, continues: bool) -> None:
        """Raise if no rollout can start; see `start`. One that continues others may find envs that need a reset."""
        self.check_free(fewer_than=_MOST)
        if not (continues or self._in_flight):
            self._engine.episodes.check_steppable(self._engine.all.ids)
        for actor in self._actors:
            if actor.is_closing:
                raise actor.errors.closed(Activity("rollout", actor.config.first_index))

    def check_free(self, *, fewer_than: int = 1) -> None:
        """Raise `AlreadyPendingError` unless fewer rollouts than this are in flight, and no result is pending."""
        if (count := len(self._in_flight)) >= fewer_than:
            raise AlreadyPendingError(f"{count} rollouts are in flight: wait for the oldest one first")
        super().check_free()

    def end(self, rollout: RolloutInFlight) -> None:
        """Record that all parts of a rollout have ended. Called under the lock, and again after an interrupt."""
        self._layout = rollout.buffer.trajectory.layout
        self._set_in_flight([other for other in self._in_flight if other is not rollout])

    def _end_parts(self, group: EnvGroup, error_of: ErrorOf) -> None:
        """End the parts of an actor that it does not know of: the change that began the rollout was interrupted."""
        for rollout in list(self._in_flight):
            rollout.parts[self.groups.index(group)].fail(error_of)
        self._set_in_flight(self._in_flight)  # the change may not have got to the count of the table

    def _set_in_flight(self, rollouts: list[RolloutInFlight]) -> None:
        self._in_flight = rollouts
        self._table.record_rollouts(len(rollouts))


class RolloutInFlight:
    """One rollout, which its futures belong to: nothing but closing the vector ends it.

    Args:
        engine: Runs the rollouts of the vector, and has the recipe and the parameters of this one.
        buffer: The memory of its trajectory.
        each: Whether each actor has a future.
        copies: Whether results stay valid for as long as the user keeps them.

    Attributes:
        recipe: That of the policy.
        parameters: Parameters that the policy loads first; None if there are none.
        buffer: As above.
        index: Index of the rollout since the policy was set.
        last_errors_by_env: As of `WorkerRolloutEngine`.
        runtime: The threads that serve the actors.
        parts: The part of each actor.
        futures: The futures; empty once all parts have ended.
    """

    def __init__(self, engine: WorkerRolloutEngine, buffer: TrajectoryBuffer, *, each: bool, copies: bool) -> None:
        assert engine.recipe is not None, "`VectorEnv` has checked it"
        self.recipe: PolicyRecipe = engine.recipe
        self.parameters: Parameters | None = engine.parameters.last
        self.buffer = buffer
        self.index: int = engine.next_index
        self.last_errors_by_env: dict[int, Outcome] = engine.last_errors_by_env
        self.runtime: Runtime = engine.runtime
        self.parts: list[RolloutPart] = [RolloutPart(group, self) for group in engine.groups]
        # The first env of each future that was not read.
        self._unread = {group.indices.start for group in (engine.groups if each else engine.groups[:1])}
        self.futures: list[ActorFuture[Rollout]] = [ActorFuture(self, None) for _ in self._unread]
        for future in self.futures:
            future.set_running()  # nobody can take it out of a queue
        self._engine = engine
        self._copies = copies
        buffer.hold(self)

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

    def check_owner(self) -> None:
        """Raise in a forked process; see `envactors.actor.future.Owner`."""
        self.parts[0].actor.check_owner()

    def read_reply(self, future: ActorFuture[Any], deadline: float | None) -> None:
        """Do nothing: the loop reads the replies."""

    # For parts, under the lock ---------------------------------------------------------------------------

    def on_part_end(self, part: RolloutPart) -> None:
        """Deliver the result of a part, or that of all parts with the last one; again after an interrupt."""
        is_over = all(other.has_ended for other in self.parts)
        if len(self.futures) > 1:
            self.futures[self.parts.index(part)].set_outcome(self._outcome_of([part]))
        elif self.futures and is_over:
            self.futures[0].set_outcome(self._outcome_of(self.parts))
        if is_over:
            self._engine.end(self)
            self.futures = []  # they refer to this

    # The result ------------------------------------------------------------------------------------------

    def _outcome_of(self, parts: list[RolloutPart]) -> LazyOutcome:
        """Return the outcome of consecutive actors, which the thread that waits for it puts together."""
        is_failure = any(part.errors_by_env or part.actor_error or part.policy_error for part in parts)
        return LazyOutcome(functools.partial(self._read_parts, parts), is_failure=is_failure)

    def _read_parts(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        outcome, error = try_to_read(lambda: self._read(parts))
        return outcome or (None, error)

    def _read(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        """Return the result of consecutive actors, or the error to raise. Runs code of users."""
        trajectory, sidecar = self.buffer.trajectory, Sidecar()
        errors_by_env: dict[int, BaseException] = {}
        for part in parts:
            add_infos(sidecar, part.trajectory)
            sidecar.errors_by_step.update(_exceptions_of(part.errors_by_step))
            if part.actor_error is None:
                errors_by_env.update(_exceptions_of(part.errors_by_env))
            else:
                errors_by_env.update(dict.fromkeys(part.trajectory.envs, part.actor_error))
        add_failure_infos(sidecar, trajectory)
        policy_error = next((part.policy_error.read()[1] for part in parts if part.policy_error is not None), None)
        versions = np.full(len(parts), 0 if self.parameters is None else self.parameters.version)
        envs = range(parts[0].trajectory.envs.start, parts[-1].trajectory.envs.stop)
        rollout = assemble(trajectory, envs, sidecar, versions, copies=self._copies)
        self._unread.discard(envs.start)  # again, if an interrupt has followed
        return rollout_or_error(rollout, errors_by_env, policy_error)


def _exceptions_of(outcomes: dict[Any, Outcome]) -> dict[Any, BaseException]:
    """Return the exceptions in outcomes. Runs code of users."""
    return {key: error for key, outcome in outcomes.items() if (error := outcome.read()[1]) is not None}
