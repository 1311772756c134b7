"""Threads that wait for results: each sleeps on the doorbells of all workers, and on one that the loop rings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

from envactors.actor.actor import Actor
from envactors.mailbox.control_page import FINISHED
from envactors.system.polling import Doorbell, Poller, remaining
from envactors.vector.rows import Rows


class _Sleeper:
    """The poller of one thread that waits."""

    def __init__(self, bell: Doorbell) -> None:
        self._poller = Poller()
        self._watched = -1  # the value of ``process_changes`` whose workers it watches
        self.sleep: Callable[[float | None], object] = self._poller.poll
        bell.register(self._poller)

    def watch_workers(self, actors: Sequence[Actor], process_changes: int) -> None:
        """Watch the doorbells of the workers that are running now."""
        if self._watched != process_changes:
            for actor in actors:
                if (page := actor.page) is not None:
                    page.to_parent.register(self._poller)
            self._watched = process_changes

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an exception has interrupted its making
            self._poller.close()


class ResultWaiters:
    """The threads that wait for results of a vector.

    A thread that needs `m` more outcomes while `w` rows are written sleeps until `w + m` rows are: that sum is its
    *ring_at*. Workers get the smallest one of all threads, as `RING_AT`. The worker whose row makes the rows of all
    workers reach it rings its doorbell. All threads watch it; each counts again, and sleeps on if outcomes are missing.
    Workers with such a number also ring for each failure, and all workers ring at the end of the rows of a `step`.

    An example: of eight envs, 0 to 5 were sent steps, and ``recv(min_envs=3)`` waits. Rows 6 and 7 of idle envs count
    as written, and row 0 is written by now, so ``written == 3``. Two more outcomes are needed, so ``missing == 2`` and
    ``ring_at == 5``. Row 3 is the fourth written row, and wakes nobody. Row 1 is the fifth: its worker rings, and the
    thread finds ``missing == 0``.

    Whoever makes any other change rings the doorbell of this object: callers that post or take rows, and the loop for
    outcomes that are in no row and for new processes.

    Args:
        rows: The rows.
        is_pending: Returns whether the request of an env has no outcome yet.

    Attributes:
        actors: The actors of the envs.
        sleepers: Those of the threads that wait now, with the ``ring_at`` of each; 0 for none.
    """

    def __init__(self, rows: Rows, is_pending: Callable[[int], bool]) -> None:
        self.actors: Sequence[Actor] = ()
        self.sleepers: dict[_Sleeper, int] = {}
        self._rows = rows
        self._is_pending = is_pending
        self._bell = Doorbell()
        self._process_changes = 0
        self._idle: list[_Sleeper] = [_Sleeper(self._bell)]
        self._is_closed = False

    def ring(self) -> None:
        """Wake all threads that wait: something other than a row has changed."""
        self._bell.ring()

    def on_process_change(self) -> None:
        """Have all threads watch the doorbells of the workers that are running now."""
        self._process_changes += 1
        self._bell.ring()

    def close(self) -> None:
        """Close the descriptors, or leave the doorbell to the end of this object if threads still wait."""
        self._is_closed = True
        self._idle.clear()
        self._bell.ring()
        if not self.sleepers:
            self._bell.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an exception has interrupted its making
            self._bell.close()

    def wait(self, count_missing: Callable[[], int], deadline: float | None, *, until_failure: bool = False) -> bool:
        """Sleep until nothing is missing or the deadline has passed; return whether nothing is.

        Args:
            count_missing: Returns how many more outcomes are needed, at least. Called after each ring.
            deadline: A time of `time.monotonic`; None for no limit.
            until_failure: Whether nothing is missing once an env has failed.

        Raises:
            RuntimeError: The thread runs code of an env, and without a limit it would wait for envs of the same actor.
        """
        try:
            sleeper = self._idle.pop()
        except IndexError:
            sleeper = _Sleeper(self._bell)
        last_missing = -1
        try:
            self.sleepers[sleeper] = 0
            while True:
                sleeper.watch_workers(self.actors, self._process_changes)
                missing, ring_at = self._count(count_missing)
                # All rows of a `step` end with a ring. But without a number, none of them rings for a failure.
                if missing and (until_failure or ring_at < len(self._rows.ops) or self._rows.any_streams()):
                    self.sleepers[sleeper] = ring_at
                    self._publish_ring_at()
                    # A row may have been written before its worker could read the number. It has rung for nothing, and
                    # no later row may make up for it.
                    missing = count_missing()
                if not missing:
                    return True
                seconds = remaining(deadline)
                if seconds is not None and seconds <= 0.0:
                    return False
                if seconds is None:
                    self._check_no_deadlock(missing)
                # A ring that brought nothing: a worker may claim to have finished, and its results are not there.
                if missing == last_missing:
                    self._check_workers()
                last_missing = missing
                sleeper.sleep(seconds)
        finally:
            if self.sleepers.pop(sleeper, 0):
                self._publish_ring_at()
            if not self._is_closed:
                self._idle.append(sleeper)
            elif not self.sleepers:
                self._bell.close()

    def _count(self, count_missing: Callable[[], int]) -> tuple[int, int]:
        """Return how many outcomes are missing, and at how many written rows to ring.

        A row may be written, or posted, between the counts of written rows and of missing outcomes. Their sum then
        counts it twice, or not at all, and no number of rows may ever reach it. So both are counted until the number of
        written rows is the same before and after. If all rows are wanted, the number is right however they change.
        """
        count = len(self._rows.ops)
        while True:
            written, missing = self._rows.count_written(), count_missing()
            ring_at = min(written + missing, count)
            if not missing or ring_at == count or written == self._rows.count_written():
                return missing, ring_at

    def _check_no_deadlock(self, missing: int) -> None:
        """Raise if env code of this vector would wait for more outcomes than the other actors have missing."""
        if self.actors[0].config.backend.traits.can_kill:
            return  # the envs run in processes, not in threads of this one
        own = next((actor for actor in self.actors if actor.is_run_by_this_thread), None)
        others = (index for actor in self.actors if actor is not own for index in actor.config.indices)
        if own is not None and missing > sum(map(self._is_pending, others)):
            raise own.errors.called_by_own_env()

    def _publish_ring_at(self) -> None:
        """Tell workers at how many written rows to ring; with a number, they also ring for each failure."""
        while True:
            # Copied first: other threads add and remove theirs without a lock.
            ring_at = min(filter(None, [*self.sleepers.values()]), default=0)
            for actor in self.actors:
                if (page := actor.page) is not None:
                    page.ring_at(ring_at)
            if ring_at == min(filter(None, [*self.sleepers.values()]), default=0):
                return
            self.ring()  # this has overwritten the number of another thread, which may have missed a ring

    def _check_workers(self) -> None:
        """Have the loop check workers that claim to have finished rows which are not complete.

        The results of such a worker would never come.
        """
        for actor in self.actors:
            if (page := actor.page) is not None and actor.tenant.check_memory(page.counters[FINISHED]):
                actor.runtime.loop.call_soon(functools.partial(actor.run_as_change, actor.collect_and_verify))
