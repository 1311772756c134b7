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
from typing import NamedTuple

from envactors.actor.states import EndReason
from envactors.errors import ActorError, copy_error
from envactors.options import RestartPolicy


class Running(enum.Enum):
    """What a process was running when it ended."""

    NOTHING = enum.auto()
    RENEWAL = enum.auto()  # it waits for the next process
    REPLAY = enum.auto()  # an env was being brought back to where it was
    CALL = enum.auto()  # any other call


class ExitFacts(NamedTuple):
    """What the decision depends on.

    Attributes:
        reason: Why the parent ended the process; None if it died by itself.
        closing: Whether the actor is being closed.
        started: Whether its envs had been made.
        adopting: Whether it was a standby on its way to this actor.
        running: What it was running.
        retries: How many deaths the running call still survives.
        refused: Whether it could not be started, and no other one can be; also if the factory raised at the actor's
            first start.
    """

    reason: EndReason | None = None
    closing: bool = False
    started: bool = True
    adopting: bool = False
    running: Running = Running.NOTHING
    retries: int = 0
    refused: bool = False


class Next(enum.Enum):
    """What the actor does next."""

    CLOSED = enum.auto()
    LAUNCH = enum.auto()  # the next incarnation, not counted
    LAUNCH_AGAIN = enum.auto()  # the same incarnation, not counted
    RESTART = enum.auto()  # the next incarnation, if the restart policy allows it
    DEAD = enum.auto()  # there is none, whatever the restart policy allows


class Fate(enum.Enum):
    """What happens to the request that was running."""

    DROP = enum.auto()  # nothing: there was none, or the next process makes it anew
    HOLD = enum.auto()  # it stays the running one until the next process has started
    AGAIN = enum.auto()  # it runs again before all others, with one retry less
    FAIL = enum.auto()


class ExitDecision(NamedTuple):
    """What follows.

    Attributes:
        next: What the actor does next.
        fate: What happens to the running request.
    """

    next: Next
    fate: Fate = Fate.DROP


def decide(facts: ExitFacts) -> ExitDecision:
    """Decide what follows from the end of a process."""
    runs = facts.running is not Running.NOTHING
    fail, hold = (Fate.FAIL, Fate.HOLD) if runs else (Fate.DROP, Fate.DROP)
    if facts.closing:
        return ExitDecision(Next.CLOSED, fail)
    if facts.reason is EndReason.RENEW:
        return ExitDecision(Next.LAUNCH, hold)
    if facts.reason is EndReason.ABORT:
        return ExitDecision(Next.LAUNCH, fail)
    if facts.adopting and not facts.started:
        return ExitDecision(Next.LAUNCH_AGAIN, hold)
    if facts.refused:
        return ExitDecision(Next.DEAD, hold)
    if facts.running is Running.RENEWAL:
        return ExitDecision(Next.RESTART, Fate.HOLD)
    if facts.running is not Running.CALL:
        return ExitDecision(Next.RESTART)
    may_retry = facts.reason is not EndReason.DISCARDED and facts.retries > 0
    return ExitDecision(Next.RESTART, Fate.AGAIN if may_retry else Fate.FAIL)


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
