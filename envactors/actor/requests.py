"""The requests of one actor: which run, which wait, in which order. No processes, no clock."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from envactors.actor.future import ActorFuture
from envactors.actor.reactor import Reactor
from envactors.options import Deadlines
from envactors.wire.control_page import METHOD_CALL, METHOD_RESET, METHOD_STEP, NOT_BEGUN, ControlPage
from envactors.wire.messages import Frame, Kind
from envactors.wire.pickling import dumps

# The payload of a request that says it all with its kind.
NO_ARGUMENTS: Final = dumps(())
_METHOD_NAMES = {METHOD_CALL: "call", METHOD_STEP: "step", METHOD_RESET: "reset"}


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """What one future, or one env's step, asks of a worker; it ends with one outcome.

    Attributes:
        method: What is called, for errors and deadlines.
        index: The index of the env that is called, for errors.
        timeout: Its deadline in seconds, None for none.
        future: Waits for it; None if none does.
        retries: How many deaths and deadlines it still survives.
        bound: The only incarnation that may run it; None for any.
        call_id: Its number, or that of the batch step it is part of; 0 before it has one.
        started: When it was last sent (`time.monotonic`), 0 if it never was.
    """

    method: str
    index: int
    timeout: float | None = None
    future: ActorFuture | None = None
    retries: int = 0
    bound: int | None = None
    call_id: int = 0
    started: float = 0.0

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        """Hand out the outcome; runs without the actor's lock, and may run twice."""
        if self.future is not None:
            self.future.settle(value, error, incarnation)

    def arrive(self, settle: Callable[[], None], reactor: Reactor) -> None:
        """Have its outcome read and handed out in a thread where that may take long.

        Args:
            settle: Does so.
            reactor: Has such threads.
        """
        if self.future is not None:
            self.future.arrive(settle)
        else:
            reactor.callbacks.submit(settle)


class Answer(NamedTuple):
    """The end of one request, as the worker sent it: what `ErrorFactory.outcome` reads.

    Attributes:
        request: The request.
        failed: Whether ``content`` is a `Failure`.
        content: Pickled, or a tuple from a worker of the same process.
        check: The checksum over the env's observations after a step, where it is kept.
        reset_within: Whether a step has ended an episode and reset the env.
    """

    request: Request
    failed: bool
    content: Any
    check: int = 0
    reset_within: bool = False


class Entry(Protocol):
    """What the table holds: one call, or a batch step of several envs."""

    call_id: int
    started: float
    # Of those that need a permit: the older, the lower; 0 for what goes before all others. See `LimitedTable`.
    number: int

    @property
    def timeout(self) -> float | None:
        """Its deadline in seconds; None if it has none, or each env has its own."""

    @property
    def parts(self) -> Sequence[Request]:
        """The requests in it that have not ended."""

    @property
    def pipelines(self) -> bool:
        """Whether it may be posted while another one that does runs."""

    @property
    def needs_permit(self) -> bool:
        """Whether an env steps or resets in it."""

    def answers(self, frame: Frame) -> tuple[list[Answer], bool]:
        """Return what a reply ends, and whether the entry ends with it."""

    def discard(self, answers: Sequence[Answer]) -> None:
        """Take out what a reply has ended; not before it was handed out, or an interrupt could lose it."""

    def next_look(self, page: ControlPage | None, deadlines: Deadlines, now: float) -> float | None:
        """Return when its deadline passes at the earliest (infinity for never), None if it has passed."""

    def split(self, page: ControlPage | None, *, blame: bool) -> tuple[Request | None, list[Request]]:
        """Take it apart after the end of its process.

        Args:
            page: The control page of that process.
            blame: Whether the process was ended for what it ran, begun or not.

        Returns:
            The request that was running, if one was, and those that had not begun.
        """

    def withdraw(self, future: ActorFuture) -> Request | None:
        """Take out the request of a future."""


@dataclasses.dataclass(slots=True, eq=False)
class CallRequest(Request):
    """One call.

    Attributes:
        kind: The kind of its frame; None for a renewal, which sends a CLOSE.
        payload: The pickled message.
        number: See `Entry`.
    """

    kind: Kind | None = None
    payload: bytes | bytearray = NO_ARGUMENTS
    number: int = 0
    pipelines: ClassVar[bool] = False

    @property
    def parts(self) -> Sequence[Request]:
        return (self,)

    @property
    def needs_permit(self) -> bool:
        # Adapters of drop-ins have methods of their own that do so.
        return self.kind == Kind.REPLAY or self.method.removeprefix("envactors_") in ("step", "reset")

    def answers(self, frame: Frame) -> tuple[list[Answer], bool]:
        return [Answer(self, frame.kind == Kind.FAILED, frame.payload)], True

    def discard(self, answers: Sequence[Answer]) -> None:
        del answers  # it ends as a whole

    def next_look(self, page: ControlPage | None, deadlines: Deadlines, now: float) -> float | None:
        if self.kind == Kind.REPLAY:
            when, method = next_look(self, page, deadlines, now)
            if when is None:
                self.timeout = deadlines.of(method)
            return when
        if self.timeout is None:
            return float("inf")
        when = self.started + self.timeout
        return when if when > now else None

    def split(self, page: ControlPage | None, *, blame: bool) -> tuple[Request | None, list[Request]]:
        if blame or self.kind is None or page is None or page.progress().call_id == self.call_id:
            return self, []
        return None, [self]

    def withdraw(self, future: ActorFuture) -> Request | None:
        return self if self.future is future else None


def next_look(entry: Entry, page: ControlPage | None, deadlines: Deadlines, now: float) -> tuple[float | None, str]:
    """Return when the deadline of what the worker is at passes, None if it has, and the method that it is at."""
    progress = NOT_BEGUN if page is None else page.progress()
    # A scan for one batch step also runs what was posted behind it.
    begun = progress.call_id >= entry.call_id if entry.pipelines else progress.call_id == entry.call_id
    method = _METHOD_NAMES[progress.method] if begun else "step"
    limit = deadlines.of(method)
    if limit is None:
        return now + first_look(deadlines), method
    when = (progress.since if begun else entry.started) + limit
    return (when if when > now else None), method


def first_look(deadlines: Deadlines) -> float:
    """Return the shortest deadline of a step, a reset or a call, in seconds; infinity if there is none."""
    limits = (deadlines.of(method) for method in _METHOD_NAMES.values())
    return min((limit for limit in limits if limit is not None), default=float("inf"))


class RequestTable:
    """What runs and what waits, in order.

    Attributes:
        is_limited: Whether entries need permits.
        running: What the worker was sent and has not ended, oldest first: one call, or any number of batch steps that
            pipeline.
        queue: What waits, next one first.
        last_id: The number of the entry that was numbered last.
    """

    is_limited: ClassVar[bool] = False

    def __init__(self) -> None:
        self.running: list[Entry] = []
        self.queue: deque[Entry] = deque()
        self.last_id = 0

    def add(self, entry: Entry, *, at_front: bool = False) -> None:
        """Number an entry and queue it."""
        self.last_id += 1
        entry.call_id = self.last_id
        for request in entry.parts:
            request.call_id = entry.call_id
        (self.queue.appendleft if at_front else self.queue.append)(entry)

    def start_next(self) -> Entry | None:
        """Mark the head of the queue as running and move it there; return None if there is none or it has to wait."""
        if not self.queue:
            return None
        entry = self.queue[0]
        if self.running and not (entry.pipelines and self.running[-1].pipelines):
            return None
        # Listed as running before it leaves the queue: an interrupt in between leaves it in both, never in none.
        self.running.append(entry)
        self.queue.popleft()
        for request in entry.parts:
            request.call_id = entry.call_id
            if request.future is not None:
                request.future.mark_running()
        return entry

    def end_running(self) -> None:
        """Act on the end of all that ran, if others wait for it; it is not listed any more."""

    def find_running(self, call_id: int) -> Entry | None:
        """Return the running entry with this number; None says that a reply is stale."""
        for entry in self.running:  # on the way of each reply, where a generator would take longer than all else here
            if entry.call_id == call_id:
                return entry
        return None

    def interrupt(self) -> list[Entry]:
        """Take out what runs, whatever it is."""
        running, self.running = self.running, []
        while running and self.queue and any(self.queue[0] is entry for entry in running):
            self.queue.popleft()
        return running

    def withdraw(self, future: ActorFuture, *, retry: bool = False) -> Request | None:
        """Take out the request of a future that waits and never ran, or with ``retry`` one that waits to run again."""
        if future.has_run is not retry:
            return None
        for entry in self.queue:
            if (request := entry.withdraw(future)) is not None:
                if entry.parts == (request,) or not entry.parts:
                    self.queue.remove(entry)
                return request
        return None

    def withdraw_all(self, unwanted: Callable[[Entry], bool]) -> list[Entry]:
        """Take out all entries of a kind that wait."""
        taken = [entry for entry in self.queue if unwanted(entry)]
        for entry in taken:
            self.queue.remove(entry)
        return taken
