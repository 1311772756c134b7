"""The rows of one actor's envs: posted to its worker, complete again, or lost with its process.

Everything here but `ActorRows.post_at_once` runs under the actor's lock, and is on the way of each step: it makes few
calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from envactors.actor.requests import Group, Request
from envactors.actor.slots import ARRIVED, ASKED, LOST, POSTED, READING, Op, Outcome, Slots
from envactors.actor.states import LIVE
from envactors.mailbox import bundle
from envactors.mailbox.control_page import ASLEEP, FINISHED, METHOD_RESET, OVERFLOWS
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.slab import HALF, RESET
from envactors.system.polling import READABLE

if TYPE_CHECKING:
    from envactors.actor.core import ActorCore
    from envactors.actor.future import ActorFuture


class ActorRows:
    """The rows of one actor.

    Args:
        core: The actor's state.
        slots: All envs of the vector.
        waiter: What `Reactor.wake` is given when an outcome is there.
        receive: Reads what has come through the channel; returns False if nothing had.
        read: Reads an outcome that a future waits for, and settles the future.

    Attributes:
        first, stop: The range of its envs.
        indices: That range.
        last: The number of the last post.
        posted_at: When rows were posted while none was in flight (`time.monotonic`).
    """

    def __init__(
        self,
        core: ActorCore,
        slots: Slots,
        waiter: object,
        receive: Callable[[int], bool],
        read: Callable[[int, Op], None],
    ) -> None:
        self.core = core
        self.slots = slots
        self.waiter = waiter
        self._receive = receive
        self._read = read
        first = core.config.first_index
        self.first: int = first
        stop = first + len(core.config.start.factories)
        self.stop: int = stop
        self.posted_at: float = 0.0
        self.last: int = 0
        # The env that has passed its deadline: from then on no result of it counts.
        self.overdue: int | None = None
        slab = slots.slab
        self._posted = slab.posted.data
        self._completed = slab.completed.data
        self._numbers = slots.numbers_of
        # Compared as a whole in a fifth of the time that single numbers take.
        self._range_numbers = slots.numbers.data[first:stop]
        self._range_completed = slab.completed.data[first:stop]
        self.indices: range = range(first, stop)

    # Posting ---------------------------------------------------------------------------------------------

    def post_at_once(self, indices: Sequence[int], now: float, wait: int, *, stream: bool) -> bool:
        """Post envs if the worker is free for them and none is out of the ordinary; return whether that was so.

        Called without the lock, with signals deferred.

        Args:
            indices: The envs.
            now: The time (`time.monotonic`).
            wait: How the worker waits for the next request.
            stream: Whether the caller takes each result as soon as it is there.
        """
        core, slots, table = self.core, self.slots, self.core.table
        try:
            with core.lock:
                is_free = core.phase is LIVE and not core.closing and core.permits is None and not table.queue
                if core.process is None or not is_free or table.running is not None:
                    return False
                if slots.unusual and not slots.unusual.isdisjoint(indices):
                    return False
                self.post(indices, now, wait, stream=stream)
        except BaseException:
            core.kill_inconsistent()
            raise
        return True

    def post(self, indices: Sequence[int], now: float, wait: int, *, stream: bool) -> None:
        """Post envs whose rows have their actions; nothing else runs or waits. For the arguments see `post_at_once`.

        The private number comes first: from then on the row is not complete, whatever interrupts this.
        """
        core, slots, process = self.core, self.slots, self.core.process
        assert process is not None, "a live actor has a process"
        core.table.ids.last = number = core.table.ids.last + 1
        if not self.is_in_flight():
            self.posted_at = now
        if "call" not in core.timers.when:
            core.watch(now)
        self.last = number
        payloads = []
        watches = False
        for index in indices:
            self._numbers[index] = number
            slots.states[index] = POSTED
            if slots.overflow:
                slots.overflow.pop(index, None)
            slots.streams[index] = stream
            slots.of[index].incarnation = core.incarnation
            payload = slots.plan(index, core.incarnation)
            if payload is not None:
                payloads.append((index - self.first, payload))
            slots.posted_ops[index] = slots.ops[index]
            op = slots.of[index].op
            if op is not None and op.future is not None:
                op.future.mark_running()
                watches = True
        if watches:
            process.watch_doorbell(self._on_ring)
        if payloads:
            packed = bundle.pack(payloads) if slots.pickles else payloads
            process.send(Frame(Kind.PAYLOADS, core.incarnation, number, packed), wait)
        for index in indices:
            self._posted[index] = number
        process.page.post_step(number, wait, stream, indices)

    def post_waiting(self, group: Group) -> None:
        """Post envs that have waited, and wake who waits for them, to listen to this process."""
        indices = [index for index in group.indices if self.is_asked(index)]
        self.post(indices, time.monotonic(), ASLEEP, stream=True)
        self.core.reactor.wake(self.waiter)

    def is_in_flight(self) -> bool:
        """Return whether the worker has rows that it has not completed."""
        return POSTED in self.slots.states[self.first : self.stop] and self._range_numbers != self._range_completed

    def has_posted(self) -> bool:
        """Return whether there are rows whose results were not taken into account, complete or not."""
        return POSTED in self.slots.states[self.first : self.stop]

    def posted(self) -> list[int]:
        """Return the envs whose rows are posted and were not taken into account."""
        return [index for index in self.indices if self.slots.states[index] == POSTED]

    def is_asked(self, index: int) -> bool:
        """Return whether an env waits to be posted."""
        return self.slots.states[index] == ASKED

    def is_lost(self, index: int) -> bool:
        """Return whether the process that held an env's episode has ended, and nobody was told of it."""
        return self.slots.of[index].holds == LOST

    def has_strayed(self, index: int) -> bool:
        """Return whether an env is not where its journal ends: it was lost, or has raised, and nobody was told."""
        has_raised = self.slots.states[index] in (ARRIVED, READING) and self.slots.infos.failed(index)
        return has_raised or self.is_lost(index)

    def withdraw(self, future: ActorFuture) -> Request | None:
        """Take out the request of a future, if it waits to be posted; its env is idle then."""
        index = self.index_of(future, ASKED)
        if index is None:
            return None
        for group in self.core.table.groups():
            if index in group.indices:
                group.indices.remove(index)
        self.slots.make_idle(index)
        return self.request(index)

    def index_of(self, future: ActorFuture, state: int) -> int | None:
        """Return the env whose request a future waits for, if it is in some state."""
        for slot in self.slots.of[self.first : self.stop]:
            if slot.op is not None and slot.op.future is future and self.slots.states[slot.index] == state:
                return slot.index
        return None

    def watch_end(self) -> None:
        """Have the end of the rows noticed, since others wait for it."""
        process = self.core.process
        if process is not None:
            process.watch_doorbell(self._on_ring)
            process.page.ring_at_end(self.last)
            self.arrive_for_others()  # they may have ended before

    # Outcomes --------------------------------------------------------------------------------------------

    def is_complete(self, index: int) -> bool:
        """Return whether a posted env's result is there as a whole, before its deadline."""
        return (
            self._completed[index] == self._numbers[index]
            and index != self.overdue
            and (index in self.slots.overflow or not self.slots.infos.needs_overflow(index))
        )

    def arrive(self) -> None:
        """Take the results that are complete into account."""
        core, slots, process = self.core, self.slots, self.core.process
        states = slots.states
        if process is None or core.phase is not LIVE or not self.has_posted():
            return
        counters = process.page.counters
        finished = counters[FINISHED]  # read before the other counters, and once: env code may overwrite it
        if counters[OVERFLOWS] != process.overflows and not self._fetch_overflow():
            return
        for index in self.indices:
            if states[index] == POSTED:
                if self.is_complete(index):
                    self.take(index)
                elif finished > process.page.last_call or finished >= self._numbers[index]:
                    process.distrust(f"it says that call {finished} has finished")
                    return
        if not self.has_posted():
            self._end()

    def arrive_for_others(self) -> None:
        """Take results into account that another thread may wait for."""
        self.arrive()
        self.core.reactor.wake(self.waiter)

    def take(self, index: int) -> None:
        """Take a complete result into account; it is to be read."""
        core, slots = self.core, self.slots
        slot, bits = slots.of[index], slots.ops[index]
        core.completed += 1
        if not slots.infos.failed(index):
            slots.halves[index] = bits & HALF
            slot.holds = slot.incarnation
            if bits & RESET:
                slot.fresh = False
            if core.recovery.replays:
                core.recovery.journal(index).record_row(slots, index)
        self.settle(index)

    def settle(self, index: int, outcome: Outcome | None = None) -> None:
        """Note that the outcome of an env is there: the result in its row, or ``outcome``."""
        slots, op = self.slots, self.slots.of[index].op
        if outcome is not None:
            slots.outcomes[index] = outcome
        slots.states[index] = ARRIVED
        if outcome is not None:
            self.core.reactor.wake(self.waiter)  # not before: a thread looks at the state without the lock
        if op is not None and op.future is not None:
            read = functools.partial(self._read, index, op)
            # In process a call has run when its future is returned.
            arrive = read if self.core.config.backend.inline else functools.partial(op.future.arrive, read)
            self.core.deferred.waiting.append(arrive)

    def _end(self) -> None:
        """Act on the end of all rows."""
        core, process = self.core, self.core.process
        if process is not None and process.on_ring is not None and core.permits is None:
            process.watch_doorbell(None)
        core.on_idle()

    def _on_ring(self) -> None:
        core = self.core
        with core.change, core.lock:
            self.arrive_for_others()

    def _fetch_overflow(self) -> bool:
        """Read what came beside the rows that are complete: it was sent before them.

        Returns:
            False if it did not come; then the process is killed.
        """
        core, process = self.core, self.core.process
        while core.phase is LIVE and process is not None and process.page.counters[OVERFLOWS] > process.overflows:
            if not self._receive(READABLE):
                process.distrust(f"it says that {process.page.counters[OVERFLOWS]} results came in frames")
                return False
        return True

    def on_overflow(self, frame: Frame) -> None:
        """Keep what came beside the rows."""
        for index, payload in bundle.unpack(frame.payload):
            if self.core.process is not None:
                self.core.process.overflows += 1
            if self.first <= index < self.stop:
                self.slots.overflow[index] = payload

    # What a process that has ended leaves ----------------------------------------------------------------

    def keep_complete(self) -> None:
        """Take the results into account that an ended process has completed."""
        for slot in self.slots.of[self.first : self.stop]:
            future = None if slot.op is None else slot.op.future
            if future is not None and self.slots.states[slot.index] == ARRIVED and not future.is_being_read:
                self.settle(slot.index)  # an interrupt has kept it from being read
        for index in self.posted():
            if self.is_complete(index):
                self.take(index)

    def on_brought_back(self, index: int) -> None:
        """Note that an env was brought to where it was, if its journal says so."""
        core, slot = self.core, self.slots.of[index]
        if not core.recovery.replays or core.recovery.journal(index).whole:
            slot.holds = core.incarnation  # not the process of its last result, which may still be read
            slot.fresh = False

    def request(self, index: int) -> Request:
        """Return the request of an env, for errors."""
        slots = self.slots
        # What its row says is of the request before, if it waits to be posted.
        bits, op = 0 if self.is_asked(index) else slots.ops[index], slots.of[index].op
        method = "reset" if bits & RESET or (op is not None and op.method == "reset") else "step"
        started = 0.0
        process = self.core.process
        if process is not None and self.running() == index:
            progress = process.page.progress()
            started = progress.since
            method = "reset" if progress.method == METHOD_RESET else method
        elif index == self.overdue:
            started = self.posted_at
        timeout = self.core.config.deadlines.of(method)
        return Request(method, index, timeout, call_id=int(self._numbers[index]), started=started)

    # Deadlines -------------------------------------------------------------------------------------------

    def running(self) -> int | None:
        """Return the env whose request runs now, None if none does."""
        process = self.core.process
        if process is None:
            return None
        progress = process.page.progress()
        index = self.first + progress.position
        if not self.first <= index < self.stop or self.slots.states[index] != POSTED:
            return None
        runs = progress.call_id == self._numbers[index] and self._completed[index] != progress.call_id
        return index if runs else None
