"""Requests that rollouts send to workers: to make the policy, and to carry out an order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from envactors.actor.requests import CallRequest, Request
from envactors.actor.supervisor import Supervisor
from envactors.mailbox.control_page import METHOD_POLICY, ControlPage
from envactors.mailbox.messages import Extend, Frame, Kind
from envactors.mailbox.pickling import dumps, loads
from envactors.options import Deadlines
from envactors.rollout import runner
from envactors.rollout.orders import Order, Stop

if TYPE_CHECKING:
    from envactors.actor.process import ActorProcess
    from envactors.actor.rows import ActorRows


class Policy(NamedTuple):
    """A policy as its workers receive it.

    Attributes:
        number: Its id within the vector.
        pickled: The pickled function that makes it.
        seed: Its seed.
    """

    number: int
    pickled: bytes
    seed: int


class PolicyRequest(CallRequest):
    """Requests that a worker makes the policy.

    Args:
        supervisor: The actor.
        policy: The policy.
        then: Called with whether the policy can load parameters, and with the error or None; it may be called twice.
    """

    def __init__(
        self, supervisor: Supervisor, policy: Policy, then: Callable[[bool, BaseException | None], None]
    ) -> None:
        config = supervisor.config
        super().__init__("set_policy", config.first_index, config.deadlines.start, kind=Kind.EXTEND)
        message = Extend(runner.set_policy, tuple(policy))
        self.payload: bytes | bytearray = dumps(tuple(message))
        self._then = then

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        del incarnation
        self._then(bool(value), error)


class OrderGiver(Protocol):
    """The part of a rollout that an order belongs to. The methods before `has_gone_on` are called under the lock.

    Attributes:
        first: Index of the actor's first env.
    """

    first: int

    def order(self, incarnation: int) -> Order:
        """Return the next order."""

    def add_part(self, number: int, content: memoryview) -> None:
        """Accept a part of the reply: an info that did not fit into the trajectory, or columns of the trajectory."""

    def be_late(self, position: int, *, in_policy: bool) -> None:
        """Record the progress of the worker, because a deadline has passed."""

    def hand_over(self, rows: ActorRows, call_id: int, *, in_policy: bool) -> list[int]:
        """Complete the step of a process that has ended in rows.

        Returns:
            Envs that fail with the policy; empty if an env was running.
        """

    def on_reply(self, stop: Stop | None, call_id: int) -> None:
        """Count what an order has done; ``stop`` is None if its reply is an error."""

    def has_gone_on(self, ended: CallRequest | None) -> bool:
        """Return whether there is a request after one that has ended; send it if an interrupt came before that."""

    def on_end(self, stop: Stop | None, error: BaseException | None, *, was_lost: bool) -> None:
        """Continue after an order has ended; also called again after an interrupt."""


class OrderRequest(CallRequest):
    """An order to a worker.

    Args:
        part: Part of the rollout that the order belongs to.
    """

    def __init__(self, part: OrderGiver) -> None:
        super().__init__("rollout", part.first, kind=Kind.EXTEND)
        self._part = part
        # Whether the process ended while it ran the order, so that the step is completed in rows.
        self._was_lost = False

    @property
    def is_stepwise(self) -> bool:
        return True

    @property
    def needs_permit(self) -> bool:
        return True

    def prepare(self, incarnation: int) -> None:
        self.timeout: None = None
        self.payload: bytes | bytearray = dumps((runner.run_rollout, tuple(self._part.order(incarnation))))

    def turn(self, page: ControlPage, deadlines: Deadlines) -> Request:
        turn, progress = super().turn(page, deadlines), page.progress()
        if progress.call_id == self.call_id:
            turn.index += progress.position
        return turn

    def on_overdue(self, turn: Request, page: ControlPage) -> None:
        super().on_overdue(turn, page)
        in_policy = self._note_policy(page)  # now, since it may return before the process ends
        self._part.be_late(page.progress().position, in_policy=in_policy)

    def add_part(self, number: int, content: memoryview) -> None:
        self._part.add_part(number, content)

    def on_reply(self, frame: Frame) -> None:
        stop = None
        if frame.kind != Kind.FAILED:
            stop = Stop(*(frame.payload if isinstance(frame.payload, tuple) else loads(frame.payload)))
        self._part.on_reply(stop, self.call_id)

    def hand_over(self, rows: ActorRows, process: ActorProcess) -> list[int]:
        self._was_lost = True
        return self._part.hand_over(rows, self.call_id, in_policy=self._note_policy(process.page))

    def _note_policy(self, page: ControlPage) -> bool:
        """Return whether the worker is running the policy; then errors say so."""
        progress = page.progress()
        in_policy = progress.method == METHOD_POLICY and progress.call_id == self.call_id
        if in_policy:
            self.method = "policy"
        return in_policy

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        del incarnation
        if not self._part.has_gone_on(self):
            has_stop = value is not None and not self._was_lost
            self._part.on_end(Stop(*value) if has_stop else None, error, was_lost=self._was_lost)
