"""Threads that stop at a line of the library while others run: what a busy machine does once in a million times."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import envactors as ea
from envactors.system.threads import current_frames

PACKAGE = Path(ea.__file__).parent
# How long a thread must stay at one instruction to count as asleep, in seconds.
_ASLEEP = 0.004
# How often a thread may not come to its line.
_MISSES = 5


class Lines:
    """Counts the lines at which a thread is to stop, from 0 until it ends before it gets there.

    On a busy machine another thread may have done its work once; so that has to happen a few times.

    Attributes:
        has_stopped: To be set in each round: whether the thread has stopped.
        count: The line at which it is to stop; in the end how many there were.
    """

    def __init__(self) -> None:
        self.has_stopped = False
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        misses = 0
        while misses < _MISSES:
            self.has_stopped = False
            yield self.count
            if self.has_stopped:
                self.count += 1
                misses = 0
            else:
                misses += 1


class StoppingThread(threading.Thread):
    """A thread that stops before one of the lines that it runs in some modules, and continues when it is told to.

    Args:
        target: What it runs; its result or exception is kept.
        stop_at: How many lines it runs first; None for a thread that does not stop.
        modules: The modules whose lines count, as paths within the package.
        armed: Lines count only from when this is set; None for the beginning.
        starts: Whether lines count from the beginning; otherwise from `count_lines` on, called in the thread.
    """

    def __init__(
        self,
        target: Callable[[], Any],
        stop_at: int | None = None,
        modules: tuple[str, ...] = (),
        armed: threading.Event | None = None,
        *,
        starts: bool = True,
    ) -> None:
        super().__init__(daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = target
        self._left = stop_at
        self._files = {str(PACKAGE / module) for module in modules}
        self._armed = armed
        self._starts = starts
        self._at_line = threading.Event()
        self._go = threading.Event()

    def run(self) -> None:
        if self._starts:
            self.count_lines()
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        finally:
            if self._left is not None:
                sys.settrace(None)

    def count_lines(self) -> None:
        if self._left is not None:
            sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line" and (self._armed is None or self._armed.is_set()):
            self._left -= 1
            if self._left < 0:
                sys.settrace(None)
                self._at_line.set()
                self._go.wait()
                return None
        return None if self._left < 0 else self._trace

    def start(self) -> StoppingThread:
        super().start()
        return self

    def stops(self, *, or_sleeps: bool = False) -> bool:
        """Wait until it stops or ends, or if that will do, sleeps; return whether it has stopped."""
        while self.is_alive() and not self._at_line.wait(_ASLEEP) and not (or_sleeps and self._sleeps()):
            pass
        return self._at_line.is_set()

    def wait_asleep(self) -> None:
        """Wait until it sleeps, or has ended."""
        while self.is_alive() and not self._sleeps():
            pass

    def _sleeps(self) -> bool:
        return _sleeps(self.ident, self.native_id)

    def go_on(self) -> None:
        self._go.set()

    def ends_within(self, seconds: float) -> bool:
        self.join(seconds)
        return not self.is_alive()


def when_this_thread_sleeps(act: Callable[[], Any]) -> StoppingThread:
    """Do something in another thread once the calling one waits."""
    me = threading.get_ident()
    native = threading.get_native_id()

    def wait() -> None:
        # Twice: it may wait for the GIL, which this thread has. A signal that came then would not wake its next wait.
        while not (_sleeps(me, native) and _sleeps(me, native)):
            pass
        act()

    return StoppingThread(wait).start()


def _sleeps(ident: int | None, native: int | None) -> bool:
    """Return whether a thread stays where it is for a moment, and not because it has no core to run on."""
    before = _position(ident)
    time.sleep(_ASLEEP)
    return before is not None and not _is_ready_to_run(native) and _position(ident) == before


def _is_ready_to_run(native: int | None) -> bool:
    """Return whether a thread runs or would if it had a core; only Linux tells."""
    try:
        stat = Path(f"/proc/self/task/{native}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "R"


def _position(ident: int | None) -> tuple[int, int] | None:
    # Not the frame itself: a frame that is held while its thread leaves it is moved to the heap, where some releases of
    # Python 3.11 have read memory that was free.
    frame = current_frames().get(ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)
