"""What follows from the end of a process, and when: pure functions of facts, without processes and clocks.

closing ............ whatever waits fails, everything is freed
renewed, aborted ... the next process starts at once, and nothing is counted
standby lost ....... a standby that ended while it was being taken over is replaced as if there had been none
anything else ...... counts as a restart; the request that was running fails, or runs again

Whether a restart is allowed, and after how long, is `restart_delay`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from envactors.actor.decide import Fate
from envactors.actor.states import EndReason
from envactors.errors import ActorError, copy_error
from envactors.mailbox.messages import Kind
from envactors.options import RestartPolicy


class Next(enum.Enum):
    """What the actor does next."""

    CLOSED = enum.auto()
    LAUNCH = enum.auto()  # the next incarnation, not counted
    LAUNCH_AGAIN = enum.auto()  # the same incarnation, not counted
    RESTART = enum.auto()  # the next incarnation, if the restart policy allows it
    DEAD = enum.auto()  # there is none, whatever the restart policy allows


def decide(
    reason: EndReason | None, *, is_closing: bool = False, is_adopting: bool = False, is_refused: bool = False
) -> Next:
    """Decide what the actor does once its process has ended.

    Args:
        reason: Why the parent ended the process; None if it ended by itself.
        is_closing: Whether the actor is being closed.
        is_adopting: Whether it was a standby on its way to this actor.
        is_refused: Whether it could not be started, and no other one can be; also if the factory raised at the actor's
            first start.
    """
    if is_closing:
        return Next.CLOSED
    if reason in (EndReason.RENEW, EndReason.ABORT):
        return Next.LAUNCH
    if is_adopting:
        return Next.LAUNCH_AGAIN
    return Next.DEAD if is_refused else Next.RESTART


def decide_call(following: Next, reason: EndReason | None, kind: Kind | None, retries: int) -> Fate:
    """Decide what happens to the call that was running.

    Args:
        following: What the actor does next.
        reason: Why the parent ended the process; None if it ended by itself.
        kind: The kind of the call; None for a renewal, which waits for the next process.
        retries: How many crashes the call still survives.
    """
    if following is Next.CLOSED or reason is EndReason.ABORT:
        return Fate.FAIL
    if kind is None:
        return Fate.HOLD
    if kind is Kind.REPLAY:
        return Fate.DROP
    may_retry = reason is not EndReason.DISCARDED and retries > 0
    return Fate.REDO if may_retry else Fate.FAIL


def restart_delay(policy: RestartPolicy, restarts: Sequence[float], now: float) -> float | None:
    """Decide whether and when one lost process is replaced.

    Args:
        policy: The policy.
        restarts: When earlier restarts were granted, in seconds of the same clock as ``now``, oldest first. Those
            before the window may be left out if the policy has no lifetime limit.
        now: When the process was lost.

    Returns:
        The seconds to wait before the restart, or None if no more restarts are allowed.
    """
    recent = sum(1 for time in restarts if now - time < policy.window)
    if recent >= policy.max_restarts or len(restarts) >= policy.max_lifetime_restarts:
        return None
    doublings = min(recent, 64)  # beyond that any backoff but 0 is above its bound
    return float(min(policy.backoff_max, policy.backoff * 2.0**doublings))


class RestartTracker:
    """The lost processes of an actor that count against its restart limits.

    Args:
        policy: The limits.

    Attributes:
        last: The error of the last lost process, None if there is none.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.last: ActorError | None = None
        self._policy = policy
        # (when a process was lost, its error, whether a restart was granted), oldest first.
        self._lost: list[tuple[float, ActorError, bool]] = []

    @property
    def errors(self) -> list[ActorError]:
        """The errors of the lost processes, oldest first."""
        return [error for _, error, _ in self._lost]

    def add(self, error: ActorError, now: float) -> float | None:
        """Count a lost process; return the result of `restart_delay`."""
        # With a lifetime limit older entries are needed, and their number is bounded by that limit.
        if self._policy.max_lifetime_restarts == math.inf:
            self._lost = [loss for loss in self._lost if now - loss[0] < self._policy.window]
        delay = restart_delay(self._policy, [when for when, _, granted in self._lost if granted], now)
        # A copy: once raised, the error refers to the frames on its way and to the handles in them. An actor that
        # stored the error itself would never be collected.
        self.last = copy_error(error)
        self._lost.append((now, self.last, delay is not None))
        return delay
