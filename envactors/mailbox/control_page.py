"""The control page of a worker: a page of shared memory with a few counters, and two doorbells.

Each counter has one writer. The state is in the counters; a ring only says that one may have changed, so that lost and
extra rings do no harm. There is no lock that a killed process could leave held.

    parent  post_step      WAIT, STREAM, STEP, POSTED, ring  set_wait      WAIT (the frame is sent then)
            ring_at        RING_AT                           post_frame    FRAMES, POSTED
            ring_at_end    WATCHED
    worker  start_request  SINCE, METHOD, ENV_INDEX, BEGUN   record_env    SINCE, METHOD, ENV_INDEX
            finish_step    FINISHED, ring                    finish_frame  FINISHED (the reply was sent)

Each method writes its counters in this order.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from envactors.mailbox.durations import METHOD_RESET as METHOD_RESET  # noqa: PLC0414 # `METHOD_CALL` is here
from envactors.mailbox.durations import METHOD_STEP as METHOD_STEP  # noqa: PLC0414
from envactors.mailbox.durations import Histograms
from envactors.mailbox.spans import SpanRing, measured_size
from envactors.system.cpus import yield_cpu
from envactors.system.polling import Doorbell

PAGE: Final = mmap.PAGESIZE

# How long a spin lasts: in rounds of about a microsecond, and in seconds at most, for rounds that lose the core to
# others each time.
_SPIN_ROUNDS, _SPIN_SECONDS = 150, 1e-3

# Written by the parent.
# How many requests have been posted, frames and batch steps; the only counter that an idle worker watches.
POSTED: Final = 0
# How many of them are frames.
FRAMES: Final = 1
# The call id of the last batch step that was posted through shared memory.
STEP: Final = 2
# Whether the results of that step are streamed: each is of use before the others are there.
STREAM: Final = 3
# How the worker waits for the next request: `ASLEEP` or `SPINNING`, and on which CPU; see `encode_wait`.
WAIT: Final = 4
# The worker rings for a streamed result if so many of all rows are complete then; 0 if nobody waits.
RING_AT: Final = 5
# The call id of the last streamed step whose end the worker rings for; it rings for the end of any other step.
WATCHED: Final = 6
# Until when the worker may begin requests, a time of `envactors.system.clocks.boot_clock` read and written through
# `ControlPage.times`; 0 for ever. Only workers of other machines have a lease.
LEASE: Final = 7
# Whether the worker writes down when steps and resets run, behind the page.
TIMED: Final = 8

# Written by the worker, in cache lines of its own.
# The call id of the request that runs, or ran last: of a frame, or of a row; written before any code of the env runs.
BEGUN: Final = 32
# The call id of the last finished request; a frame is finished once its reply was sent. Call ids only grow, so a step
# is finished if this is not less than its own.
FINISHED: Final = 33
# The position in its actor of the env that runs, from 0.
ENV_INDEX: Final = 34
# What this env runs: one of the values that begin with METHOD. An autoreset within a step changes it.
METHOD: Final = 35
# When that has started (`time.monotonic`); read and written through `ControlPage.times`.
SINCE: Final = 36
# How many parts the worker has sent in `Kind.OVERFLOW` frames.
OVERFLOWS: Final = 37

METHOD_CALL: Final = 0
# In a rollout: the policy, which acts for all envs of the worker.
METHOD_POLICY: Final = 3
# How often to read what a worker is at, if it changes all the time.
_MOST_READS = 100

ASLEEP: Final = 0
SPINNING: Final = 1


def encode_wait(core: int, wait: int) -> int:
    """Return the value of `WAIT` for `ASLEEP` or `SPINNING` on the CPU of this number rather than on any."""
    return wait | (core + 1) << 1


def wait_cpu(wait: int) -> int | None:
    """Return the CPU that a value of `encode_wait` names; None for any."""
    return (wait >> 1) - 1 if wait >> 1 else None


def page_size(envs: int) -> int:
    """Return the size of a page for so many envs and what follows it, in bytes."""
    return PAGE + measured_size(envs)


def spin_until_all(pairs: Sequence[tuple[memoryview, int]], index: int) -> bool:
    """Spin until ``counters[index] >= number`` for all pairs (counters, number), and return whether that came true.

    It spins for some tens of microseconds of this thread's own time. Each round gives the core away first, so that the
    other side may use it, and calls no Python function, so that it is short. The counters may only grow: one that has
    reached its number is not read again.
    """
    give_away, monotonic = yield_cpu, time.monotonic
    end = monotonic() + _SPIN_SECONDS
    reached, wanted = 0, len(pairs)  # the first `reached` of the pairs have come true
    for _ in range(_SPIN_ROUNDS):
        give_away()
        while reached < wanted:
            counters, number = pairs[reached]
            if not (
                counters[index] >= number
                or counters[index] >= number
                or counters[index] >= number
                or counters[index] >= number
            ):
                break
            reached += 1
        else:
            return True
        if monotonic() > end:
            break
    return False


class PagePlace(NamedTuple):
    """Where a worker's page is in its file, and how long it is with what follows it, in pages."""

    first: int
    length: int


class Progress(NamedTuple):
    """What a worker runs, read from its control page.

    Attributes:
        call_id: The call id of the request that it runs or ran last; 0 before the first.
        ended: Whether that request has finished.
        position: The position in its actor of the env that runs.
        method: `METHOD_CALL`, `METHOD_STEP`, `METHOD_RESET` or `METHOD_POLICY`.
        since: When that has started (`time.monotonic`).
    """

    call_id: int
    ended: bool
    position: int
    method: int
    since: float


NOT_BEGUN = Progress(0, ended=True, position=0, method=METHOD_STEP, since=0.0)


class ControlPage:
    """The control page of one worker, in memory that the parent and the worker share.

    Args:
        memory: At least `page_size` bytes, zeros at first.
        to_worker: Rung by the parent.
        to_parent: Rung by the worker.

    Attributes:
        spans: When steps and resets ran, and how long they took; that follows the page.
        is_timing: In the worker: whether what runs now is timed.
        is_streaming: In the worker: whether results of the present step are streamed, as `STREAM` said when it began.
        clock_lead: How far the parent's `time.monotonic` is ahead of the worker's, in seconds.
        counters: The memory as integers of 64 bits; the indices are the names above.
        times: The same memory as floats: times of `time.monotonic`, in seconds.
        last_call: In the parent: the highest call id that the worker was sent.
    """

    def __init__(self, memory: mmap.mmap | bytearray | memoryview, to_worker: Doorbell, to_parent: Doorbell) -> None:
        self.counters: memoryview[int] = memoryview(memory).cast("q")
        self.times: memoryview[float] = memoryview(memory).cast("d")
        self.to_worker = to_worker
        self.to_parent = to_parent
        self.spans: SpanRing = SpanRing(memoryview(memory)[PAGE:])
        self.is_timing = self.is_streaming = False
        self.clock_lead: float = 0.0
        self.last_call: int = 0
        # The parent's own copies of `POSTED` and `FRAMES`: env code may overwrite the page.
        self._posted = self._frames = 0
        # Acquired for its memory barrier only: what was written before is seen by who reads after an acquire of theirs.
        self._barrier = threading.Lock()

    # The parent ------------------------------------------------------------------------------------------

    def post_step(self, call_id: int, wait: int, stream: bool, rows: Sequence[int] = ()) -> None:
        """Post the batch step whose rows have been written; the caller ensures that the doorbells stay open."""
        del rows  # pages of other machines pass them on
        counters = self.counters
        counters[WAIT] = wait
        if stream and not counters[STREAM] and counters[FINISHED] < counters[STEP]:
            counters[WATCHED] = call_id  # the worker may run both as one, and the other's end is waited for
        counters[STREAM] = stream
        counters[STEP] = self.last_call = call_id
        self._posted = counters[POSTED] = self._posted + 1
        self.to_worker.ring_open()

    def ring_at(self, count: int) -> None:
        """Have the worker ring for a streamed result if so many rows are complete then; 0 if nobody waits.

        Results that were complete before have to be looked for after this.
        """
        self.counters[RING_AT] = count
        with self._barrier:
            pass

    def ring_at_end(self, call_id: int) -> None:
        """Have the worker ring for the end of a streamed step; it may have ended before."""
        self.counters[WATCHED] = call_id
        with self._barrier:
            pass

    def set_wait(self, wait: int, call_id: int = 0) -> None:
        """Say how the worker waits for the request after the frame that is sent next, which has this call id."""
        self.counters[WAIT] = wait
        self.last_call = max(self.last_call, call_id)

    def post_frame(self) -> None:
        """Announce a frame that was sent: a worker that spins would fall asleep for one that is still to come."""
        counters = self.counters
        self._frames = counters[FRAMES] = self._frames + 1
        self._posted = counters[POSTED] = self._posted + 1

    def keep(self) -> None:
        """Keep what an ended worker has left here: from now on the memory may be another worker's."""
        kept = bytearray(self.counters[: PAGE // 8])
        self.counters = memoryview(kept).cast("q")
        self.times = memoryview(kept).cast("d")

    def histograms(self, envs: int) -> Histograms:
        """Return how long the steps and resets of so many envs have taken, as far as that was written down."""
        return self.spans.histograms(envs) if self.counters[TIMED] else Histograms(envs)

    def progress(self) -> Progress:
        """Return what the worker runs.

        Env code may have overwritten the page: what cannot be a call id, a method or a time is that of the last
        request, `METHOD_CALL`, or 0.0.
        """
        counters = self.counters
        for _ in range(_MOST_READS):  # until the time was the same before and after, so that the others belong to it
            stamp, since = counters[SINCE], self.times[SINCE]
            begun, ended = counters[BEGUN], counters[FINISHED] >= counters[BEGUN]
            position, method = counters[ENV_INDEX], counters[METHOD]
            if counters[SINCE] == stamp:  # not as times, of which one may be NaN
                break
        if not 0 <= begun <= self.last_call:
            begun, ended = self.last_call, False  # nothing that may have run is to run again
        if not METHOD_CALL <= method <= METHOD_POLICY:
            method = METHOD_CALL
        return Progress(begun, ended, position, method, since if 0.0 <= since <= time.monotonic() else 0.0)

    def find_untrue(self, envs: int) -> str:
        """Return which of the counters cannot be true for a worker of so many envs; empty if all of them can."""
        counters, since = self.counters, self.times[SINCE]
        cells = {
            "POSTED": counters[POSTED] == self._posted,
            "FRAMES": counters[FRAMES] == self._frames,
            "BEGUN": 0 <= counters[BEGUN] <= self.last_call,
            "FINISHED": 0 <= counters[FINISHED] <= self.last_call,
            "ENV_INDEX": 0 <= counters[ENV_INDEX] < envs,
            "METHOD": METHOD_CALL <= counters[METHOD] <= METHOD_POLICY,
            "SINCE": 0.0 <= since <= time.monotonic(),
        }
        return ", ".join(name for name, can_be_true in cells.items() if not can_be_true)

    # The worker ------------------------------------------------------------------------------------------

    def start_request(self, call_id: int, method: int, env: int) -> None:
        """Record that a request runs from now on."""
        counters = self.counters
        self.times[SINCE] = time.monotonic()
        counters[METHOD] = method
        counters[ENV_INDEX] = env
        counters[BEGUN] = call_id

    def record_env(self, method: int, env: int) -> None:
        """Record which method of which env runs from now on.

        The time is written first: `progress` reads it before and after the other counters.
        """
        self.times[SINCE] = time.monotonic()
        self.counters[METHOD] = method
        self.counters[ENV_INDEX] = env

    def record_span(self) -> None:
        """Write down the step that has run and ends now, before a reset begins within it."""
        counters = self.counters
        self.spans.add(self.times[SINCE], time.monotonic(), counters[BEGUN], counters[ENV_INDEX], METHOD_STEP)

    def finish_step(self, call_id: int) -> None:
        """Record that a batch step has finished, and ring if anybody waits for that rather than for its results."""
        counters = self.counters
        counters[FINISHED] = call_id
        if counters[WAIT] & SPINNING:
            yield_cpu()  # a caller that spins on this CPU reads the counter first, before the ring delays it
        if self.is_streaming:
            with self._barrier:
                pass
            if counters[WATCHED] < call_id:
                return
        self.to_parent.ring_open()

    def ring_for_result(self, complete: Callable[[], int], *, always: bool) -> None:
        """Ring for a result that was written, if the caller waits for no more of them than ``complete()`` returns.

        Args:
            complete: Returns how many there are.
            always: Whether to ring whatever the caller waits for.
        """
        with self._barrier:
            pass
        wanted = self.counters[RING_AT]
        if always or (wanted and complete() >= wanted):
            self.to_parent.ring_open()

    def finish_frame(self, call_id: int) -> None:
        """Record that a request has finished whose reply was sent; the reply's frame wakes the parent."""
        self.counters[FINISHED] = call_id
