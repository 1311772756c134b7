"""The control page of a worker: a page of shared memory with a few counters, and two doorbells.

Each counter has one writer. The state is in the counters; a ring only says that one may have changed, so lost and extra
rings do no harm. No lock is shared, so a killed process cannot leave one held.

    parent  post_step      WAIT, STREAM, STEP, POSTS, ring  post_frame    WAIT, FRAMES, POSTS (the frame was sent)
            ring_at        RING_AT
            ring_at_end    WATCHED
    worker  spin_for_post  AWAITED
            start_request  SINCE, METHOD, ENV_INDEX, BEGUN   record_env    SINCE, METHOD, ENV_INDEX
            finish_step    FINISHED, ring                    finish_frame  FINISHED (the reply was sent)

Each method writes its counters in this order. Requests to envs and their results are in the rows of
`envactors.mailbox.slab`.
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

# A spin ends after this many seconds, also if other threads take the core in each round.
_SPIN_SECONDS = 1e-3

# Written by the parent.
# The count of posted requests, frames and batch steps; the only counter that an idle worker watches.
POSTS: Final = 0
# The count of those that are frames.
FRAMES: Final = 1
# The call id of the last batch step that was posted through shared memory.
STEP: Final = 2
# Whether that step streams: the caller uses each result before the others are complete. The worker rings once as many
# rows are written as a thread waits for. It rings for the end of a step that does not stream.
STREAM: Final = 3
# How the worker waits for the next request: for how many rounds it spins before it sleeps.
WAIT: Final = 4
# The worker rings for a result if at least this many rows are written then; 0 if nobody waits for single results.
RING_AT: Final = 5
# The call id of the last streamed step whose end the worker rings for; it rings for the end of any other step.
WATCHED: Final = 6
# When the lease of a worker on another machine ends and it may begin no more requests, a time of
# `envactors.system.clocks.boot_clock` read and written through `ControlPage.times`; 0 without a lease.
LEASE: Final = 7
# Whether the worker records the times of steps and resets, in the memory after the page.
TIMED: Final = 8

# Written by the worker. These are in other cache lines than the parent's.
# The call id of the request that runs or ran last: of a frame, or of a row; written before any code of the env runs.
BEGUN: Final = 32
# The call id of the last finished request; a frame is finished once its reply was sent. Call ids only grow, so a step
# is finished if this is not less than its own.
FINISHED: Final = 33
# The position in its actor of the env that runs, from 0.
ENV_INDEX: Final = 34
# What this env runs: one of the values that begin with METHOD. An autoreset within a step changes it.
METHOD: Final = 35
# When the env began to run it (`time.monotonic`); read and written through `ControlPage.times`.
SINCE: Final = 36
# The count of results that the worker has sent in `Kind.OVERFLOW` frames.
OVERFLOWS: Final = 37
# The value of `POSTS` that the worker spins for, so that this post needs no ring; 0 while it sleeps.
AWAITED: Final = 38

METHOD_CALL: Final = 0
# In a rollout: the policy, which acts for all envs of the worker.
METHOD_POLICY: Final = 3
METHOD_NAMES: Final = {METHOD_CALL: "call", METHOD_STEP: "step", METHOD_RESET: "reset", METHOD_POLICY: "policy"}
# How many times to read the progress of a worker if it keeps changing.
_MOST_READS = 100

# Values of `WAIT`. A round takes about a microsecond.
NO_SPIN: Final = 0
SPINNING: Final = 150


def page_size(envs: int) -> int:
    """Return the size of a page for ``envs`` envs and what follows it, in bytes."""
    return PAGE + measured_size(envs)


def spin_until_all(pairs: Sequence[tuple[memoryview, int]], index: int, rounds: int = SPINNING) -> bool:
    """Spin until ``counters[index] >= target`` for all pairs (counters, target); return whether that came true.

    Each round takes about a microsecond of this thread's time. It yields the core first, so that the other side may use
    it, and calls no Python function, so that it is short. Counters only grow, so one that has reached its
    target is not read again.
    """
    yield_core = yield_cpu
    monotonic = time.monotonic
    end = monotonic() + _SPIN_SECONDS
    reached = 0  # how many of the pairs have come true
    wanted = len(pairs)
    for _ in range(rounds):
        yield_core()
        while reached < wanted:
            counters, target = pairs[reached]
            if not (
                counters[index] >= target
                or counters[index] >= target
                or counters[index] >= target
                or counters[index] >= target
            ):
                break
            reached += 1
        else:
            return True
        if monotonic() > end:
            break
    return False


class Progress(NamedTuple):
    """The request that a worker runs, read from its control page.

    Attributes:
        call_id: The call id of the request that it runs or ran last; 0 before the first.
        ended: Whether that request has finished.
        position: The position in its actor of the env that runs.
        method: `METHOD_CALL`, `METHOD_STEP`, `METHOD_RESET` or `METHOD_POLICY`.
        since: When the env began to run it (`time.monotonic`).
    """

    call_id: int
    ended: bool
    position: int
    method: int
    since: float


class ControlPage:
    """The control page of one worker, in memory that the parent and the worker share.

    Args:
        memory: At least `page_size` bytes, zeros at first.
        to_worker: Rung by the parent.
        to_parent: Rung by the worker.

    Attributes:
        spans: The times of steps and resets, in the memory after the page.
        is_timing: In the worker: whether the current request is timed.
        is_streaming: In the worker: whether the results of the current step are streamed (`STREAM` at its start).
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
        self.is_timing = False
        self.is_streaming = False
        self.clock_lead: float = 0.0
        self.last_call: int = 0
        # The parent's own copies of `POSTS` and `FRAMES`: env code may overwrite the page.
        self._posted = self._frames = 0
        # Acquired as a memory barrier only: after its own barrier, the other side reads what was written before.
        self._barrier = threading.Lock()

    # The parent ------------------------------------------------------------------------------------------

    def post_step(self, call_id: int, wait: int, streams: bool, rows: Sequence[int] = ()) -> None:
        """Post the batch step whose rows have been written; the caller ensures that the doorbells stay open."""
        del rows  # pages of other machines pass them on
        counters = self.counters
        counters[WAIT] = wait
        if streams and not counters[STREAM] and counters[FINISHED] < counters[STEP]:
            counters[WATCHED] = call_id  # the worker may run both as one, and the other's end is waited for
        counters[STREAM] = streams
        counters[STEP] = self.last_call = call_id
        self._posted = counters[POSTS] = self._posted + 1
        with self._barrier:
            pass
        if counters[AWAITED] != self._posted:
            self.to_worker.ring_open()

    def ring_at(self, count: int) -> None:
        """Have the worker ring for a result once ``count`` rows are written; 0 if nobody waits for single results.

        It does not ring for results that were written before, so look for these afterwards. In a step that is not
        streamed, the worker reads the counter without a memory barrier. Its stores before that are visible long before
        the caller looks, since processors keep them back for less than a microsecond.
        """
        self.counters[RING_AT] = count
        with self._barrier:
            pass

    def ring_at_end(self, call_id: int) -> None:
        """Have the worker ring for the end of a streamed step, which may have ended before."""
        self.counters[WATCHED] = call_id
        with self._barrier:
            pass

    def post_frame(self, wait: int) -> None:
        """Announce a frame that was sent; before that, a spinning worker would fall asleep in reading the channel.

        `last_call` includes its call id already.

        Args:
            wait: How the worker waits for the request after it. A worker that has ended it by now waits as before.
        """
        counters = self.counters
        counters[WAIT] = wait
        self._frames = counters[FRAMES] = self._frames + 1
        self._posted = counters[POSTS] = self._posted + 1

    def histograms(self, envs: int) -> Histograms:
        """Return the durations of the steps and resets of ``envs`` envs, as far as they were recorded."""
        found: Histograms = self.spans.histograms[:envs].copy()  # at once, since the worker continues to count
        return found

    def progress(self) -> Progress:
        """Return what the worker runs.

        Env code may have overwritten the page. In place of what cannot be a call id, a method, or a time, this returns
        the last call id, `METHOD_CALL`, or 0.0.
        """
        counters = self.counters
        for _ in range(_MOST_READS):  # until the time was the same before and after, so that the others belong to it
            stamp, since = counters[SINCE], self.times[SINCE]
            begun = counters[BEGUN]
            ended = counters[FINISHED] >= begun
            position, method = counters[ENV_INDEX], counters[METHOD]
            if counters[SINCE] == stamp:  # not as times, of which one may be NaN
                break
        if not 0 <= begun <= self.last_call:
            begun, ended = self.last_call, False  # as if it ran, so that nothing that may have run runs again
        if not METHOD_CALL <= method <= METHOD_POLICY:
            method = METHOD_CALL
        return Progress(begun, ended, position, method, since if 0.0 <= since <= time.monotonic() else 0.0)

    def find_untrue(self, envs: int) -> str:
        """Return the names of the counters that cannot be true for a worker of ``envs`` envs; empty if all can."""
        counters, since = self.counters, self.times[SINCE]
        cells = {
            "POSTS": counters[POSTS] == self._posted,
            "FRAMES": counters[FRAMES] == self._frames,
            "BEGUN": 0 <= counters[BEGUN] <= self.last_call,
            "FINISHED": 0 <= counters[FINISHED] <= self.last_call,
            "ENV_INDEX": 0 <= counters[ENV_INDEX] < envs,
            "METHOD": METHOD_CALL <= counters[METHOD] <= METHOD_POLICY,
            "SINCE": 0.0 <= since <= time.monotonic(),
        }
        return ", ".join(name for name, can_be_true in cells.items() if not can_be_true)

    # The worker ------------------------------------------------------------------------------------------

    def spin_for_post(self, handled: int) -> None:
        """Spin, if the parent wants that, until it has posted more than ``handled`` requests.

        Look at `POSTS` before you sleep: a post that is not there yet will ring. Each side writes its counter, and
        reads that of the other side after a barrier, so at least one of them sees what the other has written.
        """
        counters = self.counters
        if counters[WAIT]:
            counters[AWAITED] = handled + 1
            if not spin_until_all([(counters, handled + 1)], POSTS, counters[WAIT]):
                counters[AWAITED] = 0
                with self._barrier:
                    pass

    def start_request(self, call_id: int, method: int, env: int) -> None:
        """Record that a request runs from now on."""
        self.record_env(method, env)
        self.counters[BEGUN] = call_id

    def record_env(self, method: int, env: int) -> None:
        """Record that a method of an env runs from now on.

        The time is written first, since `progress` reads it before and after the other counters.
        """
        self.times[SINCE] = time.monotonic()
        self.counters[METHOD] = method
        self.counters[ENV_INDEX] = env

    def record_span(self, env: int) -> None:
        """Record the step that ends now, before a reset begins within it."""
        self.spans.add(self.times[SINCE], time.monotonic(), self.counters[BEGUN], env, METHOD_STEP)

    def finish_step(self, call_id: int) -> None:
        """Record that a batch step has finished; ring if someone waits for its end rather than for its results."""
        counters = self.counters
        counters[FINISHED] = call_id
        if counters[WAIT]:
            yield_cpu()  # a caller that spins on this CPU reads the counter first, before the ring delays it
        if self.is_streaming:
            with self._barrier:
                pass
            if counters[WATCHED] < call_id:
                return
        self.to_parent.ring_open()

    def ring_for_result(self, count_written: Callable[[], int], *, always: bool) -> None:
        """Ring for a result that was written if the caller waits for at most ``count_written()`` results.

        Args:
            count_written: Returns how many rows are written.
            always: Whether to ring whatever the caller waits for.
        """
        with self._barrier:
            pass
        wanted = self.counters[RING_AT]
        if always or (wanted and count_written() >= wanted):
            self.to_parent.ring_open()

    def finish_frame(self, call_id: int) -> None:
        """Record that a request has finished; its reply was sent and wakes the parent."""
        self.counters[FINISHED] = call_id
