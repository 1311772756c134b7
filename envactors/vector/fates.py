"""Lost requests, which are steps and resets without a result, and the pure choice of their fate.

`EnvRecovery` and `InlineEngine` make the losses, and apply the decisions.

                         raise              renew                               replay
    its process ended    raised; the env    the last observation, truncated;    the same again, in a process that was
    while it ran         needs a reset      under same_step, a reset            brought to the same point; else as renew
    the env raised       raised             its process is replaced, then       likewise, once
                                            as after the end of a process

The columns are the values of ``on_failure``. A request that the worker had not begun runs in the next process, unless
it continues an episode that no replay can bring back.

An example: envs 0 and 1 share a process, both are in an episode, and it crashes in the step of env 0. The vector has
``on_failure="renew"`` and ``autoreset="next_step"``.

    env  cause      would_report_loss  fate                           then the episode
    0    RUNNING    True               TRUNCATE: it cannot run again  is over; its next step
    1    NOT_BEGUN  True               TRUNCATE: its episode is lost  resets each of the envs

If the process had a third env whose step was complete, that step would be delivered. Its episode is lost, too, but only
its next step finds that: with cause NOT_BEGUN, it gets TRUNCATE, one step later than the others.

With a call of ``reset`` in place of the steps, env 0 gets RESET, with the user's seed, since that may not be the
reason, and env 1 gets REDO, since a reset needs no episode.

Four facts about an env whose process has ended are easily confused:

    EPISODE_LOST          the episode was running in that process (`Episodes`); a replay may still bring it back
    is_lost_for_good      ... and no replay can bring it back (`EnvTable`)
    would_report_loss     the next request would tell the user of a lost episode; see the next table (`EnvTable`)
    needs_lost_episode    is_lost_for_good and would_report_loss: it cannot run, and is lost with cause NOT_BEGUN

Whether a request would report the loss of its episode, given the option and the flag `RETIRING` of `Episodes`:

    request                       on_failure         RETIRING   would_report_loss
    a reset for the user          any                any        no: it begins a new episode anyway
    a step                        any                any        yes: the user expects the last episode to continue
    a step that autoreset turns   "raise"            any        no: the error would cost the user the reset
    into a reset                  "renew", "replay"  set        no: the process was to be replaced here anyway
                                                     not set    yes: only so does the user see each crash

A reset in place of a step (`ResetAnswer`) counts as the first. `Episodes.step_would_report_loss` has the other rows.

Four words for why:

    cause      how far the request came: it was not begun, or it was running, or it ran and gave no usable result
    reason     why the parent ended the process, if that concerns the request (`EndReason`)
    error      what the user gets: an exception, perhaps still pickled (`Outcome`)
    failure    the worker's report of an exception of the env (`Failure`), of which the error is made
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from envactors.actor.activity import Activity
from envactors.actor.future import Outcome
from envactors.actor.states import EndReason
from envactors.mailbox.messages import Failure
from envactors.vector.options import AutoresetRules, OnFailure


class Cause(enum.Enum):
    """Why a request has no result."""

    RUNNING = enum.auto()  # its process ended while it ran
    NOT_BEGUN = enum.auto()  # its process ended before it began
    RAN = enum.auto()  # it ran to its end: the env raised, or its result cannot be read


class RequestLoss(NamedTuple):
    """A step or reset without a result.

    Attributes:
        cause: Why it has none.
        error: The error.
        incarnation: The process in which it failed, or whose end it did not survive.
        activity: The request; a step that was running its autoreset counts as a reset.
        may_continue: Whether the env has a process to continue in: its actor has one, or will have another one.
        failure: The worker's report of what the env raised; None without one.
        reason: Why the parent ended the process; None if it ended by itself, or was ended because of another request.
        may_blame_inputs: Whether its inputs may be the cause: the env raised, or the process crashed or was late.
        episode_is_over: Whether the env has no running episode any more: the request failed in a reset, perhaps in one
            within a step, or the step ended the episode before its result turned out to be unreadable.
        result_is_recorded: Whether episode and journal have recorded the result, and only unpickling it has failed.
    """

    cause: Cause
    error: Outcome
    incarnation: int
    activity: Activity
    may_continue: bool
    failure: Failure | None = None
    reason: EndReason | None = None
    may_blame_inputs: bool = True
    episode_is_over: bool = False
    result_is_recorded: bool = False


class EnvFate(enum.Enum):
    """The fate of a request."""

    FAIL = enum.auto()  # the error is the outcome, and the episode is lost
    REPORT = enum.auto()  # the error is the outcome, and the episode continues
    REDO = enum.auto()  # it runs again, ahead of everything that waits
    RESET = enum.auto()  # the next process resets the env, and the result contains the error
    TRUNCATE = enum.auto()  # the last observation is the result, truncated; the env is reset later


class RequestFacts(NamedTuple):
    """The facts about a request on which its fate depends, besides its loss.

    Attributes:
        user_called_reset: Whether the user called ``reset``, rather than ``step``.
        most_failures: How many resets in answer to it may fail.
        ran_reset: Whether the env had begun a reset, for the user or by autoreset. Then the seed may be the cause.
        would_report_loss: Whether the request would report that the episode is lost; see the top of this module.
        can_replay: Whether a replay will bring the env to where it was.
        can_retry: Whether the same inputs may be tried once more after a replay.
        failed_resets: How many resets in answer to it have failed; `Episodes` adds this.
    """

    user_called_reset: bool
    most_failures: float
    ran_reset: bool
    would_report_loss: bool
    can_replay: bool = False
    can_retry: bool = False
    failed_resets: int = 0


class Decision(NamedTuple):
    """The fate of a request, and what follows from it.

    Attributes:
        fate: The fate.
        ends_episode: Whether the env has no episode any more.
        awaits_autoreset: Whether the next step of an env without an episode resets it, or else the user has to.
        changes_seed: Whether the next reset has another seed, in case that of this one is the cause.
        replaces_process: Whether its process is replaced, since the env raised or its result cannot be read.
    """

    fate: EnvFate
    ends_episode: bool
    awaits_autoreset: bool
    changes_seed: bool
    replaces_process: bool


def decide(
    loss: RequestLoss, facts: RequestFacts, on_failure: OnFailure, autoreset: AutoresetRules, *, has_result: bool
) -> Decision:
    """Decide about a request without a result.

    Args:
        loss: Why it has no result.
        facts: The other facts about it.
        on_failure: The option of the vector.
        autoreset: What follows from the end of an episode.
        has_result: Whether the env has returned anything yet.
    """
    needs_reset = facts.user_called_reset or autoreset.resets_within_step or not has_result
    fate = _choose_fate(loss, facts, on_failure, needs_reset=needs_reset)
    # A crash in `reset(seed=7)`: the next process tries seed 7 once more, since something else may have ended the first
    # one. If that fails, too, the third derives another seed. Under "replay", a REDO was the second try already. A
    # failure for which the inputs are not to blame does not use up the try with the user's seed.
    is_first_retry = not facts.failed_resets and (on_failure != "replay" or not loss.may_blame_inputs)
    keeps_seed = fate is EnvFate.RESET and facts.user_called_reset and is_first_retry
    # A crash in the autoreset of seeded episodes: "replay" runs it again with its seed, which needs no replay. If none
    # is possible, since the journal was full, the old episode ends here, so that the REDO is a reset by autoreset.
    is_seeded_autoreset = fate is EnvFate.REDO and facts.would_report_loss and not facts.can_replay
    is_reset_later = fate in (EnvFate.RESET, EnvFate.TRUNCATE) and not facts.user_called_reset
    return Decision(
        fate,
        ends_episode=is_seeded_autoreset or fate not in (EnvFate.REPORT, EnvFate.REDO),
        awaits_autoreset=is_seeded_autoreset or (is_reset_later and not autoreset.needs_reset_after_end),
        changes_seed=facts.ran_reset and fate is not EnvFate.REDO and not keeps_seed,
        replaces_process=loss.cause is Cause.RAN and fate not in (EnvFate.FAIL, EnvFate.REPORT),
    )


def _choose_fate(loss: RequestLoss, facts: RequestFacts, on_failure: OnFailure, *, needs_reset: bool) -> EnvFate:
    """Choose the fate of a request.

    The first of these that applies: no process will follow; it can run again; failures are raised; the vector answers
    it, with the result of a reset if it ``needs_reset``.
    """
    if not loss.may_continue:
        return EnvFate.FAIL
    if loss.cause is Cause.NOT_BEGUN:
        runs_again = facts.can_replay or not facts.would_report_loss
    elif loss.reason is EndReason.ENV_RAISED and facts.can_replay:
        runs_again = True  # another env has raised, and ended the process
    else:
        runs_again = facts.can_retry and loss.reason is not EndReason.ABORT
    if runs_again:
        return EnvFate.REDO
    if on_failure == "raise":
        return EnvFate.REPORT if loss.cause is Cause.RAN and not loss.episode_is_over else EnvFate.FAIL
    if not needs_reset:
        return EnvFate.TRUNCATE
    return EnvFate.RESET if facts.failed_resets < facts.most_failures else EnvFate.FAIL
