"""Decide the outcome of a failed step or reset: a pure function of the env's situation.

                         raise              renew                               replay
    its process ended    raised; the env    the last observation, truncated     the same again, in a process that was
    while it ran         needs a reset      (next_step), or a reset             brought to the same point; else as renew
    the env raised       raised             its process is discarded, then      likewise, once
                                            as after the end of a process

The columns are the values of ``on_failure``. What the worker had not begun runs in the next process, unless it needs an
episode that nothing can bring back.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from envactors.actor.slots import Autoreset, OnFailure
from envactors.actor.states import EndReason


class Cause(enum.Enum):
    """Why a request has no result."""

    RUNNING = enum.auto()  # its process ended while it ran
    WAITING = enum.auto()  # its process ended before it began
    RAISED = enum.auto()  # the env raised, or its result cannot be read


class Failed(NamedTuple):
    """A step or reset that has failed.

    Attributes:
        cause: Why.
        on_failure: What the vector does about failures.
        autoreset: What the vector does at the end of an episode.
        was_reset: Whether the worker ran a reset, for the user or for autoreset.
        asked_reset: Whether the user asked for a reset.
        reason: Why the parent ended the process, if that concerns the request; `DISCARDED` if another env had raised.
        is_bound: Whether it needs the episode that the env had.
        is_whole: Whether a replay brings the env to where it was.
        can_retry: Whether the same inputs may be tried once more after a replay.
        is_over: Whether the actor is closed, or can have no other process.
        has_last: Whether the env has a complete result from before.
    """

    cause: Cause
    on_failure: OnFailure
    autoreset: Autoreset
    was_reset: bool
    asked_reset: bool
    reason: EndReason | None = None
    is_bound: bool = True
    is_whole: bool = False
    can_retry: bool = False
    is_over: bool = False
    has_last: bool = True


class Fate(enum.Enum):
    """The outcome of the request."""

    FAIL = enum.auto()  # the error is the outcome, and the episode is lost
    REPORT = enum.auto()  # the error is the outcome, and the episode goes on
    REDO = enum.auto()  # the same again, before all else; a call has one retry less
    RESET = enum.auto()  # the next process resets the env, and the result contains the failure
    TRUNCATE = enum.auto()  # the last observation is the result, truncated; the env is reset later
    HOLD = enum.auto()  # of a renewal: it stays the running call until the next process has started
    DROP = enum.auto()  # of a replay: the next process gets its own


def decide(failed: Failed) -> Fate:
    """Decide the outcome of a failed request."""
    replays = failed.on_failure == "replay"
    if failed.is_over:
        return Fate.FAIL
    if failed.cause is Cause.WAITING and (not failed.is_bound or (replays and failed.is_whole)):
        return Fate.REDO
    if replays and failed.reason is EndReason.DISCARDED and failed.is_whole:
        return Fate.REDO
    is_aborted = failed.reason is EndReason.ABORT
    if replays and failed.can_retry and failed.cause is not Cause.WAITING and not is_aborted:
        return Fate.REDO
    if failed.on_failure == "raise":
        return Fate.REPORT if failed.cause is Cause.RAISED and not failed.was_reset else Fate.FAIL
    if failed.asked_reset or failed.autoreset == "same_step" or not failed.has_last:
        return Fate.RESET
    return Fate.TRUNCATE
