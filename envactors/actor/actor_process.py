"""One process of an actor, why it ends, and whether and when another one follows.

`RestartTracker.delay_after` decides that, after each exit of an actor that is not closing. With ``max_restarts=1`` and
``backoff=0.5``, the delay after the first crash is 0.5, and always 0.0 after a renewal. After a second crash soon after
the first one, it is None: no process follows.

For each reason why a process has ended, the table tells whether another one comes, and how the running call continues.
`ActorProcess.counts` and `ProcessExit.allows_retry` state its two columns. A call that had not begun runs in the next
process, if one comes.

===============================  ===================================================  ==================================
reason                           next process                                         running call
===============================  ===================================================  ==================================
closing                          none, and the actor is closed; after a renewal, one  fails
                                 for the calls that were queued before the close
renewal, abort, interrupt        at once, not counted as a restart                    fails
its helper process was lost      at once, not counted as a restart                    runs again if it has retries, and
                                                                                      keeps all of them
an env raised (``ENV_RAISED``)   counted as a restart, after the backoff              has got the exception
crash, failed start, deadline    counted as a restart, after the backoff              runs again if it has retries, and
                                                                                      uses up one of them; else fails
===============================  ===================================================  ==================================

If several reasons came together, one uncounted reason makes the exit uncounted: a user may kill or renew a process
that is about to end for another reason. If the restart policy allows no more restarts, no process follows one that
counts, and the actor is dead.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from envactors.actor.evidence import order_fatal_error
from envactors.backends.base import ExitStatus, LaunchRefusedError, Stacks, Worker
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Failure
from envactors.options import RestartPolicy

# The call id of the first message to a process; those of jobs begin with 1.
START_CALL_ID = 0
# How many starts or resets in a row may fail without a backoff. Without this limit, processes would start forever.
MOST_WITHOUT_BACKOFF: Final = 10


class EndReason(enum.Enum):
    """Why a process is ended. None instead of a reason means that nobody ends it: it runs, or has ended by itself."""

    TIMEOUT = enum.auto()  # a deadline passed
    ABORT = enum.auto()  # the user aborted a call, or killed the process with restart=True
    RENEW = enum.auto()  # the user asked for another process, or the recycle policy did
    FACTORY_RAISED = enum.auto()  # a factory raised, so its start has failed
    ENV_RAISED = enum.auto()  # one of its envs raised, and on_failure replaces the process
    INTERRUPT = enum.auto()  # an exception interrupted a change of the parent's state
    HELPER_LOST = enum.auto()  # its helper process was lost, with which the kernel ends it
    CLOSE = enum.auto()  # the actor is being closed


def is_crash(reason: EndReason | None) -> bool:
    """Return whether a process has crashed: it ended by itself (None), failed to start, or missed a deadline."""
    return reason in (None, EndReason.FACTORY_RAISED, EndReason.TIMEOUT)


def is_deliberate(reason: EndReason | None) -> bool:
    """Return whether this library ended a process, other than for a deadline or because a factory raised."""
    return not is_crash(reason) and reason is not EndReason.HELPER_LOST


def blames_request(reason: EndReason | None) -> bool:
    """Return whether the parent ended a process because of its current request, even if that had not begun."""
    return reason in (EndReason.TIMEOUT, EndReason.ABORT)


@dataclasses.dataclass(eq=False, slots=True)
class ActorProcess:
    """One process of an actor. The next process is another object, so no field outlives its process.

    Attributes:
        incarnation: 0 for the first process of the actor, one more for each next one.
        worker: The worker; None before it is launched, and after its exit.
        is_launching: Whether its launch is pending: it waits for the certain end of the last process, waits for the
            launcher, or has begun and has not returned the worker.
        launched_at: When the launch began (`time.monotonic`).
        envs_made: How many envs it is known to have made, as long as it starts. The last one is not reported by itself.
        failure: The failure of a factory; None if none has failed.
        failed_at: When that came (`time.monotonic`); 0.0 if none has. The other envs are closed after that.
        was_standby: Whether the process was taken from a standby, so that its envs exist already.
        has_started: Whether all envs were made.
        close_id: The call id of the request to close the envs; None before it.
        end_reason: Why it ends, other than by itself; None until there is a reason. See `record_end_reason`.
        counts: Whether the next process counts as a restart, and waits for the backoff. It does not if any of the
            reasons to end this one does not count.
        cause: The exception for which it is ended, once it was unpickled: that of the factory, or an error that says
            which env raised.
        has_ended: Whether it has ended, or could not be started. The facts about its end follow.
        pid: Its process id; None if there was no process.
        status: How it ended.
        stderr_tail: The last lines of its stderr; stacks of a fatal error begin with the frames of env code.
        stacks: The stacks that it wrote before it was killed for a deadline.
        corruption: How it has corrupted shared memory, for which it was killed; empty if it has not.
    """

    incarnation: int
    worker: Worker | None = None
    is_launching: bool = False
    launched_at: float = 0.0
    envs_made: int = 0
    failure: Failure | None = None
    failed_at: float = 0.0
    was_standby: bool = False
    has_started: bool = False
    close_id: int | None = None
    end_reason: EndReason | None = None
    counts: bool = True
    cause: BaseException | None = None
    has_ended: bool = False
    pid: int | None = None
    status: ExitStatus = ExitStatus()  # noqa: RUF009 # immutable
    stderr_tail: str = ""
    stacks: str = ""
    corruption: str = ""
    _stacks: Stacks | None = dataclasses.field(default=None, init=False)

    def record_end_reason(self, reason: EndReason) -> None:
        """Record a reason. The first stays, but a kill overrides RENEW, and every reason overrides FACTORY_RAISED."""
        is_kill = reason in (EndReason.ABORT, EndReason.CLOSE)
        is_first = self.end_reason in (None, EndReason.FACTORY_RAISED)
        if is_first or (self.end_reason is EndReason.RENEW and is_kill):
            self.end_reason = reason
        self.counts &= is_crash(reason) or reason is EndReason.ENV_RAISED

    def kill(self) -> None:
        """Kill the process if there is one."""
        if self.worker is not None:
            self.worker.kill()

    def request_stacks(self) -> None:
        """Have the process write its stacks, for the report of its exit."""
        if self.worker is not None:
            self._stacks = self.worker.ask_stacks()

    def reap(self, worker: Worker) -> None:
        """Reap the ended process, and record the facts about its end."""
        self.has_ended = True  # first: if a bug ends this method, no other exit comes
        self.pid, self.corruption = worker.pid, worker.corruption
        if self._stacks is not None:
            self.stacks, self._stacks = self._stacks.read(), None  # it holds a descriptor
        self.status = worker.reap()
        if self.status.is_helper_lost:
            self.record_end_reason(EndReason.HELPER_LOST)
        self.stderr_tail = order_fatal_error(worker.stderr_tail)


def most_failures(policy: RestartPolicy) -> float:
    """Return how many starts or resets in a row may fail before no other is tried, besides the limits on restarts."""
    return math.inf if 0 not in (policy.backoff, policy.backoff_max) else MOST_WITHOUT_BACKOFF


def restart_delay(policy: RestartPolicy, granted: Sequence[float], now: float, failed_starts: int = 0) -> float | None:
    """Decide whether a process may be restarted, and when.

    Args:
        policy: The policy.
        granted: When earlier restarts were granted, in seconds of the same clock as ``now``, oldest first.
        now: When the process has ended.
        failed_starts: How many processes in a row have ended before their envs were made.

    Returns:
        The delay in seconds; None if the policy allows no more restarts.
    """
    recent = sum(when >= now - policy.window for when in granted)
    is_spent = recent >= policy.max_restarts or len(granted) >= policy.max_lifetime_restarts
    if is_spent or failed_starts >= most_failures(policy):
        return None
    return float(min(policy.backoff_max, policy.backoff * 2.0 ** min(recent, 64)))  # 2.0 ** 1024 would overflow


class _CountedExit(NamedTuple):
    """A counted exit: when it was (`time.monotonic`), its error, and whether a restart was granted after it."""

    when: float
    error: ActorError
    is_granted: bool


class RestartTracker:
    """The exits of an actor's processes that count against its restart policy.

    These are crashes, failed starts, missed deadlines, and replacements because an env raised.

    Args:
        policy: The policy.

    Attributes:
        last: The error of the last one; None if there was none.
        failed_starts: How many of the last ones in a row ended a process before its envs were made.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        # Oldest first. Only the last one may have no restart: such an exit counts against no limit on later ones.
        self._exits: list[_CountedExit] = []
        self.last: ActorError | None = None
        self.failed_starts: int = 0

    @property
    def errors(self) -> list[ActorError]:
        """The errors of the exits that count against the nearest limit, oldest first."""
        _, since = self.nearest_limit()
        return [counted.error for counted in self._exits if counted.when >= since]

    def nearest_limit(self) -> tuple[str, float]:
        """Return the limit that allows the fewest further restarts, and since when it counts exits."""
        since = max((counted.when for counted in self._exits), default=0.0) - self._policy.window
        left_in_window = self._policy.max_restarts - len(self._granted(since))
        if self._policy.max_lifetime_restarts - len(self._granted(-math.inf)) <= left_in_window:
            return "max_lifetime_restarts", -math.inf
        return "max_restarts", since

    def _granted(self, since: float) -> list[float]:
        """Return when restarts were granted since a time (`time.monotonic`), oldest first."""
        return [counted.when for counted in self._exits if counted.is_granted and counted.when >= since]

    def describe(self, delay: float) -> str:
        """Return which restart of how many the last granted one is, and when it comes."""
        name, since = self.nearest_limit()
        limit = getattr(self._policy, name)
        of_how_many = "" if limit == math.inf else f" of {limit:g}"
        return f"restart {len(self._granted(since))}{of_how_many} in {round(delay, 3):g} s"

    def delay_after(self, process: ActorProcess, error: ActorError, *, is_first: bool) -> float | None:
        """Decide whether and when another process follows an ended one, and count the exit if that must count.

        Args:
            process: The ended process.
            error: The error of its exit.
            is_first: Whether no start of the actor has succeeded before, nor has one failed and counted. For an actor
                on demand, failed ones do not matter: each time that it is woken is a first try.

        Returns:
            The delay in seconds; None if no process follows.
        """
        if not process.counts:
            return 0.0

        now = time.monotonic()
        memory = self._policy.window if self._policy.max_lifetime_restarts == math.inf else math.inf
        self._exits = [counted for counted in self._exits if counted.is_granted and counted.when >= now - memory]
        self.failed_starts = 0 if process.has_started else self.failed_starts + 1
        # Skip the policy if no process can ever be started, or if the first start had no place or its factory raised.
        refusal = process.status.refusal
        had_no_place = refusal is not None and process.end_reason is EndReason.TIMEOUT
        first_try_failed = is_first and (had_no_place or process.failure is not None)
        is_hopeless = first_try_failed or isinstance(refusal, LaunchRefusedError)
        delay = None if is_hopeless else restart_delay(self._policy, self._granted(-math.inf), now, self.failed_starts)

        # A copy, since the traceback of a raised error refers to the handles in its frames, and the actor would never
        # be garbage-collected.
        self.last = copy_error(error)
        self._exits.append(_CountedExit(now, self.last, delay is not None))
        return delay
