"""The rollouts of a vector whose envs run in workers. At most two are in flight.

A rollout is in flight from `WorkerRolloutEngine.start` until all its parts have ended: each with its last step, or with
an error of an env, of the policy, or of the actor. Nobody can cancel it.

    WorkerRolloutEngine.start        makes a part per actor, and queues it
    RolloutInFlight.deliver          a part has ended: resolves the futures whose parts have all ended
    WorkerRolloutEngine.forget       all parts have ended: the rollout is not in flight any more
    WorkerRolloutEngine._end_parts   an actor is repaired after an interrupt: ends its parts of all rollouts in flight

An interrupt may come between any two of their statements. So the last three may run twice for one rollout, and the
second run changes nothing. A rollout stays in flight until its futures are resolved.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.actor.future import ActorFuture, LazyOutcome, results_of
from envactors.actor.handle import send_request
from envactors.actor.job import ErrorOf
from envactors.backends.base import RowMemory
from envactors.errors import AlreadyPendingError, EnvActorsError
from envactors.mailbox.messages import Extend, Kind
from envactors.mailbox.pickling import try_to_read
from envactors.rollout import policy_runner
from envactors.rollout.assembly import ResultsWithoutArrays, assemble
from envactors.rollout.base import RolloutEngine, RolloutFutures
from envactors.rollout.memory import BufferHold, ParameterStore, TrajectoryBuffers
from envactors.rollout.messages import MOST_IN_FLIGHT, PolicyRecipe
from envactors.rollout.part import RolloutPart, RolloutTerms
from envactors.rollout.results import Rollout
from envactors.rollout.trajectory import TrajectoryLayout
from envactors.vector.engine import RowEngine
from envactors.vector.env_group import EnvGroup


class WorkerRolloutEngine(RolloutEngine):
    """Runs the rollouts of a vector whose envs run in workers.

    Args:
        engine: Steps the envs.
        memory: Shared memory of the vector.

    Attributes:
        groups: The envs of each actor.
    """

    _engine: RowEngine
    # Set by `set_policy`: the recipe of the policy, and the parameters that the user has given since.
    _recipe: PolicyRecipe
    _parameters: ParameterStore

    def __init__(self, engine: RowEngine, memory: RowMemory) -> None:
        super().__init__(engine)
        self.groups: Sequence[EnvGroup] = engine.groups
        for position, group in enumerate(self.groups):
            group.end_rollout_parts = functools.partial(self._end_parts, position)
        self._actors = [group.actor for group in self.groups]
        self._table = engine.table
        self._memory = memory
        self._policy_ids = itertools.count(1)
        self._buffers = TrajectoryBuffers(memory)

    def _make_policies(self, make_policy: bytes, seed: int) -> bool:
        recipe = PolicyRecipe(next(self._policy_ids), make_policy, seed)
        message, limit = Extend(policy_runner.set_policy, (recipe,)), self._actors[0].config.deadlines.start
        deadline = math.inf if limit is None else limit  # None would be that of calls
        futures: list[ActorFuture[Any]] = [
            send_request(actor, Kind.EXTEND, message, "set_policy", deadline=deadline) for actor in self._actors
        ]
        loads = all(results_of(futures))
        rows, lock = self._table.slab.layout, self._table.lock
        inferred = self._engine.observation_spec if self._engine.batcher.infers_spec else None
        layout = TrajectoryLayout(rows.observation, rows.action, rows.reward, (), rows.envs, 0, inferred)
        parameters = ParameterStore(
            self._memory, lock, lambda: [each.terms.parameters for each in self._table.rollouts_in_flight]
        )
        self._recipe, self._parameters, self._layout = recipe, parameters, layout
        return loads

    def require_resets(self) -> None:
        lock = self._table.lock
        with lock, lock.change(*self._actors):
            if not self._table.rollouts_in_flight:  # an interrupted evaluation leaves one, which may still step
                super().require_resets()

    def start(self, steps: int, parameters: Any, *, each: bool = False) -> RolloutFutures:
        """Start a rollout; see `RolloutEngine.start`.

        1. Check whether it can start, so that one that is refused takes no memory.
        2. Pickle the parameters, take a buffer, and write the parameters to the memory. This runs code of users, and
           copies, which a change must not. If it fails, everything taken is free again once the exception, whose
           traceback refers to it, was dropped.
        3. In one change, check again, since a signal handler or another thread may have started rollouts or steps
           meanwhile. Then everything begins.
        """
        table, lock = self._table, self._table.lock
        # A future is resolved a few statements before its rollout is not in flight any more. This waits for the end of
        # such a change.
        lock.repair_if_interrupted()

        continued = next(reversed(table.rollouts_in_flight), None)  # the loop may replace the list meanwhile
        self._check_startable(continued)

        pickled = self._pickle_parameters(parameters)
        with lock:
            buffer, hold = self._buffers.take(self._layout._replace(steps=steps))
        written = None if pickled is None else self._parameters.write(*pickled)

        with lock, lock.change(*self._actors):
            # If the last one has ended meanwhile, this continues it.
            continued = next(reversed(table.rollouts_in_flight), continued)
            try:
                self._check_startable(continued)
            except EnvActorsError as refusal:
                raise lock.end_with(refusal)
            if written is not None:
                self._parameters.record(*written)
            self._buffers.begin(buffer)
            last_errors = {} if continued is None else continued.terms.last_errors
            parameters, copies = self._parameters.last, self._engine.reader.copies
            terms = RolloutTerms(self._recipe, parameters, self._next_index, buffer, copies, last_errors)
            rollout = RolloutInFlight(self, terms, hold, each=each)
            futures = list(rollout.parts_by_future)
            self._next_index += 1
            table.record_rollouts([*table.rollouts_in_flight, rollout])
            for part in rollout.parts:
                part.enqueue()
        return futures

    def check_free(self) -> None:
        self._table.lock.repair_if_interrupted()  # see `start`
        self._check_in_flight(fewer_than=1)

    def _check_startable(self, continued: RolloutInFlight | None) -> None:
        """Raise if no rollout can start; see `RolloutEngine.start`.

        Args:
            continued: The rollout that it continues, which may leave envs that need a reset; None for none.
        """
        self._check_in_flight(fewer_than=MOST_IN_FLIGHT)
        if continued is None:
            self._engine.episodes.check_steppable(self._engine.all_envs.ids)
        self._engine.check_open(self._engine.all_envs, "rollout")

    def _check_in_flight(self, *, fewer_than: int) -> None:
        """Raise `AlreadyPendingError` unless fewer rollouts than this are in flight, and no result is pending."""
        if (count := len(self._table.rollouts_in_flight)) >= fewer_than:
            raise AlreadyPendingError(f"{count} rollouts are in flight: wait for the oldest one first")
        super().check_free()

    def forget(self, rollout: RolloutInFlight) -> None:
        """Record that a rollout is not in flight any more, since all its parts have ended."""
        self._layout = rollout.terms.buffer.trajectory.layout
        in_flight = self._table.rollouts_in_flight
        self._table.record_rollouts([other for other in in_flight if other is not rollout])

    def _end_parts(self, position: int, error_of: ErrorOf) -> None:
        """End the parts of an actor after an interrupt, and repeat the statements that it may have skipped.

        - A part may have ended, and not left the queue of its actor: so this goes through the rollouts, not the queue.
        - A part may have ended, and its future not been resolved: so this calls `deliver`.
        """
        for rollout in self._table.rollouts_in_flight:
            rollout.parts[position].fail(error_of)
            rollout.deliver()


class RolloutInFlight:
    """One rollout. It is freed once it has ended, and all of its results were read or dropped.

    Args:
        engine: The engine that starts it.
        terms: The facts that its parts have in common.
        hold: Holds the buffer until this is freed. The terms do not, since parts may outlive their rollout.
        each: Whether there is one future per actor, rather than one for all.

    Attributes:
        terms: As above.
        parts: The part of each actor, which the caller queues.
        parts_by_future: The parts that each future waits for, until they have ended.
    """

    def __init__(self, engine: WorkerRolloutEngine, terms: RolloutTerms, hold: BufferHold, *, each: bool) -> None:
        self.terms = terms
        self._hold = hold
        self._forget = engine.forget
        self.parts: list[RolloutPart] = [RolloutPart(group, terms, self.deliver) for group in engine.groups]
        shares = [[part] for part in self.parts] if each else [self.parts]
        self.parts_by_future: dict[ActorFuture[Rollout], list[RolloutPart]] = {
            ActorFuture(parts[0].actor, None): parts for parts in shares
        }
        for future, parts in self.parts_by_future.items():
            future.set_running()  # nobody can take it out of a queue
            if len(parts) == 1:
                parts[0].sole_waiter = future

    def deliver(self) -> None:
        """Resolve the futures whose parts have all ended."""
        for future, parts in tuple(self.parts_by_future.items()):
            if all(part.has_ended for part in parts):
                future.set_outcome(LazyOutcome(self._read, parts, is_failure=any(part.has_failed for part in parts)))
                del self.parts_by_future[future]  # else the outcome and this would keep each other alive
        if not self.parts_by_future:
            self._forget(self)

    def _read(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        """Return the result of consecutive actors, or the error to raise, perhaps one of unpickling.

        The first thread that asks for the result calls this. It runs code of users.
        """
        outcome, read_error = try_to_read(lambda: self._assemble(parts))
        return (None, read_error) if outcome is None else outcome

    def _assemble(self, parts: list[RolloutPart]) -> tuple[Rollout | None, BaseException | None]:
        results, terms = ResultsWithoutArrays(), self.terms
        for part in parts:
            results.add_part(part)
        versions = np.full(len(parts), 0 if terms.parameters is None else terms.parameters.version)
        indices = range(parts[0].envs.indices.start, parts[-1].envs.indices.stop)
        return assemble(terms.buffer.trajectory, indices, results, versions, copies=terms.copies)
