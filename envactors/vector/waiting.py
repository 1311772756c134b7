"""Threads that wait for results: each sleeps on the doorbells of all workers, and on one that the loop rings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from envactors.system.polling import Doorbell, Poller, remaining
from envactors.worker import context

if TYPE_CHECKING:
    from envactors.vector.table import EnvTable


class _Sleeper:
    """The poller of one thread that waits."""

    def __init__(self, bell: Doorbell) -> None:
        self._poller = Poller()
        self._watched = -1  # the value of ``process_changes`` whose workers it watches
        self.sleep: Callable[[float | None], object] = self._poller.poll
        bell.register(self._poller)

    def watch_workers(self, table: EnvTable, process_changes: int) -> None:
        """Watch the doorbells of the workers that are running now."""
        if self._watched != process_changes:
            for envs in table.actors:
                process = envs.actor.incarnation.process
                if process is not None:
                    process.page.to_parent.register(self._poller)
            self._watched = process_changes

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an exception has interrupted its making
            self._poller.close()


class ResultWaiters:
    """The threads that wait for results of a vector.

    Args:
        table: The envs.

    Attributes:
        count: How many threads wait.
    """

    _bell_is_closed = False

    def __init__(self, table: EnvTable) -> None:
        self.count: int = 0
        self._table = table
        self._bell = Doorbell()
        self._process_changes = 0
        # How many complete rows each waiting thread needs.
        self._wanted: dict[_Sleeper, int] = {}
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
        if not self.count:
            self._close_bell()

    def _close_bell(self) -> None:
        if not self._bell_is_closed:
            self._bell_is_closed = True
            self._bell.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an exception has interrupted its making
            self._close_bell()

    def wait(self, count_missing: Callable[[], int], deadline: float | None) -> bool:
        """Sleep until nothing is missing or the deadline has passed; return whether nothing is.

        Args:
            count_missing: Returns how many more outcomes are needed, at least. Called after each ring.
            deadline: A time of `time.monotonic`; None for no limit.

        Raises:
            RuntimeError: The thread runs code of an env, and without a limit it would wait for envs of the same actor.
        """
        table = self._table
        sleeper = self._idle.pop() if self._idle else _Sleeper(self._bell)
        self.count += 1
        last_missing = -1
        try:
            while True:
                sleeper.watch_workers(table, self._process_changes)
                # Counted first: a row that is completed in between makes workers ring too early, but never too late.
                complete = int(np.count_nonzero(table.slab.posted == table.slab.completed))
                missing = count_missing()
                if missing and 1 in table.rings_each:
                    self._wanted[sleeper] = min(complete + missing, len(table.status))
                    self._publish_wanted()
                    missing = count_missing()  # workers do not ring for rows that were complete before
                if not missing:
                    return True
                seconds = remaining(deadline)
                if seconds is not None and seconds <= 0.0:
                    return False
                if seconds is None and context.of_thread.get() is not None:
                    self._check_not_within(missing)
                if missing == last_missing:  # a ring without a result
                    self._check_workers()
                last_missing = missing
                sleeper.sleep(seconds)
        finally:
            self.count -= 1
            if self._wanted.pop(sleeper, None) is not None:
                self._publish_wanted()
            if not self._is_closed:
                self._idle.append(sleeper)
            elif not self.count:
                self._close_bell()

    def _check_not_within(self, missing: int) -> None:
        """Raise if env code of this vector would wait for more outcomes than its other actors can provide."""
        table = self._table
        mine = next((envs for envs in table.actors if envs.actor.runs_this_thread), None)
        if mine is None:
            return
        others = [index for index in range(len(table.status)) if index not in mine.range]
        if missing > sum(map(table.is_running, others)):
            raise mine.actor.errors.within_envs()

    def _publish_wanted(self) -> None:
        """Tell workers at how many complete rows to ring; they ring for each failure anyway."""
        wanted = min(self._wanted.values(), default=0)
        for envs in self._table.actors:
            process = envs.actor.incarnation.process
            if process is not None:
                process.page.ring_at(wanted)

    def _check_workers(self) -> None:
        """Have the loop kill workers that claim to have finished rows which are not complete."""
        for envs in self._table.actors:
            if envs.check_memory():
                actor = envs.actor
                actor.runtime.loop.call_soon(functools.partial(actor.run, actor.find_current_step))
