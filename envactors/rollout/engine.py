"""The rollouts of a vector whose envs run in workers. At most two are in flight."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
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
from envactors.rollout import policy_runner
from envactors.rollout.assembly import Sidecar, add_failure_infos, add_infos, assemble
from envactors.rollout.base import RolloutEngine, RolloutFutures
from envactors.rollout.memory import ParameterStore, TrajectoryBuffers
from envactors.rollout.messages import PolicyRecipe
from envactors.rollout.part import RolloutPart, RolloutSpec
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
    """

    _engine: RowEngine
    # Set by `set_policy`, which comes before all rollouts.
    _policy: _Policy

    def __init__(self, engine: RowEngine, memory: RowMemory) -> None:
        super().__init__(engine)
        self._groups = engine.groups
        for position, group in enumerate(self._groups):
            group.end_rollout_parts = functools.partial(self._end_parts, position)
        self._actors = [group.actor for group in self._groups]
        # The last error of each env in the current chain of rollouts; a rollout that continues no other clears it.
        self._last_errors_by_env: dict[int, Outcome] = {}
        self._table = engine.table
        self._memory = memory
        self._policy_ids = itertools.count(1)
        self._buffers = TrajectoryBuffers(memory)
        # Oldest first.
        self._in_flight: list[RolloutInFlight] = []

    def _make_policies(self, make_policy: bytes, seed: int) -> bool:
        recipe = PolicyRecipe(next(self._policy_ids), make_policy, seed)
        message = Extend(policy_runner.set_policy, (recipe,))
        futures: list[ActorFuture[Any]] = [
            send_request(actor, Kind.EXTEND, message, "set_policy", deadline=actor.config.deadlines.start)
            for actor in self._actors
        ]
        loads = all(results_of(futures))
        rows, lock = self._table.slab.layout, self._table.lock
        learned = self._engine.observation_spec if self._engine.batcher.infers_spec else None
        layout = TrajectoryLayout(rows.observation, rows.action, rows.reward, (), rows.envs, 0, learned)
        parameters = ParameterStore(self._memory, lock, lambda: [each.spec.parameters for each in self._in_flight])
        self._policy = _Policy(recipe, parameters, layout)
        return loads

    def _set_parameters(self, pickled: bytes, arrays: Sequence[memoryview]) -> None:
        written = self._policy.parameters.write(pickled, arrays)
        with self._table.lock:
            self._policy.parameters.record(*written)

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
        policy = self._policy
        pickled = None if parameters is None else self._pickle_parameters(parameters)  # which may raise
        with lock:
            buffer = self._buffers.take(policy.layout._replace(steps=steps))
        written = None if pickled is None else policy.parameters.write(*pickled)
        copies = self._engine.reader.copies if copy is None else copy
        for group in self._groups:
            group.recycler.measure_memory()
        with lock, lock.change(*self._actors):
            try:
                self._check_startable(continues=continues)
            except EnvActorsError as refusal:
                raise lock.refuse(refusal)
            if not (continues or self._in_flight):
                self._last_errors_by_env = {}
            if written is not None:
                policy.parameters.record(*written)
            last_parameters, last_errors = policy.parameters.last, self._last_errors_by_env
            spec = RolloutSpec(policy.recipe, last_parameters, self._next_index, buffer, copies, last_errors)
            rollout = RolloutInFlight(self._groups, spec, self._on_end, each=each)
            futures = list(rollout.parts_by_future)
            self._buffers.use(buffer, rollout)
            self._next_index += 1
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
                raise actor.errors.actor_closed(Activity("rollout", actor.config.first_index))

    def check_free(self, *, fewer_than: int = 1) -> None:
        """Raise `AlreadyPendingError` unless fewer rollouts than this are in flight, and no result is pending."""
        if (count := len(self._in_flight)) >= fewer_than:
            raise AlreadyPendingError(f"{count} rollouts are in flight: wait for the oldest one first")
        super().check_free()

    def _on_end(self, rollout: RolloutInFlight) -> None:
        """Record that all parts of a rollout have ended. Called under the lock, and again after an interrupt."""
        self._policy.layout = rollout.spec.buffer.trajectory.layout
        self._set_in_flight([other for other in self._in_flight if other is not rollout])

    def _end_parts(self, position: int, error_of: ErrorOf) -> None:
        """End the parts of an actor after an interrupt, also those that it does not know of, and deliver again."""
        for rollout in list(self._in_flight):
            rollout.parts[position].fail(error_of)
            rollout.deliver()
        self._set_in_flight(self._in_flight)  # the change may not have got to the count of the table

    def _set_in_flight(self, rollouts: list[RolloutInFlight]) -> None:
        self._in_flight = rollouts
        self._table.record_rollouts(len(rollouts))


@dataclasses.dataclass(eq=False)
class _Policy:
    """The policy of all actors.

    Attributes:
        recipe: Its recipe.
        parameters: The parameters that the user has given.
        layout: Layout of the last rollout which has ended, with the specs that the output of its policy has shown.
    """

    recipe: PolicyRecipe
    parameters: ParameterStore
    layout: TrajectoryLayout


class RolloutInFlight:
    """One rollout, which its futures belong to: nothing but closing the vector ends it.

    Args:
        groups: The envs of each actor.
        spec: What its parts have in common.
        on_end: Called with this once all parts have ended; again after an interrupt.
        each: Whether each actor has a future.

    Attributes:
        spec: As above.
        runtime: The threads that serve the actors.
        parts: The part of each actor.
        parts_by_future: The parts whose results each future has, until they have ended.
    """

    def __init__(
        self, groups: Sequence[EnvGroup], spec: RolloutSpec, on_end: Callable[[RolloutInFlight], object], *, each: bool
    ) -> None:
        self.spec = spec
        self.runtime: Runtime = groups[0].actor.runtime
        self.parts: list[RolloutPart] = [RolloutPart(group, spec, self.deliver) for group in groups]
        shares = [[part] for part in self.parts] if each else [self.parts]
        self.parts_by_future: dict[ActorFuture[Rollout], list[RolloutPart]] = {
            ActorFuture(self, None): parts for parts in shares
        }
        for future in self.parts_by_future:
            future.set_running()  # nobody can take it out of a queue
        # The first env of each future that was not read.
        self._unread = {parts[0].envs.indices.start for parts in shares}
        self._on_end = on_end

    @property
    def is_read(self) -> bool:
        """Whether all futures were read, so that the memory may be used again."""
        return not self._unread

    # For futures -----------------------------------------------------------------------------------------

    def cancel(self, future: ActorFuture[Any]) -> bool:
        """Return False: a rollout can be neither canceled nor aborted, also while it runs."""
        del future
        return False

    abort = cancel

    def check_process(self) -> None:
        """Raise in a forked process; see `envactors.actor.future.Owner`."""
        self.parts[0].actor.check_process()

    def read_reply(self, future: ActorFuture[Any], deadline: float | None) -> None:
        """Do nothing: the loop reads the replies."""

    # Under the lock --------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Deliver the results of parts that have ended; again after an interrupt."""
        for future, parts in tuple(self.parts_by_future.items()):
            if all(part.has_ended for part in parts):
                future.set_outcome(self._outcome_of(parts))
                del self.parts_by_future[future]  # it refers to this
        if not self.parts_by_future:
            self._on_end(self)

    # The result ------------------------------------------------------------------------------------------

    def _outcome_of(self, parts: list[RolloutPart]) -> LazyOutcome:
        """Return the outcome of consecutive actors, which the thread that waits for it puts together."""
        is_failure = any(part.failures.errors_by_env or part.policy_error for part in parts)
        return LazyOutcome(functools.partial(self._read_parts, parts), is_failure=is_failure)

    def _read_parts(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        """Return what `_read` returns, or its error: bytes of a worker may raise anything."""
        outcome: tuple[Rollout | None, BaseException | None] | None
        outcome, read_error = try_to_read(lambda: self._read(parts))
        return (None, read_error) if outcome is None else outcome

    def _read(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        """Return the result of consecutive actors, or the error to raise. Runs code of users."""
        trajectory, sidecar = self.spec.buffer.trajectory, Sidecar()
        for part in parts:
            add_infos(sidecar, part.envs)
            add_failure_infos(sidecar, part.envs, _exceptions_of(part.failures.errors_by_step))
            sidecar.errors_by_env.update(_exceptions_of(part.failures.errors_by_env))
            if part.policy_error is not None:
                sidecar.policy_errors.update(_exceptions_of({part.envs.indices.start: part.policy_error}))
        versions = np.full(len(parts), 0 if self.spec.parameters is None else self.spec.parameters.version)
        envs = range(parts[0].envs.indices.start, parts[-1].envs.indices.stop)
        outcome = assemble(trajectory, envs, sidecar, versions, copies=self.spec.copies)
        self._unread.discard(envs.start)  # again, if an interrupt has followed
        return outcome


def _exceptions_of(outcomes: dict[Any, Outcome]) -> dict[Any, BaseException]:
    """Return the exceptions in outcomes. Runs code of users."""
    return {key: error for key, outcome in outcomes.items() if (error := outcome.read()[1]) is not None}
