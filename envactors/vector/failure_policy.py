"""What becomes of an env's result: pure functions of the env's situation and the outcome.

                 raise               renew                                replay
    death        raised; the env     the last observation, truncated      the same again, on a process that was
                 needs a reset       (next_step), or a reset              brought to the same point; else as renew
    exception    raised              the process is discarded, then       likewise, once
                                     as after a death

The columns are the values of ``on_failure``.
"""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

Autoreset = Literal["next_step", "same_step", "disabled"]
OnFailure = Literal["raise", "renew", "replay"]


class Failed(NamedTuple):
    """A request of an env that has failed.

    Attributes:
        on_failure: What the vector does about failures.
        autoreset: What the vector does at the end of an episode.
        lost: Whether the process has ended, so that the env is gone; otherwise the env has raised.
        was_reset: Whether the worker was asked for a reset, by the user or by autoreset.
        asked_reset: Whether the user asked for a reset.
        actor_lives: Whether the actor can have another process.
        can_retry: Whether the same may be asked again after a replay.
        has_last: Whether the env has a complete result from before.
    """

    on_failure: OnFailure
    autoreset: Autoreset
    lost: bool
    was_reset: bool
    asked_reset: bool
    actor_lives: bool
    can_retry: bool = False
    has_last: bool = True


class Action(enum.Enum):
    """What is done about a failure."""

    RAISE = enum.auto()  # the error is the outcome
    RETRY = enum.auto()  # the same again, before all else, on a process that was brought to the same point
    RESET = enum.auto()  # the env is reset on a new process, and its result tells of the failure
    REPORT = enum.auto()  # the last observation at once, truncated; the env is reset later


class FailureDecision(NamedTuple):
    """What follows from a failure.

    Attributes:
        action: What is done.
        discards_process: Whether the process is ended, since its env is not fit to be used any more.
        loses_episode: Whether the env has no episode any more, and needs a reset.
        resets_next: Whether the next step resets it.
    """

    action: Action
    discards_process: bool = False
    loses_episode: bool = False
    resets_next: bool = False


def decide_failure(failed: Failed) -> FailureDecision:
    """Decide what becomes of a request that has failed."""
    if failed.on_failure == "replay" and not failed.lost and failed.can_retry:
        return FailureDecision(Action.RETRY, discards_process=True)
    renews = failed.on_failure != "raise" and failed.actor_lives
    if not renews:
        return FailureDecision(Action.RAISE, loses_episode=failed.lost or failed.was_reset)
    discards = not failed.lost
    if failed.asked_reset or failed.autoreset == "same_step" or not failed.has_last:
        return FailureDecision(Action.RESET, discards, loses_episode=True)
    return FailureDecision(Action.REPORT, discards, loses_episode=True, resets_next=failed.autoreset == "next_step")
