"""The fate of a step or reset that has no result, as a pure choice. `EnvRecovery` and `InlineEngine` apply it.

                         raise              renew                               replay
    its process ended    raised; the env    the last observation, truncated     the same again, in a process that was
    while it ran         needs a reset      (next_step), or a reset             brought to the same point; else as renew
    the env raised       raised             its process is replaced, then       likewise, once
                                            as after the end of a process

The columns are the values of ``on_failure``. A request that the worker had not begun runs in the next process, unless
it continues an episode that no replay can bring back.

An example: envs 0 and 1 share a process, both are in an episode, and it crashes in the step of env 0. The vector has
``on_failure="renew"`` and ``autoreset="next_step"``.

    env  cause      reports_loss  fate                           then the episode            repeats_reset
    0    RUNNING    True          TRUNCATE: it cannot run again  is over; its next step      False
    1    NOT_BEGUN  True          TRUNCATE: its episode is lost  resets each of the envs     False

If the process had a third env whose step was complete, that step would be delivered. Its episode is lost, too, but only
its next step finds that: with cause NOT_BEGUN, it gets TRUNCATE, one step later than the others.

With a call of ``reset`` in place of the steps, env 0 gets RESET with ``repeats_reset``, since the user's seed may not
be the reason, and env 1 gets REDO, since a reset needs no episode.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from envactors.actor.activity import Activity
from envactors.actor.future import Outcome
from envactors.actor.states import EndReason
from envactors.mailbox.messages import Failure, Fault
from envactors.vector.options import AutoresetRules, OnFailure


class Cause(enum.Enum):
    """Why a request has no result."""

    RUNNING = enum.auto()  # its process ended while it ran
    NOT_BEGUN = enum.auto()  # its process ended before it began
    ERROR = enum.auto()  # the env raised, or its result cannot be read


class RequestLoss(NamedTuple):
    """A step or reset without a result.

    Attributes:
        cause: Why it has none.
        error: The error.
        incarnation: The process in which it failed, or whose end it did not survive.
        activity: The request; a step that was running its autoreset counts as a reset.
        may_continue: Whether the actor has a process now, or will have another one; in-process also whether another
            attempt is allowed.
        report: The worker's report of what the env raised; None without one.
        reason: Why the parent ended the process, if that concerns the request.
        may_blame_inputs: Whether its inputs may be the cause: the env raised, or the process crashed or was late.
        ended_episode: Whether the env has made a step that ended the episode, and only its result cannot be had.
        is_recorded: Whether the result is in the episode and the journal already, and only reading it has failed.
    """

    cause: Cause
    error: Outcome
    incarnation: int
    activity: Activity
    may_continue: bool
    report: Failure | None = None
    reason: EndReason | None = None
    may_blame_inputs: bool = True
    ended_episode: bool = False
    is_recorded: bool = False

    @property
    def failed_in_reset(self) -> bool:
        """Whether it failed in a reset, perhaps in one within a step."""
        return self.activity.method == "reset" or (self.report is not None and self.report.fault is Fault.RESET)


class EnvFacts(NamedTuple):
    """The facts about an env on which the fate of its request depends.

    Attributes:
        on_failure: The option of the vector.
        autoreset: What follows from the end of an episode.
        autoreset_was_due: Whether the next step of the env was to reset it, by autoreset.
        has_result: Whether the env has returned anything yet.
    """

    on_failure: OnFailure
    autoreset: AutoresetRules
    autoreset_was_due: bool
    has_result: bool


class RequestFacts(NamedTuple):
    """The facts about a request on which its fate depends, besides its loss.

    Attributes:
        may_blame_seed: Whether the env ran a reset, for the user or for autoreset, whose seed may be the cause.
        user_called_reset: Whether the user called ``reset``, rather than ``step``.
        reports_loss: Whether the request reports that the episode is lost, if it is: it continues the episode of the
            last result, or is the autoreset after it.
        has_earlier_error: Whether an earlier attempt at the request has failed.
        can_replay: Whether a replay will bring the env to where it was.
        can_retry: Whether the same inputs may be tried once more after a replay.
    """

    may_blame_seed: bool
    user_called_reset: bool
    reports_loss: bool
    has_earlier_error: bool
    can_replay: bool = False
    can_retry: bool = False


class EnvFate(enum.Enum):
    """The fate of the request."""

    FAIL = enum.auto()  # the error is the outcome, and the episode is lost
    REPORT = enum.auto()  # the error is the outcome, and the episode continues
    REDO = enum.auto()  # it runs again, ahead of everything that waits
    RESET = enum.auto()  # the next process resets the env, and the result contains the error
    TRUNCATE = enum.auto()  # the last observation is the result, truncated; the env is reset later


class Decision(NamedTuple):
    """The fate of a request, and what follows from it.

    Attributes:
        fate: Its fate.
        ends_episode: Whether the env has no episode any more.
        autoreset_is_due: Whether the next step of the env resets it, by autoreset.
        changes_seed: Whether the next episode has another seed, in case that of this one is the cause.
        repeats_reset: Whether a reset runs again as the user has requested it; otherwise it loses the user's seed.
        replaces_process: Whether the env raised and its process is not fit for use any more.
    """

    fate: EnvFate
    ends_episode: bool
    autoreset_is_due: bool
    changes_seed: bool
    repeats_reset: bool
    replaces_process: bool


def decide(loss: RequestLoss, request: RequestFacts, env: EnvFacts) -> Decision:
    """Choose the fate of a request, and derive what follows from it."""
    fate = choose_fate(loss, request, env)
    # Inputs that have failed twice are not tried a third time.
    may_repeat = env.on_failure != "replay" or not loss.may_blame_inputs
    repeats_reset = fate is EnvFate.RESET and request.user_called_reset and not request.has_earlier_error and may_repeat
    # An autoreset that runs again without a replay, since it is seeded, needs nothing of the episode before it.
    resets_again = fate is EnvFate.REDO and request.reports_loss and env.autoreset_was_due and not request.can_replay
    return Decision(
        fate,
        ends_episode=resets_again or fate not in (EnvFate.REPORT, EnvFate.REDO),
        autoreset_is_due=resets_again or (fate is EnvFate.TRUNCATE and env.autoreset.resets_next_step),
        changes_seed=request.may_blame_seed and fate is not EnvFate.REDO and not repeats_reset,
        repeats_reset=repeats_reset,
        replaces_process=loss.cause is Cause.ERROR and fate not in (EnvFate.FAIL, EnvFate.REPORT),
    )


def choose_fate(loss: RequestLoss, request: RequestFacts, env: EnvFacts) -> EnvFate:
    """Choose the fate of a request."""
    cause, reason = loss.cause, loss.reason
    if not loss.may_continue:
        return EnvFate.FAIL
    if cause is Cause.NOT_BEGUN and (not request.reports_loss or request.can_replay):
        return EnvFate.REDO
    if request.can_replay and reason is EndReason.DISCARD:
        return EnvFate.REDO
    if request.can_retry and cause is not Cause.NOT_BEGUN and reason is not EndReason.ABORT:
        return EnvFate.REDO
    if env.on_failure == "raise":
        has_episode = cause is Cause.ERROR and not loss.failed_in_reset and not loss.ended_episode
        return EnvFate.REPORT if has_episode else EnvFate.FAIL
    if request.user_called_reset or env.autoreset.resets_within_step or not env.has_result:
        return EnvFate.RESET
    return EnvFate.TRUNCATE
