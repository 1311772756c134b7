"""What follows from the end of a process: a pure function of facts, without processes and clocks.

closing ............ whatever waits fails, everything is freed
renewed, aborted ... the next process starts at once, and nothing is counted
standby lost ....... a standby that ended while it was being taken over is replaced as if there had been none
anything else ...... counts as a restart; the request that was running fails, or runs again
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from envactors.actor.states import EndReason


class Running(enum.Enum):
    """What a process was running when it ended."""

    NOTHING = enum.auto()
    RENEWAL = enum.auto()  # it waits for the next process
    REPLAY = enum.auto()  # an env was being brought back to where it was
    STEP = enum.auto()  # a step or a reset of an env
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
        replays: Whether envs are brought back by a replay (``on_failure="replay"``).
        can_retry: Whether the running step may be tried once more after a replay.
    """

    reason: EndReason | None = None
    closing: bool = False
    started: bool = True
    adopting: bool = False
    running: Running = Running.NOTHING
    retries: int = 0
    replays: bool = False
    can_retry: bool = False


class Next(enum.Enum):
    """What becomes of the actor."""

    CLOSED = enum.auto()
    LAUNCH = enum.auto()  # the next incarnation, not counted
    LAUNCH_AGAIN = enum.auto()  # the same incarnation, not counted
    RESTART = enum.auto()  # the next incarnation, if the restart policy allows it


class Fate(enum.Enum):
    """What becomes of the request that was running."""

    DROP = enum.auto()  # nothing: there was none, or the next process makes it anew
    HOLD = enum.auto()  # it stays the running one until the next process has started
    AGAIN = enum.auto()  # it runs again before all others
    FAIL = enum.auto()


class ExitDecision(NamedTuple):
    """What follows.

    Attributes:
        next: What becomes of the actor.
        fate: What becomes of the running request.
        counts_against_inputs: Whether the death counts against the inputs that were running (promise 9).
        spends_retry: Whether the running call has used up one of its retries.
        aborted: Whether the error says that the end was wanted.
        forgets_env: Whether the running env cannot be brought back to where it was any more.
    """

    next: Next
    fate: Fate = Fate.DROP
    counts_against_inputs: bool = False
    spends_retry: bool = False
    aborted: bool = False
    forgets_env: bool = False


def decide(facts: ExitFacts) -> ExitDecision:
    """Decide what follows from the end of a process."""
    runs = facts.running is not Running.NOTHING
    if facts.closing:
        return ExitDecision(Next.CLOSED, Fate.FAIL if runs else Fate.DROP, aborted=facts.reason is not None)
    if facts.reason is EndReason.RENEW:
        return ExitDecision(Next.LAUNCH, Fate.HOLD if runs else Fate.DROP)
    if facts.reason is EndReason.ABORT:
        fate = Fate.FAIL if runs else Fate.DROP
        return ExitDecision(Next.LAUNCH, fate, aborted=True, forgets_env=runs)
    if facts.adopting and not facts.started:
        return ExitDecision(Next.LAUNCH_AGAIN, Fate.HOLD if runs else Fate.DROP)
    return _restart(facts)


def _restart(facts: ExitFacts) -> ExitDecision:
    """Decide what becomes of the running request where the end counts as a restart."""
    discarded = facts.reason is EndReason.DISCARDED
    if facts.running in (Running.NOTHING, Running.REPLAY):
        return ExitDecision(Next.RESTART)
    if facts.running is Running.RENEWAL:
        return ExitDecision(Next.RESTART, Fate.HOLD)
    if facts.running is Running.STEP and facts.replays:
        if discarded:  # another env of the process is to blame
            return ExitDecision(Next.RESTART, Fate.AGAIN)
        if facts.can_retry:
            return ExitDecision(Next.RESTART, Fate.AGAIN, counts_against_inputs=True)
        return ExitDecision(Next.RESTART, Fate.FAIL, forgets_env=True)
    if discarded or facts.retries == 0:
        return ExitDecision(Next.RESTART, Fate.FAIL)
    return ExitDecision(Next.RESTART, Fate.AGAIN, spends_retry=True)
