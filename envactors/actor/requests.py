"""The requests of one actor: the running call and the waiting ones, in order. No processes, no clock."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, Literal

from envactors.actor.future import ActorFuture
from envactors.actor.reactor import Reactor
from envactors.mailbox.control_page import METHOD_CALL, METHOD_POLICY, METHOD_RESET, METHOD_STEP, ControlPage
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import dumps
from envactors.options import Deadlines

# The payload of a request without arguments.
NO_ARGUMENTS: Final = dumps(())
_METHOD_NAMES = {METHOD_CALL: "call", METHOD_STEP: "step", METHOD_RESET: "reset", METHOD_POLICY: "policy"}


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request to a worker, as far as errors describe it.

    Attributes:
        method: What is called, for errors and deadlines.
        index: The index of the env that is called, for errors.
        timeout: Its deadline in seconds, None for none.
        call_id: Its number; 0 before it has one.
        started: When it was last sent (`time.monotonic`), 0 if it never was.
    """

    method: str
    index: int
    timeout: float | None = None
    call_id: int = dataclasses.field(default=0, kw_only=True)
    started: float = dataclasses.field(default=0.0, kw_only=True)


@dataclasses.dataclass(slots=True, eq=False)
class CallRequest(Request):
    """One call.

    Attributes:
        future: Waits for it; None if none does.
        retries: How many crashes and deadlines it still survives.
        bound: The only incarnation that may run it; None for any.
        kind: The kind of its frame; None for a renewal, which sends a CLOSE.
        payload: The pickled message.
        age: The older, the lower; 0 for what goes before all others. Only of actors that need permits.
        is_call: Tells it from a `Group`.
    """

    future: ActorFuture | None = None
    retries: int = 0
    bound: int | None = None
    kind: Kind | None = None
    payload: bytes | bytearray = NO_ARGUMENTS
    age: int = 0
    is_call: ClassVar[Literal[True]] = True

    @property
    def needs_permit(self) -> bool:
        """Whether an env steps or resets in it."""
        # Adapters of drop-ins step and reset in methods with this prefix.
        return self.kind == Kind.REPLAY or self.method.removeprefix("envactors_") in ("step", "reset")

    @property
    def is_stepwise(self) -> bool:
        """Whether its steps and resets have deadlines one by one, by the progress that the worker records."""
        return self.kind == Kind.REPLAY

    def prepare(self, incarnation: int) -> None:
        """Do what is to be done just before it is sent to a process; under the lock."""

    def on_reply(self, frame: Frame) -> None:
        """Take its reply into account, before the process can be replaced; under the lock."""

    def add_part(self, number: int, content: memoryview) -> None:
        """Keep a part of its result, which has come before the end; under the lock."""

    def hand_over(self, rows: Any, process: Any) -> list[int]:
        """Have rows finish what it ran when its process ended; called under the lock.

        Returns:
            The envs that had begun, if rows do not say so themselves.
        """
        del rows, process
        return []

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        """Hand out the outcome; runs without the actor's lock, and may run twice."""
        if self.future is not None:
            self.future.settle(value, error, incarnation)

    def arrive(self, settle: Callable[[], None], reactor: Reactor) -> None:
        """Have ``settle`` read and deliver the outcome in a thread where that may take long."""
        if self.future is not None:
            self.future.arrive(settle)
        else:
            reactor.callbacks.submit(settle)

    def turn(self, page: ControlPage, deadlines: Deadlines) -> Request:
        """Return the part of it that the worker is running; itself if it has no parts."""
        if not self.is_stepwise:
            return self
        progress = page.progress()
        has_begun = progress.call_id == self.call_id
        method, since = (_METHOD_NAMES[progress.method], progress.since) if has_begun else ("step", self.started)
        return Request(method, self.index, deadlines.of(method), started=since)

    def on_overdue(self, turn: Request, page: ControlPage) -> None:
        """Note that its running part has passed the deadline; under the lock."""
        del page
        self.timeout: float | None = turn.timeout


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """Envs of one actor that wait to be posted together.

    Attributes:
        indices: Their indices.
        age: See `CallRequest`.
    """

    indices: list[int]
    age: int = 0
    needs_permit: ClassVar[bool] = True
    is_call: ClassVar[Literal[False]] = False


Entry = CallRequest | Group


@dataclasses.dataclass(slots=True)
class CallIds:
    """The call ids of some actors with one lock.

    Attributes:
        last: The call id that was given last, to a call or to rows.
    """

    last: int = 0


def shortest_deadline(deadlines: Deadlines) -> float:
    """Return the shortest deadline of a step, reset, call, or policy, in seconds; infinity if there is none."""
    limits = (deadlines.of(method) for method in _METHOD_NAMES.values())
    return min((limit for limit in limits if limit is not None), default=float("inf"))


class RequestTable:
    """The running call and the waiting requests, in order.

    Args:
        ids: Where its call ids come from.

    Attributes:
        ids: The same.
        running: The call that the worker was sent and has not answered; None if there is none.
        queue: The waiting requests, the next one first.
    """

    def __init__(self, ids: CallIds) -> None:
        self.ids = ids
        self.running: CallRequest | None = None
        self.queue: deque[Entry] = deque()

    def add(self, entry: Entry, *, at_front: bool = False) -> None:
        """Queue an entry; a call gets its number."""
        if entry.is_call:
            self.ids.last += 1
            entry.call_id = self.ids.last
        (self.queue.appendleft if at_front else self.queue.append)(entry)

    def start_call(self, call: CallRequest) -> CallRequest:
        """Mark the call at the head of the queue as running and take it out."""
        # Running before it leaves the queue: an interrupt in between leaves it in both, never in none.
        self.running = call
        self.queue.popleft()
        if call.future is not None:
            call.future.mark_running()
        return call

    def runs(self, future: ActorFuture) -> bool:
        """Return whether the running call is that of a future."""
        return self.running is not None and self.running.future is future

    def interrupt(self) -> CallRequest | None:
        """Take out the call that runs."""
        running, self.running = self.running, None
        if running is not None and self.queue and self.queue[0] is running:
            self.queue.popleft()
        return running

    def groups(self) -> Iterator[Group]:
        """Yield the groups of envs that wait, without those that are left without envs."""
        for entry in tuple(self.queue):
            if not entry.is_call:
                yield entry
                if not entry.indices:
                    self.queue.remove(entry)

    def withdraw(self, future: ActorFuture) -> CallRequest | None:
        """Take out the call of a future, if it waits."""
        return next(iter(self.withdraw_calls(lambda call: call.future is future)), None)

    def withdraw_calls(self, unwanted: Callable[[CallRequest], bool]) -> list[CallRequest]:
        """Take out all calls of a kind that wait."""
        taken = [entry for entry in self.queue if entry.is_call and unwanted(entry)]
        for call in taken:
            self.queue.remove(call)
        return taken
