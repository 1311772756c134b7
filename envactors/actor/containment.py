"""Errors of one actor must not concern the others: they are contained and logged, in a thread that may block.

So is what env code logs in workers, at the levels that were set here.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable

from envactors.backends.base import Timed

_log = logging.getLogger("envactors")
# How many log records, and bytes of them, may wait for handlers that are slow or block.
_MOST_RECORDS = 1 << 13
_MOST_BYTES = 1 << 24
# How long the deadlines of an object are put off after an error in one of them, in seconds.
_PUT_OFF = 1.0
# An error is logged this long after the last one at the earliest, in seconds.
_REPORT_BEAT = 1.0


class LogQueue:
    """Has log records handled one after the other in a thread where handlers may block; a limited number may wait.

    Args:
        run: Runs a function in that thread.
        what: What the records are, for the line that tells how many were dropped.
    """

    def __init__(self, run: Callable[[Callable[[], None]], None], what: str) -> None:
        self._run = run
        self._what = what
        # Guards what follows: how many records wait, how many bytes they have, and how many were dropped.
        self._lock = threading.RLock()
        self._waiting = self._size = self._dropped = 0

    def add(self, handle: Callable[[], object], size: int = 0) -> None:
        """Queue a function that handles a record of ``size`` bytes; if the queue is full, count it as dropped."""
        with self._lock:
            if self._waiting >= _MOST_RECORDS or self._size + size > max(_MOST_BYTES, size):
                self._dropped += 1
                return
            self._waiting += 1
            self._size += size
        self._run(lambda: self._handle(handle, size))

    def _handle(self, handle: Callable[[], object], size: int) -> None:
        try:
            handle()
        finally:
            with self._lock:
                self._waiting -= 1
                self._size -= size
                # Half of them, not one: else nearly every record would be followed by such a line.
                tells = self._waiting <= _MOST_RECORDS // 2
                dropped = self._dropped if tells else 0
                self._dropped -= dropped
            if dropped:
                _log.warning("%d %s were dropped: the handlers of this process did not keep up", dropped, self._what)


def log_failure(text: str, error: BaseException) -> None:
    """Log an error that is nobody's to handle, also if logging fails; only where handlers may block."""
    try:
        _log.error("%s", text, exc_info=error)
    except BaseException:  # a filter or handler of the user's
        with contextlib.suppress(Exception):  # stderr may be closed
            traceback.print_exception(type(error), error, error.__traceback__)


def levels_of_loggers() -> dict[str, int]:
    """Return the levels that were set here, by logger; that of the root logger under the empty name."""
    loggers = logging.root.manager.loggerDict.items()  # some are placeholders, which have no level
    levels = {name: level for name, logger in loggers if (level := getattr(logger, "level", logging.NOTSET))}
    return {**levels, "": max(logging.root.level, logging.root.manager.disable + 1)}


def handle_record(payload: bytes | bytearray | memoryview) -> None:
    """Have the logger of the same name handle what was logged in a worker."""
    record = logging.makeLogRecord(pickle.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class Logs:
    """Has log records handled, and runs what belongs to one actor in a thread that serves all of them.

    Args:
        run: Runs a function in a thread where log handlers may block.

    Attributes:
        records: Gets what env code logs.
        notices: Gets what the library itself logs.
    """

    def __init__(self, run: Callable[[Callable[[], None]], None]) -> None:
        self.records: LogQueue = LogQueue(run, "log records of workers")
        self.notices: LogQueue = LogQueue(run, "log records about actors")
        # Until when the deadlines of objects that have failed are put off (`time.monotonic`), by id.
        self._put_off: dict[int, float] = {}
        # How many errors there were, and when the next one may be logged (`time.monotonic`).
        self._count = 0
        self._report_at = 0.0

    def run(self, function: Callable[[], object]) -> bool:
        """Run a function; return whether it raised nothing."""
        try:
            function()
        except BaseException as error:
            self.report(error)
            return False
        return True

    def report(self, error: BaseException) -> None:
        """Have an error logged; of those that come in quick succession only the first one is."""
        now = time.monotonic()
        self._count += 1
        if now >= self._report_at:
            self._report_at = now + _REPORT_BEAT
            text = f"an internal handler of envactors raised ({self._count} so far); all actors continue"
            self.notices.add(lambda: log_failure(text, error))

    def next_timer(self, timed: Timed) -> float:
        """Return the next deadline of an object, as `Timed.next_timer` does."""
        try:
            when = timed.next_timer()
        except BaseException as error:
            self.report(error)
            when = time.monotonic() + _PUT_OFF
        return max(when, self._put_off.get(id(timed), when)) if self._put_off else when

    def run_timers(self, timed: list[Timed]) -> None:
        """Have each object handle its deadlines that have passed."""
        now = time.monotonic()
        for one in timed:
            if self.next_timer(one) <= now:
                self._put_off.pop(id(one), None)
                if not self.run(lambda one=one: one.on_timer(now)):  # type: ignore[misc]
                    # Otherwise it would be due again at once, in an endless loop.
                    self._put_off[id(one)] = now + _PUT_OFF
