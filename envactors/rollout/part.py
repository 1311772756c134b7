"""One actor's part of a rollout: orders to its worker, and single steps in rows after a failure.

    order ──▶ the worker calls the policy and steps its envs ──▶ done, or it stops
      ▲                                                            │ an env raised, or the process ended
      └──── the step is complete ◀── the remaining envs take it in rows, as in `VectorEnv.step`

Failures are thus handled by `envactors.actor.decide`, as in `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from envactors.actor.requests import CallRequest, Group
from envactors.actor.slots import ASKED, NO_EPISODE, POSTED, ROLLING, Op, Slots
from envactors.actor.supervisor import Supervisor
from envactors.envs.results import failure_in, is_empty
from envactors.errors import ActorError
from envactors.mailbox.messages import Failure
from envactors.mailbox.pickling import make_payload
from envactors.mailbox.slab import HALF, SEED
from envactors.mailbox.slab import RESET as RESET_BIT
from envactors.rollout.books import Books
from envactors.rollout.orders import (
    COLUMNS,
    LEARNT,
    NEEDS_POLICY,
    RAISED,
    EnvPlan,
    Order,
    Parameters,
    Stop,
)
from envactors.rollout.progress import PartProgress, next_seed, write_failure
from envactors.rollout.requests import OrderRequest, Policy, PolicyRequest
from envactors.rollout.trajectory import RESET, STEP, TRUNCATED, ColumnsNote, Trajectory

if TYPE_CHECKING:
    from envactors.actor.future import ActorFuture
    from envactors.actor.rows import ActorRows


class ActorPart:
    """One actor's part of a rollout.

    Args:
        supervisor: The actor.
        slots: All envs of the vector.
        books: Counts and last results of the envs.
        policy: The policy.
        number: Index of the rollout since the policy was set.
        steps: Number of steps.
        parameters: Parameters that the policy loads first unless it has them; None if there are none.
        lost: Errors of envs that failed in earlier rollouts, by env.
        on_learnt: Called when the policy returns something that the trajectory has no place for.
        on_end: Called once the part has ended.

    Attributes:
        first, stop: Range of the actor's envs.
        place: Place of the trajectory in the shared memory.
        progress: Steps that were counted so far.
        infos: Infos of steps that were completed in rows, by (step, env).
        failures: Exceptions, by (step, env).
        errors: Errors to raise, by env.
        error: Exception from the policy, or error of the actor as a whole; None without one.
        version: How often the user has given parameters.
        request: The last request that it has sent; None before the first one. What follows the end of a request may be
            interrupted, and then runs again, until the next one is sent or the part has ended.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        slots: Slots,
        books: Books,
        policy: Policy,
        number: int,
        steps: int,
        parameters: Parameters | None,
        lost: dict[int, BaseException],
        on_learnt: Callable[[ActorPart, Stop], None],
        on_end: Callable[[ActorPart], None],
    ) -> None:
        self.supervisor = supervisor
        self.first: int = supervisor.config.first_index
        self.stop: int = self.first + len(supervisor.config.start.factories)
        self.place: tuple[int, int]
        self.infos: dict[tuple[int, int], dict[str, Any]] = {}
        self.failures: dict[tuple[int, int], BaseException] = {}
        self.errors: dict[int, BaseException] = {}
        self.error: BaseException | None = None
        self.version: int = 0 if parameters is None else parameters.version
        self.request: CallRequest | None = None
        self._slots = slots
        self._books = books
        self._policy = policy
        self._number = number
        self._steps = steps
        self._parameters = parameters
        self._lost_before = lost
        self._is_far = supervisor.config.backend.is_far
        self._on_learnt = on_learnt
        self._on_end = on_end
        self._envs = range(self.first, self.stop)
        self.progress: PartProgress = PartProgress(supervisor, slots, books, steps)
        # (the step, its future) of steps in rows, by env.
        self._in_rows: dict[int, tuple[int, ActorFuture]] = {}

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory of the rollout."""
        return self.progress.trajectory

    # Orders ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write the last observations as the first ones of the trajectory, and send the first order."""
        trajectory = self.trajectory
        last = [self._books.last_obs(index) for index in self._envs]
        trajectory.begin(self.first, last, [self._books.starts(index) for index in self._envs])
        if not trajectory.is_whole:
            for index, obs in zip(self._envs, last, strict=True):
                self.progress.objects[0, index] = trajectory.objects_of(obs)
        self.errors.update(_errors_of_lost(self._slots, self._envs, self._lost_before))
        self.failures.update({(0, index): error for index, error in self.errors.items()})
        if self.errors:
            self._on_end(self)
        else:
            self.ask()

    def move(self, trajectory: Trajectory, place: tuple[int, int]) -> None:
        """Continue in another trajectory, and copy there what this one contains."""
        if trajectory is not self.trajectory:
            trajectory.take_columns(self.trajectory, self.first, self.stop)
            self.progress.trajectory, self.place = trajectory, place

    def ask(self) -> None:
        """Send the next order."""
        self._send(OrderRequest(self))

    def _send(self, request: CallRequest) -> None:
        core = self.supervisor.core
        with core.change, core.lock:
            self.request = request
            if core.closing:
                request.settle(None, core.errors.closed(request, core.incarnation), core.incarnation)
            else:
                self.supervisor.calls.queue(request)

    def has_gone_on(self, ended: CallRequest | None) -> bool:
        """Return whether there is a request after one that has ended; send it if an interrupt came before that."""
        request, core = self.request, self.supervisor.core
        if request is not None and request is not ended and not request.started:
            with core.change, core.lock:
                is_there = core.table.running is request or request in core.table.queue
                if not is_there and not request.started:
                    self._send(request)
        return request is not ended

    def order(self, incarnation: int) -> Order:
        """Return the next order. Called under the lock."""
        slots, step = self._slots, self.progress.step
        lost = self._lost()
        due = [index for index in self.progress.left() if index not in lost]
        plans: list[EnvPlan] = []
        for index in self._envs:
            slot = slots.of[index]
            slot.incarnation = incarnation
            slot.seed = next_seed(slots, index, incarnation)
            follows = slot.root_seed if slot.next_seed is not None else None
            plans.append((bool(slots.ended[index]), self.progress.repeats(index), slot.seed, follows, slot.episode))
        if self._is_far and self.supervisor.core.process is not None:
            worker, trajectory = self.supervisor.core.process.worker, self.trajectory
            note = ColumnsNote(self.place, trajectory.pickled_layout, self.first, self.stop, step)
            worker.mirror(note, trajectory.pack(self.first, self.stop, step, step + 1))
        return Order(
            self._policy.number,
            self._number,
            step,
            step + 1 if lost else self._steps,
            tuple(index - self.first for index in due),
            self.trajectory.pickled_layout,
            self.place,
            None if self._parameters is None else tuple(self._parameters),
            plans,
            slots.autoreset,
            []
            if self.trajectory.is_whole
            else [self.trajectory.objects_of(self._books.last_obs(i)) for i in self._envs],
        )

    def on_reply(self, stop: Stop | None, call_id: int) -> None:
        """Count what an order has done, so that a replay in another process reaches the same point.

        Args:
            stop: The reply; None if it is an error.
            call_id: Call id of the order.
        """
        rows = self.supervisor.calls.rows
        assert rows is not None, "envs of a vector have rows"
        self.progress.count()
        if stop is not None and stop.reason == RAISED:
            self._leave_to_rows(rows, call_id, self.first + stop.position, Failure(*stop.failure))

    def on_end(self, stop: Stop | None, error: BaseException | None, *, was_lost: bool) -> None:
        """Continue after an order has ended.

        Args:
            stop: The reply; None if there is none.
            error: Error of the order; None if it has a reply.
            was_lost: Whether the process has ended, so that the current step is completed in rows.
        """
        if was_lost:
            self._go_on()
            return
        if error is not None:
            self.error = error
            self._on_end(self)
        elif stop is not None and stop.reason == NEEDS_POLICY:
            self._set_policy()
        elif stop is not None and stop.reason == LEARNT:
            self._on_learnt(self, stop)
        else:
            self._go_on()

    def _set_policy(self) -> None:
        def then(_loads: bool, error: BaseException | None) -> None:
            # If the process has crashed, the next one makes the policy; the restart policy limits how often.
            if self.has_gone_on(request):
                return
            if error is None or (isinstance(error, ActorError) and core.lives and not core.closing):
                self.ask()
            else:
                self.error = error
                self._on_end(self)

        core = self.supervisor.core
        request = PolicyRequest(self.supervisor, self._policy, then)
        self._send(request)

    def be_late(self, position: int, *, in_policy: bool) -> None:
        # The columns of another machine only come with its reply.
        self.progress.be_late(position, in_policy=in_policy, is_known=not self._is_far)

    def add_part(self, number: int, content: memoryview) -> None:
        if number == COLUMNS:
            self.trajectory.unpack(self.first, self.stop, content)
        else:
            self.progress.large_infos[number] = content

    # Rows ------------------------------------------------------------------------------------------------

    def hand_over(self, rows: ActorRows, call_id: int, *, in_policy: bool) -> list[int]:
        """Complete the step of a process that has ended in rows. Called under the lock.

        Returns:
            Envs that fail with the policy; empty if an env was running.
        """
        self.progress.count()
        late = self.progress.late
        self.progress.forget_later()
        if late is not None:
            in_policy = late.in_policy
            rows.overdue = None if in_policy else self.first + late.position
        step = self.progress.step
        left = self.progress.repeat_ended(self.progress.left(), step)
        if not left:
            return []
        if not in_policy and self.trajectory.chosen[self.first] > step:
            for index in left:
                self._post(index, call_id, step)
            return []
        # The policy was running, or had not begun: an env that a replay can restore tries the step again.
        counts = in_policy or self._is_far  # otherwise the step had not begun
        failing = [index for index in left if not self.progress.tries_again(index, counts=counts)]
        for index in failing:
            self._post(index, call_id, step)
        # On another machine, an env may have run although its action has not arrived here, unless no action was chosen.
        return failing if in_policy or not self._is_far or self.trajectory.layout.action is None else []

    def _leave_to_rows(self, rows: ActorRows, call_id: int, raised: int, failure: Failure) -> None:
        """Complete a step in which an env raised in rows. Called under the lock."""
        step = self.progress.step
        self._post(raised, call_id, step)
        write_failure(self._slots, raised, failure)
        rows.arrive_for_others()
        self._queue(
            self.progress.repeat_ended([index for index in self.progress.left() if index != raised], step), step
        )

    def _post(self, index: int, call_id: int, step: int) -> None:
        """Set an env's row to the state of a step that was posted and has no result yet."""
        slots, slot = self._slots, self._slots.of[index]
        self._own(index, step)
        slot.seed = next_seed(slots, index, slot.incarnation)
        bits = slots.halves[index] ^ HALF
        bits |= RESET_BIT if slots.ended[index] else 0
        slots.ops[index] = bits | (SEED if slot.seed is not None else 0)
        # The shared number as well: a worker runs every row whose two numbers differ.
        slots.slab.posted[index] = slots.numbers_of[index] = call_id
        slots.states[index] = POSTED

    def _own(self, index: int, step: int) -> None:
        """Prepare a step in a row: its future and its action."""
        slots = self._slots
        future = self._books.make_future(index)
        payload = None
        # Until the spec of actions is learned, a step can only fail.
        if slots.slab.layout.action is None and self.trajectory.layout.action is not None:
            payload = make_payload(self.trajectory.action(step, index), pickles=slots.pickles)
        for array, chosen in zip(slots.slab.actions, self.trajectory.actions, strict=False):
            array[index] = chosen[step, index]
        slots.of[index].op = Op("step", future=future, payload=payload)
        self._in_rows[index] = step, future

    def _queue(self, indices: list[int], step: int) -> None:
        """Queue steps in rows. Called under the lock."""
        for index in indices:
            self._own(index, step)
            self._slots.states[index] = ASKED
        if indices:
            self.supervisor.calls.queue(Group(list(indices)))

    def _go_on(self) -> None:
        """Wait for the steps in rows, then send the next order or end."""
        ended = self.request
        waiting = [future for _, future in tuple(self._in_rows.values()) if not future.settled()]
        if waiting:
            waiting[0].add_done_callback(lambda _: None if self.has_gone_on(ended) else self._go_on())
            return
        for index, (step, future) in tuple(self._in_rows.items()):
            if self.progress.counted[index] == step:  # else an interrupt came just after that
                self._take(index, step, future)
            self._in_rows.pop(index, None)
        step = self.progress.step
        if self.errors or step >= self._steps:
            self._on_end(self)
            return
        # Their step fails, in rows, once the policy has chosen actions for all envs.
        left = self.progress.left() if self.trajectory.chosen[self.first] > step else []
        core = self.supervisor.core
        with core.change, core.lock:
            # Nothing runs what a closed actor has queued; its next order fails instead.
            lost = [] if core.closing else [index for index in self._lost() if index in left]
            self._queue(lost, step)
        if lost:
            self._go_on()
        else:
            self.ask()

    def _lost(self) -> list[int]:
        """Return the envs whose next step fails because their process has ended and nothing restores them."""
        rows, is_bound = self.supervisor.calls.rows, self._slots.is_bound
        lost = [] if rows is None else [index for index in self._envs if rows.is_lost(index) and is_bound(index)]
        return [index for index in lost if not self.progress.repeats(index)]

    def _take(self, index: int, step: int, future: ActorFuture) -> None:
        """Write the result of a step in a row into the trajectory."""
        slots, trajectory = self._slots, self.trajectory
        slots.states[index] = ROLLING
        error = future.exception()
        if error is not None:
            self.errors[index] = error
            self.failures[step, index] = error
            return
        result = future.result()
        self.progress.write_observation(step + 1, index, result.obs)
        trajectory.rewards[step, index] = result.reward
        trajectory.terminated[step, index] = result.terminated
        trajectory.truncated[step, index] = result.truncated
        over = bool(result.terminated or result.truncated)
        # With autoreset within the step, the next process may have completed the reset in a separate row.
        was_reset = bool(slots.ops[index] & RESET_BIT) and not over
        failure = failure_in(result.info)
        op = TRUNCATED if failure is not None else RESET if was_reset else STEP
        if not is_empty(result.info):
            self.infos[step, index] = result.info
        if failure is not None:
            self.failures[step, index] = failure
        self.progress.complete(index, op, starts=was_reset or (over and slots.autoreset == "same_step"))


def _errors_of_lost(slots: Slots, envs: range, lost: dict[int, BaseException]) -> dict[int, BaseException]:
    """Return the errors of envs that lost their episode in an earlier rollout; only the user can reset them."""
    waiting = [index for index in envs if slots.of[index].needs_reset and slots.of[index].holds == NO_EPISODE]
    return {index: lost[index] for index in waiting if index in lost}
