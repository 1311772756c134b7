"""The rollouts of a vector, of which at most two are in flight."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from envactors.actor.future import ActorFuture
from envactors.actor.signal_deferral import defer_signals
from envactors.actor.slots import IDLE, ROLLING, Slots
from envactors.actor.supervisor import Supervisor
from envactors.backends.base import RowMemory
from envactors.envs.core import VectorCore
from envactors.errors import AlreadyPendingError, VectorInputError
from envactors.mailbox.pickling import dumps_by_value
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import ArraySpec, batches_alike
from envactors.options import is_int
from envactors.rollout.assembly import assemble, error_of, read_contents
from envactors.rollout.books import Books
from envactors.rollout.buffers import TrajectoryBuffer, TrajectoryBuffers, Views, make_views
from envactors.rollout.orders import Stop
from envactors.rollout.parameters import ParameterStore
from envactors.rollout.part import ActorPart
from envactors.rollout.requests import Policy, PolicyRequest
from envactors.rollout.results import Rollout
from envactors.rollout.run import Run
from envactors.rollout.trajectory import TrajectoryLayout

# Most rollouts in flight.
_MOST = 2


class Rollouts:
    """Runs the rollouts of a vector.

    Args:
        vector: The vector.
        books: Counts and last results of the envs.
        memory: Shared memory of the vector.
    """

    def __init__(self, vector: VectorCore, books: Books, memory: RowMemory) -> None:
        self._slots = vector.slots
        self._supervisors = vector.actors
        self._books = books
        self._memory = memory
        # Whether results stay valid for as long as the user keeps them.
        self._copy = vector.reader.copies
        self._lock = threading.RLock()
        self._policies = 0
        self._policy: Policy | None = None
        self._parameters = ParameterStore(memory)
        # Whether the policy can load parameters.
        self._loads = False
        # Index of the next rollout since the policy was set.
        self._next = 0
        self._buffers = TrajectoryBuffers(memory)
        self._extras: tuple[tuple[str, ArraySpec], ...] = ()
        # Spec of one env's action, learned if the envs have no action space.
        self._action: ArraySpec | None = None
        # Rollouts in flight, oldest first.
        self._runs: list[Run] = []
        # Last error of each env that failed.
        self._lost: dict[int, BaseException] = {}

    # The policy ------------------------------------------------------------------------------------------

    def set_policy(self, make_policy: Any, seed: int) -> None:
        """Have each worker make the policy, and wait until all have.

        Raises:
            TypeError: ``make_policy`` is not callable.
            ValueError: ``seed`` is not an int >= 0.
            AlreadyPendingError: Rollouts are in flight.
            ActorClosedError: An actor was closed.
            Exception: Raised by ``make_policy``.
        """
        if not callable(make_policy):
            raise TypeError(f"make_policy is {make_policy!r}: expected a function without arguments")
        if not is_int(seed, 0):
            raise ValueError(f"seed is {seed!r}: expected an int >= 0")
        self.check_idle()
        self._policies += 1
        policy = Policy(self._policies, bytes(dumps_by_value(make_policy)), operator.index(seed))
        futures: list[Future[bool]] = [Future() for _ in self._supervisors]
        for supervisor, future in zip(self._supervisors, futures, strict=True):
            request = PolicyRequest(supervisor, policy, functools.partial(_tell_made, future))
            with supervisor.core.change, supervisor.core.lock:
                if supervisor.core.closing:
                    raise supervisor.core.errors.closed(request, supervisor.core.incarnation)
                supervisor.calls.queue(request)
        can_load = [future.result() for future in futures]
        self._loads = all(can_load)
        self._policy = policy
        self._extras = ()
        self._action = None
        self._next = 0
        self._parameters = ParameterStore(self._memory)

    @property
    def has_policy(self) -> bool:
        """Whether `set_policy` has succeeded."""
        return self._policy is not None

    def give(self, parameters: Any) -> None:
        """Have the policy load parameters before its next step; None keeps the current ones.

        Raises:
            TypeError: The policy has no method ``load``.
        """
        if parameters is None:
            return
        if not self._loads:
            raise TypeError(
                "cannot give parameters to a policy that has no method load(parameters): add one, or leave them out"
            )
        self._parameters.give(parameters)

    # Evaluations -----------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """Number of envs."""
        return len(self._slots.of)

    @property
    def reward_shape(self) -> tuple[int, ...]:
        """Shape of one env's reward."""
        return (self._slots.slab.layout.reward or PLAIN_REWARD).shape

    def seed_of_episode(self, number: int) -> int:
        """Return the seed of an episode of `evaluate`."""
        assert self._policy is not None, "the caller has checked it"
        return int(np.random.SeedSequence(self._policy.seed, spawn_key=(1, number)).generate_state(1)[0])

    def end_episodes(self) -> None:
        """Require a reset of every env before its next step."""
        if self._runs:
            return  # an exception has interrupted the evaluation
        for supervisor in self._supervisors:
            first = supervisor.config.first_index
            with supervisor.core.change, supervisor.core.lock:
                for index in range(first, first + len(supervisor.config.start.factories)):
                    self._slots.lose_episode(index, resets_next=False)

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
            VectorInputError: ``steps`` is not an int >= 1.
            AlreadyPendingError: Two rollouts are in flight, or results are pending.
            TypeError: The policy has no method ``load``.
        """
        assert self._policy is not None, "the caller has checked it"
        if not is_int(steps):
            raise VectorInputError(f"steps is {steps!r}: expected an int >= 1")
        steps = operator.index(steps)  # a small int of NumPy would overflow
        self._check_free(_MOST)
        if not self._runs:
            self._books.check_steppable()
        self.give(parameters)
        with defer_signals, self._lock:
            run = Run(
                self._supervisors,
                self._take_buffer(steps),
                copy=self._copy if copy is None else copy,
                count=len(self._supervisors) if each else 1,
                prepare=self._prepare,
                read=self._read,
            )
            futures = run.futures
            run.parts = [self._make_part(run, self._policy, supervisor, steps) for supervisor in self._supervisors]
            run.left = set(run.parts)
            ready = [part for part in run.parts if self._first_part(part.supervisor) is None]
            try:
                self._count(run)
            except BaseException:
                self._runs = [other for other in self._runs if other is not run]
                self._rest()
                raise
        try:
            self._begin_all(ready)
        except BaseException:
            run.reactor.post(functools.partial(self._begin_all, ready))
            raise
        return futures

    def _count(self, run: Run) -> None:
        """Count a rollout among those in flight."""
        self._next += 1
        if not self._runs:
            self._slots.states[:] = bytes([ROLLING]) * len(self._slots.states)
            self._slots.at_rest = ROLLING
        self._runs.append(run)

    def _rest(self) -> None:
        """Make the envs idle if no rollout is in flight."""
        if not self._runs:
            self._slots.at_rest = IDLE
            self._slots.make_all_idle()

    def _begin_all(self, parts: list[ActorPart]) -> None:
        for part in parts:
            _begin(part, self._slots)

    def _first_part(self, supervisor: Supervisor) -> ActorPart | None:
        """Return the part of an actor that it is in, or is to begin, if there is one."""
        number = self._supervisors.index(supervisor)
        return next((run.parts[number] for run in self._runs if run.parts[number] in run.left), None)

    def _make_part(self, run: Run, policy: Policy, supervisor: Supervisor, steps: int) -> ActorPart:
        part = ActorPart(
            supervisor,
            self._slots,
            self._books,
            policy,
            self._next,
            steps,
            self._parameters.last,
            self._lost,
            functools.partial(self._on_learnt, run),
            functools.partial(self._on_part_end, run),
        )
        part.progress.trajectory = run.buffer.trajectory
        part.place = run.buffer.place
        return part

    def check_idle(self) -> None:
        """Check that no rollout is in flight and no result is pending.

        Raises:
            AlreadyPendingError: A rollout is in flight, or a result is pending.
        """
        self._check_free(1)

    def _check_free(self, most: int) -> None:
        """Check that fewer than ``most`` rollouts are in flight and no result is pending.

        Raises:
            AlreadyPendingError: There are, or a result is pending.
        """
        with defer_signals, self._lock:  # another thread may be about to end a rollout
            count = len(self._runs)
            busy = [index for index, state in enumerate(self._slots.states) if state != self._slots.at_rest]
        if count >= most:
            raise AlreadyPendingError(f"{count} rollouts are in flight: wait for the oldest one first")
        if not count and busy:
            raise AlreadyPendingError(f"the envs {busy} have results pending: receive them before a rollout")

    def _take_buffer(self, steps: int) -> TrajectoryBuffer:
        """Return the memory of a new rollout."""
        rows, observation = self._slots.slab.layout, self._books.observation_spec
        assert observation is not None, "the envs have been reset"
        layout = TrajectoryLayout(
            observation,
            rows.action or self._action,
            rows.reward,
            self._extras,
            rows.envs,
            steps,
            is_learnt=not batches_alike(rows.observation, observation),
        )
        return self._buffers.take(layout, [run.buffer for run in self._runs])

    def _on_learnt(self, run: Run, part: ActorPart, stop: Stop) -> None:
        """Move a rollout to a trajectory that has a place for what its policy returns."""
        with self._lock:
            layout = run.buffer.trajectory.layout
            if layout.extras != stop.learnt or (layout.action is None and stop.action is not None):
                self._extras = stop.learnt
                self._action = stop.action
                buffer = self._take_buffer(layout.steps)
                for ended in set(run.parts) - run.left:
                    ended.move(buffer.trajectory, buffer.place)
                run.buffer = buffer
            part.move(run.buffer.trajectory, run.buffer.place)
        part.ask()

    # Ends ------------------------------------------------------------------------------------------------

    def _on_part_end(self, run: Run, part: ActorPart) -> None:
        """Begin the actor's part of the next rollout, and hand out the result; may run again after an interrupt."""
        with self._lock:
            part.move(run.buffer.trajectory, run.buffer.place)
            self._lost.update(part.errors)
            run.left.discard(part)
            following = self._first_part(part.supervisor)
            futures = run.futures  # another thread may settle the rollout, which forgets them
            is_last = not run.left
        if following is not None:
            _begin(following, self._slots)
        if not futures:
            return  # the rollout was settled before the interrupt
        if len(futures) > 1:
            self._hand_out(run, [part], futures[run.parts.index(part)])
        elif is_last:
            self._hand_out(run, run.parts, futures[0])
        else:
            run.ended.append(part)
            run.reactor.wake(futures[0])

    def _hand_out(self, run: Run, parts: list[ActorPart], future: ActorFuture[Rollout]) -> None:
        """Have a result built by a thread that waits for it, or else in the thread for callbacks."""
        future.arrive(functools.partial(self._settle, run, parts, future))

    def _settle(self, run: Run, parts: list[ActorPart], future: ActorFuture[Rollout]) -> None:
        if future.settled():
            return
        rollout: Any = None
        error: BaseException | None
        try:
            contents = [run.contents.get(part) or read_contents(part) for part in parts]
            rollout = assemble(run.buffer.trajectory, parts, self._views(run, parts), contents)
            error = error_of(parts, rollout)
        except BaseException as failure:
            error = failure
        with self._lock:
            # Only now may another rollout take the memory; the user may start one as soon as the future is settled.
            run.unsettled.discard(future)
            # In order: a rollout counts as in flight until those before it have ended.
            while self._runs and not self._runs[0].unsettled:
                self._runs.pop(0)
            self._rest()
        future.settle(rollout if error is None else None, error, 0)
        if not run.unsettled:
            # The run and its parts refer to each other: a result must not live until they are collected.
            run.futures = []
            run.contents = {}
            run.prepared = None

    def _read(self, run: Run, part: ActorPart) -> None:
        """Read what a part has left while others run: on its core, that takes no time from theirs."""
        with defer_signals, contextlib.suppress(BaseException):  # it is raised when the result is built
            contents = read_contents(part)
            with self._lock:
                if run.unsettled:
                    run.contents[part] = contents

    def _prepare(self, run: Run) -> None:
        """Make the views for a result that stays valid, unless single actors have results or too many are kept."""
        with defer_signals, self._lock:
            if run.copy and run.unsettled and len(run.futures) == 1 and not run.has_views:
                views = self._buffers.lend(run.buffer)
                if views is not None:
                    run.prepared = run.buffer, views

    def _views(self, run: Run, parts: list[ActorPart]) -> Views:
        """Return what the result of some actors shows."""
        with self._lock:
            # The memory is lent once: otherwise it would count as free while the user keeps the first views.
            self._prepare(run)
            if run.prepared is not None and run.has_views:
                return run.prepared[1]
            views = make_views(run.buffer.trajectory, parts[0].first, parts[-1].stop)
            # Views of single actors would keep the memory of all; and few results may be lent at a time.
            return views.map(np.copy) if run.copy else views


def _begin(part: ActorPart, slots: Slots) -> None:
    """Begin a part; first replace a process that is due for it, if the next step resets its env anyway.

    May run again after an interrupt.
    """
    if part.has_gone_on(None):
        return
    # Envs that leave their process are unusual, and most often none is.
    mine = range(part.first, part.stop) if slots.unusual else ()
    if any(slots.of[index].retiring and slots.ended[index] for index in mine):
        core = part.supervisor.core
        with core.change, core.lock:
            if core.lives and not core.closing:
                part.supervisor.calls.queue_renewal()
    part.begin()


def _tell_made(future: Future[bool], loads: bool, error: BaseException | None) -> None:
    """Settle the future of a request for a policy; it may be called twice."""
    if future.done():
        return
    if error is None:
        future.set_result(loads)
    else:
        future.set_exception(error)
