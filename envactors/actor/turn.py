"""A step of several envs of one actor, asked through shared memory: one request, whose parts may fare differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envactors.actor.requests import Request
from envactors.arrays.slab import NOTED, Slab
from envactors.options import Deadlines
from envactors.wire import bundle
from envactors.wire.board import BEGUN, FINISHED, MAILED, PLACE, RESETTING, SINCE, Board
from envactors.wire.messages import Frame, Kind


class Turn:
    """A turn of an actor's envs. The parent asks for it while the actor is idle, so it never waits in a queue.

    Once it is over, and nothing was lost, it may be taken again.

    Args:
        slab: Where it stands what is asked, and what comes of it.
        board: What the actor shares with the process that holds the envs' episodes.
        envs: The indices of the envs that step, in the order of their places in the actor.
        first: The index of the actor's first env.
        bound: The incarnation that holds their episodes.
        one_by_one: Whether each result is of use before the others are there.
        waiter: Whom `envactors.actor.reactor.Reactor.wake` wakes when something has changed.
        lose: A weak reference to what makes the request that stands for an env whose step was lost, from its index;
            where that is gone, nobody waits any more.

    Attributes:
        call_id: Its number, from when it was started.
        started: When that was (`time.monotonic`).
        over: Whether it is not under way any more.
        lost: The envs that were lost with the process, once it is over.
        given: The envs whose results count as there, whatever comes.
        mail: What came besides, by env.
        overdue: The env that has passed its deadline, for which its process is ended.
        rung: Whether the worker was woken for it, or had begun by itself.
    """

    __slots__ = (
        "_asked",
        "_lose",
        "board",
        "bound",
        "call_id",
        "envs",
        "first",
        "given",
        "lost",
        "mail",
        "one_by_one",
        "over",
        "overdue",
        "rung",
        "slab",
        "started",
        "waiter",
    )

    def __init__(
        self,
        slab: Slab,
        board: Board,
        envs: Sequence[int],
        first: int,
        bound: int,
        one_by_one: bool,
        waiter: object,
        lose: Callable[[], Callable[[int], Request] | None],
    ) -> None:
        self.slab = slab
        self.board = board
        self.envs = envs
        self.first = first
        self.bound = bound
        self.one_by_one = one_by_one
        self.waiter = waiter
        self._lose = lose
        self._asked = slab.asked.data
        self.overdue: int | None = None
        self.call_id = 0
        self.started = 0.0
        self.rung = False
        self.over = False
        self.lost: Sequence[int] = ()
        self.given: set[int] = set()
        self.mail: dict[int, Frame] = {}

    def begin(self, call_id: int, now: float) -> None:
        """Makes it a turn that is under way; under the actor's lock.

        Only here are the envs' numbers raised: one that is raised while a turn before this one still counts as running
        would make its result look as if it had never come, should the process be lost at that moment.
        """
        asked = self._asked
        for index in self.envs:
            asked[index] += 1
        self.call_id = call_id
        self.started = now
        self.over = False
        if self.mail:
            self.mail = {}
        if self.given:
            self.given = set()

    def order(self, wait: int) -> None:
        """Asks the worker for it; under the actor's lock, so that the bell is open.

        Where both sides look for each other, `ring` is to follow.

        Args:
            wait: How the worker is to wait for what comes after it, as `envactors.wire.board` says.
        """
        self.rung = self.board.order(self.call_id, wait, self.one_by_one)

    def ring(self) -> None:
        """Rings for it if the worker has not begun it."""
        self.board.ring_for(self.call_id)
        self.rung = True

    @property
    def finished(self) -> bool:
        """Whether the worker has run all of it; what came besides may still be on the way."""
        return self.board.words[FINISHED] == self.call_id

    def take(self, frame: Frame) -> None:
        """Takes in what came besides a result."""
        for index, payload in bundle.unpack(frame.payload):
            self.mail[index] = frame._replace(payload=payload)

    def read(self, index: int) -> Frame:
        """What an env's result came with, besides arrays."""
        slab = self.slab
        if slab.extras[index] != NOTED:
            return self.mail[index]
        return Frame(Kind.RESULT, self.bound, self.call_id, slab.note(index))

    def complete(self, index: int) -> bool:
        """Whether an env's result is there as a whole."""
        if index == self.overdue:
            return False  # from its deadline on nothing of it counts
        slab = self.slab
        return bool(slab.done[index] == slab.asked[index] and (slab.extras[index] <= NOTED or index in self.mail))

    def awaits_mail(self) -> bool:
        """Whether something was sent besides results and is not taken in yet."""
        words = self.board.words
        return words[MAILED] > len(self.mail) and words[BEGUN] == self.call_id

    def later(self, deadlines: Deadlines, now: float) -> float | None:
        """When to look at its deadline again; None when the env that runs has passed its own.

        The time of a turn that was not rung for yet begins here.
        """
        words, times = self.board.words, self.board.times
        while True:
            since = times[SINCE]
            begun, index = words[BEGUN] == self.call_id, self.first + words[PLACE]
            resetting = bool(words[RESETTING])
            if times[SINCE] == since:
                break
        if not begun:
            if not self.rung:  # its caller was stopped, or broke off, before it could: the time runs from here
                self.ring()
                self.started = now
            since, index, resetting = self.started, self.envs[0], False
        limit = deadlines.of("reset" if resetting or self.slab.what[index] else "step")
        when = now + self.first_look(deadlines) if limit is None else since + limit
        if when > now:
            return when
        self.overdue = index
        if self.finished:
            # In this order, and who gathers without the actor's lock in the opposite one: either they see that it is
            # overdue, or it is seen here that they may have handed it out.
            self.overdue = None
            return now
        return None

    @staticmethod
    def first_look(deadlines: Deadlines) -> float:
        """How long to wait before the first look at its deadline, in seconds; infinite where there is none."""
        limits = (deadlines.of("step"), deadlines.of("reset"))
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def method(self, index: int) -> str:
        """What an env was asked for."""
        return "reset" if self.slab.what[index] else "step"

    def split(self, deadlines: Deadlines) -> list[Request]:
        """Ends the turn with its process: gives a request for each env that was lost, the one that ran first.

        The others have not begun (``started`` is 0). What is asked of a lost env is taken back, so that the row with
        its last complete observation stays as it is.
        """
        words, slab = self.board.words, self.slab
        begun = words[BEGUN] == self.call_id
        lost = [index for index in self.envs if index not in self.given and not self.complete(index)]
        running = self.overdue
        if running is None and begun and words[FINISHED] != self.call_id:
            running = self.first + words[PLACE]
        lost.sort(key=lambda index: index != running)
        lose = self._lose()
        parts = [] if lose is None else [lose(index) for index in lost]
        for request in parts:
            request.call_id = self.call_id
            if request.index == running:
                request.started = self.board.times[SINCE] if begun else self.started
                if begun and words[RESETTING]:
                    request.method = "reset"
            request.timeout = deadlines.of(request.method)
        for index in lost:
            if slab.done[index] == slab.asked[index]:
                slab.done[index] -= 1  # came too late; its writer is dead
            slab.asked[index] = slab.done[index]
        self.lost = lost
        self.over = True
        return parts
