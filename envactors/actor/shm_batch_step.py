"""The batch step in shared memory, and how those of one actor start and end.

Everything here is on the way of each step: it makes few calls, and takes the actor's lock twice per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from envactors.actor.batch_step import StepRequest
from envactors.actor.core import ActorCore
from envactors.actor.future import ActorFuture
from envactors.actor.journal import Journals
from envactors.actor.requests import Answer, Entry, Request, next_look
from envactors.actor.states import LIVE
from envactors.arrays.slab import Slab
from envactors.options import Deadlines
from envactors.system.polling import READABLE
from envactors.wire import bundle
from envactors.wire.control_page import FINISHED, METHOD_RESET, OVERFLOWS, ControlPage
from envactors.wire.info_codec import InfoReader
from envactors.wire.messages import Frame


class SharedMemoryBatchStep:
    """A batch step that travels through rows of shared memory; reused once it is over and nothing was lost.

    Args:
        rows: Where it is written what each env is asked, and what comes of it.
        infos: Reads what comes beside the arrays.
        page: The control page of the process that holds the envs' episodes.
        envs: The indices of the envs that step, ascending.
        first_index: The index of the actor's first env.
        bound: The incarnation that holds their episodes.
        stream: Whether each result is announced before the others are there.
        waiter: What `Reactor.wake` is given when something has changed.
        reissue: Returns the request that stands for an env whose step was lost, from its index; None once the vector
            is gone.

    Attributes:
        over: Whether it has ended: all results are in the rows, or its process has gone.
        failed_envs: The envs that were lost with the process.
        claimed: The envs whose results count, whatever becomes of the process.
        overflow: What came beside the rows, by env: an info that did not fit, or a failure.
        asked_rows, completed_rows: The numbers of all rows from the first env to the last, which are compared as a
            whole in a fifth of the time.
    """

    pipelines = True
    needs_permit = True
    timeout: float | None = None
    number = 0
    parts: Sequence[Request] = ()

    def __init__(
        self,
        rows: Slab,
        infos: InfoReader,
        page: ControlPage,
        envs: Sequence[int],
        first_index: int,
        bound: int,
        waiter: object,
        reissue: Callable[[int], StepRequest | None],
        *,
        stream: bool,
    ) -> None:
        self.rows = rows
        self.infos = infos
        self.page = page
        self.envs = envs
        self.bound = bound
        self.stream = stream
        self.waiter = waiter
        self.call_id = 0
        self.started = 0.0
        self.over = True
        self.failed_envs: Sequence[int] = ()
        self.claimed: set[int] = set()
        self.overflow: dict[int, memoryview] = {}
        self._first_index = first_index
        self._reissue = reissue
        self._asked, self._requested = rows.asked.data, rows.requested.data
        self._completed = rows.completed.data
        self.asked_rows = self._asked[envs[0] : envs[-1] + 1]
        self.completed_rows = self._completed[envs[0] : envs[-1] + 1]
        for index in envs:
            self._requested[index] = self._completed[index] = self._asked[index]  # a lost worker may have changed them
        # The env that has passed its deadline: from then on no result of it counts.
        self._overdue: int | None = None

    def start(self, call_id: int, now: float, wait: int) -> None:
        """Post it to the worker; under the actor's lock.

        Only here are the envs' numbers raised: a number that is raised while the step before still counts as running
        would make that one's result look as if it had never come, should the process end at that moment.
        """
        asked, requested = self._asked, self._requested
        for index in self.envs:
            requested[index] = asked[index] = asked[index] + 1
        self.call_id = call_id
        self.started = now
        self.page.post_step(call_id, wait, self.stream, self.envs)

    def arm(self) -> None:
        """Make it a step that has not been posted: until it is, it has no results."""
        self.started = 0.0
        self.over = False
        self.failed_envs = ()
        self.overflow = {}
        self.claimed = set()

    @property
    def finished(self) -> bool:
        """Whether the worker has run all of it; what came beside the rows may still be on the way."""
        return self.page.counters[FINISHED] >= self.call_id

    def has_all_rows(self) -> bool:
        """Return whether the rows of all envs are complete, as they are once the worker has finished."""
        asked, completed = self._asked, self._completed
        return all(completed[index] == asked[index] or index in self.claimed for index in self.envs)

    def has_results(self) -> bool:
        """Return whether results of it may be there that have not been claimed."""
        if self.over or self.finished:
            return True
        asked, completed, claimed = self._asked, self._completed, self.claimed
        for index in self.envs:  # a generator takes three times as long
            if completed[index] == asked[index] and index not in claimed:
                return self.started > 0.0  # until it is posted, the rows hold the results of the step before
        return False

    def complete(self, index: int) -> bool:
        """Return whether an env's result is there as a whole, before its deadline."""
        return (
            self.started > 0.0  # until it is posted, the rows hold the results of the step before
            and self._completed[index] == self._asked[index]
            and index != self._overdue
            and (index in self.overflow or not self.infos.needs_overflow(index))
        )

    def record(self, recovery: Journals, envs: Sequence[int]) -> None:
        """Record the results of envs that count, unless that was done when they were claimed."""
        new = [env for env in envs if env not in self.claimed]
        recovery.record_rows(self.rows, self.infos, new, self.call_id, self.bound)

    def withdraw(self, future: ActorFuture) -> Request | None:
        """Return None: no future waits for it."""
        del future
        return None

    def answers(self, frame: Frame) -> tuple[list[Answer], bool]:
        """Return nothing: its results come in rows."""
        del frame
        return [], False

    def discard(self, answers: Sequence[Answer]) -> None:
        del answers

    def next_look(self, page: ControlPage | None, deadlines: Deadlines, now: float) -> float | None:
        when, _ = next_look(self, page, deadlines, now)
        if when is None:
            self._overdue = self._index_at(self.page.progress().position) if self._begun else self.envs[0]
        return when

    @property
    def _begun(self) -> bool:
        return self.page.progress().call_id >= self.call_id

    def _index_at(self, position: int) -> int:
        return self._first_index + position

    def split(self, page: ControlPage | None, *, blame: bool) -> tuple[Request | None, list[Request]]:
        """As `Entry.split`; what is asked of a lost env is taken back, so that its last row stays as it is."""
        del page, blame
        progress = self.page.progress()
        posted = self.started > 0.0
        self.failed_envs = lost = [i for i in self.envs if i not in self.claimed and not self.complete(i)]
        running = self._overdue
        if running is None and posted and not progress.ended:
            running = self._index_at(progress.position)
        current: Request | None = None
        waiting: list[Request] = []
        for index in lost:
            request = self._reissue(index)
            if request is not None:
                request.call_id = self.call_id
                if index == running:
                    current = request
                    current.started = progress.since if self._begun else self.started or time.monotonic()
                    if progress.method == METHOD_RESET:
                        current.method = "reset"
                else:
                    waiting.append(request)
        for index in lost:
            if posted or self._asked[index] != self._completed[index]:  # an interrupt may have raised some numbers
                self._asked[index] -= 1
            self._requested[index] = self._completed[index] = self._asked[index]  # its writer is dead
        self.over = True
        self._overdue = None
        return current, waiting


class SharedMemorySteps:
    """Starts and ends the batch steps of one actor that go through shared memory.

    Args:
        core: The actor's state.
        receive: Reads what has come through the channel; returns False if nothing had.
        dispatch: Sends what waits.
    """

    def __init__(self, core: ActorCore, receive: Callable[[int], bool], dispatch: Callable[[], None]) -> None:
        self._core = core
        self._receive = receive
        self._dispatch = dispatch

    def start(self, step: SharedMemoryBatchStep, now: float, wait: int) -> bool:
        """Start a batch step that is armed and whose actions stand in its rows, or queue it.

        Called with signals deferred.

        Args:
            step: The step.
            now: The time (`time.monotonic`).
            wait: How the worker waits for the request after it, as `envactors.wire.control_page` says.

        Returns:
            False if the actor has another process, or none: then the envs are asked in frames.
        """
        core = self._core
        try:
            with core.lock:
                process, table = core.process, core.table
                if process is None or process.page is not step.page or core.phase is not LIVE or core.closing:
                    return False
                if table.queue or (table.running and not table.running[-1].pipelines):
                    self._queue(step)
                    return True
                if core.step_limit is not None and not table.running:
                    core.timers.set("call", now + core.step_limit)  # not put off: it may be that of the step before
                table.last_id += 1
                step.call_id = table.last_id  # with its old number it would count as finished
                table.running.append(step)
                step.start(table.last_id, now, wait)
        except BaseException:
            self._give_up()
            raise
        return True

    def _give_up(self) -> None:
        """Replace the process after an exception in the middle of what is done under the lock without a change."""
        self._core.is_inconsistent = True
        self._core.kill_inconsistent()

    def _queue(self, step: SharedMemoryBatchStep) -> None:
        self._core.table.add(step)
        self._dispatch()

    def finish(self, step: SharedMemoryBatchStep) -> bool:
        """Retire a batch step that the worker has finished; return whether it is over. Called with signals deferred."""
        if not step.over:
            try:
                with self._core.lock:
                    self.retire()
            except BaseException:
                self._give_up()
                raise
        return step.over

    def retire(self) -> None:
        """Take the batch steps that the worker has finished out of the running ones; under the lock."""
        core = self._core
        running, process = core.table.running, core.process
        if process is None or core.phase is not LIVE:
            return
        counters, retired = process.page.counters, False
        finished = counters[FINISHED]  # read before the other counters, and once: env code may overwrite it
        while running and isinstance(step := running[0], SharedMemoryBatchStep) and finished >= step.call_id:
            if counters[OVERFLOWS] != process.overflows and not self.fetch_overflow():
                return
            if finished > process.page.last_call or not (step.asked_rows == step.completed_rows or step.has_all_rows()):
                process.distrust(f"it says that call {finished} has finished")
                return
            del running[0]
            step.over = retired = True
            core.completed += len(step.envs)
            if core.recovery.replays:
                step.record(core.recovery, step.envs)
        if retired and not running:
            if core.step_limit is not None:
                core.timers.cancel("call")
            if process.on_ring is not None:
                if not core.table.is_limited:  # else each step is watched
                    process.watch_doorbell(None)
                core.table.end_running()
            if core.table.queue:
                self._dispatch()

    def unfinished(self) -> list[Entry]:
        """Return what runs, without the batch steps that wait to be retired; under the lock."""
        running = self._core.table.running
        return [entry for entry in running if not (isinstance(entry, SharedMemoryBatchStep) and entry.finished)]

    def wake_waiters(self) -> None:
        """Retire finished steps and wake the threads that wait for one; under the lock."""
        steps = [entry for entry in self._core.table.running if isinstance(entry, SharedMemoryBatchStep)]
        self.retire()
        for waiter in {id(step.waiter): step.waiter for step in steps}.values():
            self._core.reactor.wake(waiter)

    def watch_end(self) -> None:
        """Have the end of the running steps noticed, since others wait for it; under the lock."""
        process = self._core.process
        if process is not None:
            process.watch_doorbell(self._on_ring)
            process.page.ring_at_end(self._core.table.last_id)
            self.retire()  # it may have ended before

    def _on_ring(self) -> None:
        with self._core.change, self._core.lock:
            self.wake_waiters()  # the ring was meant for them too

    def claim(self, step: SharedMemoryBatchStep) -> list[int]:
        """Return the envs whose results have come since the last claim; from then on no process's end takes them back.

        Called with signals deferred.
        """
        try:
            with self._core.lock:
                if not step.over and step.finished:
                    self.retire()
                if not step.over and step.stream:
                    self.fetch_overflow()
                done, over = {*step.claimed, *step.failed_envs}, step.over
                claimed = [env for env in step.envs if env not in done and (over or step.complete(env))]
                if self._core.recovery.replays and not over:
                    step.record(self._core.recovery, claimed)  # the rows may be used again before the step is retired
                step.claimed.update(claimed)
        except BaseException:
            self._give_up()
            raise
        return claimed

    def fetch_overflow(self) -> bool:
        """Read what came beside the rows that are complete: it was sent before them.

        Returns:
            False if it did not come; then the process is killed.
        """
        with self._core.lock:
            process = self._core.process
            while (
                self._core.phase is LIVE
                and process is not None
                and process.page.counters[OVERFLOWS] > process.overflows
            ):
                if not self._receive(READABLE):
                    process.distrust(f"it says that {process.page.counters[OVERFLOWS]} results came in frames")
                    return False
        return True

    def on_overflow(self, frame: Frame) -> None:
        """Keep what came beside the rows with the step that it belongs to."""
        core = self._core
        steps = [entry for entry in core.table.running if isinstance(entry, SharedMemoryBatchStep)]
        for index, payload in bundle.unpack(frame.payload):
            if core.process is not None:
                core.process.overflows += 1
            for step in steps:
                if index in step.envs:
                    step.overflow[index] = payload


class LimitedSteps(SharedMemorySteps):
    """Starts and ends batch steps that need permits: each goes through the queue."""

    def start(self, step: SharedMemoryBatchStep, now: float, wait: int) -> bool:
        del now, wait  # it may start later
        core = self._core
        try:
            with core.lock:
                if core.process is None or core.process.page is not step.page or core.phase is not LIVE or core.closing:
                    return False
                self.retire()
                self._queue(step)
        except BaseException:
            self._give_up()
            raise
        return True
