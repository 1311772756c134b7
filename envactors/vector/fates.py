"""The fate of a request that has no result: the pure decision, and the facts that it needs.

A *loss* (`RequestLoss`) describes a step or reset without a result: its process ended, the env raised, or the result
cannot be read. `decide` turns it into a `Decision`, whose main part is the *fate* of the request. `EnvRecovery` and
`InlineEngine` make the losses, and apply the decisions. The fates, by the option ``on_failure``:

                         "raise"            "renew"                             "replay"
    its process ended    FAIL; the env      TRUNCATE, or under "same_step"      REDO, in a process that was brought to
    while it ran         needs a reset      RESET                               the same point; else as "renew"
    the env raised       REPORT, or FAIL    its process is replaced, then       likewise, once
                         in a reset         as after the end of a process

A request that the worker had not begun gets REDO in the next process, unless it continues an episode that no replay can
bring back.

An example: envs 0 and 1 share a process, both are in an episode, and it crashes in the step of env 0. The vector has
``on_failure="renew"`` and ``autoreset="next_step"``.

    env  progress   reports_lost_episode  fate                           then the episode
    0    BEGUN      True                  TRUNCATE: it cannot run again  is over; its next step
    1    NOT_BEGUN  True                  TRUNCATE: its episode is lost  resets each of the envs

If the process had a third env whose step was complete, that step would be delivered. Its episode is lost, too, but only
its next step finds that: with the progress NOT_BEGUN, it gets TRUNCATE, one step later than the others.

With a call of ``reset`` in place of the steps, env 0 gets RESET, with the user's seed, since that may not be the
reason, and env 1 gets REDO, since a reset needs no episode.

Four facts about an env whose process has ended are easily confused:

    EPISODE_LOST          the episode was running in that process (`Episodes`); a replay may still bring it back
    is_lost_for_good      ... and no replay can bring it back (`EnvTable`)
    reports_lost_episode  the next request would tell the user of a lost episode; see the next table (`EnvTable`)
    needs_lost_episode    is_lost_for_good and reports_lost_episode: it is resolved as one that has not begun

Whether a request of an env with an episode reports that it is lost, given the option and the flag `RETIRING`:

    request                       on_failure         RETIRING   reports_lost_episode
    a reset for the user          any                any        no: it begins a new episode anyway
    a step                        any                any        yes: the user expects the last episode to continue
    a step that autoreset turns   "raise"            any        no: the error would cost the user the reset
    into a reset                  "renew", "replay"  set        no: the process was to be replaced here anyway
                                                     not set    yes: only so does the user see each crash

A reset in place of a step (`ResetAnswer`) counts as the first. `Episodes.step_reports_lost_episode` has the other rows.

Three words that are easily confused, too:

    reason     why the parent ended the process, if that concerns the request (`EndReason`)
    failure    the worker's report of an exception of the env (`Failure`)
    error      what the user gets: an exception, perhaps still pickled (`Outcome`); made of the failure if there is one
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from envactors.actor.actor_process import EndReason
from envactors.actor.future import Outcome
from envactors.actor.job import Activity
from envactors.mailbox.messages import Failure
from envactors.vector.options import AutoresetRules, OnFailure


class Progress(enum.Enum):
    """How far a request without a result has come."""

    NOT_BEGUN = enum.auto()  # its process ended before it began
    BEGUN = enum.auto()  # its process ended while it ran
    ENDED = enum.auto()  # the env raised, or the result cannot be read


class RequestLoss(NamedTuple):
    """A step or reset without a result.

    Attributes:
        progress: How far it has come.
        error: The error.
        incarnation: The process in which it failed, or whose end it did not survive.
        activity: The request; a step counts as a reset if its process ended in its autoreset.
        may_continue: Whether the env has a process to continue in: its actor has one, or will have another one.
        failure: The worker's report of what the env raised; None without one. It excludes a ``reason``.
        reason: Why the parent ended the process; None unless this request, or another env that raised, is why.
        may_blame_inputs: Whether its inputs may be the cause: the env raised, or its process crashed in it or was late.
            In-process it stays False, since no `REDO` has used up the second try with the user's seed.
        episode_is_over: Whether the env has no running episode any more: the request failed in a reset, perhaps in one
            within a step, or the step ended the episode before its result turned out to be unreadable.
        result_is_recorded: Whether episode and journal have recorded the result, and only unpickling it has failed.
    """

    progress: Progress
    error: Outcome
    incarnation: int
    activity: Activity
    may_continue: bool
    failure: Failure | None = None
    reason: EndReason | None = None
    may_blame_inputs: bool = False
    episode_is_over: bool = False
    result_is_recorded: bool = False


class EnvFate(enum.Enum):
    """The fate of a request."""

    FAIL = enum.auto()  # the error is the outcome, and the episode ends
    REPORT = enum.auto()  # the error is the outcome, and the episode continues
    REDO = enum.auto()  # it runs again, ahead of everything that waits
    RESET = enum.auto()  # the next process resets the env, and the result contains the error
    TRUNCATE = enum.auto()  # the last observation is the result, truncated; the env is reset later


class RequestFacts(NamedTuple):
    """The facts about a request on which its fate depends, besides its loss.

    Attributes:
        user_called_reset: Whether the user called ``reset``, rather than ``step``.
        has_result: Whether the env has returned anything yet.
        ran_reset: Whether the env had begun a reset, for the user or by autoreset. Then the seed may be the cause.
        failed_resets: How many resets in answer to it have failed.
        most_failures: How many of these may fail.
        reports_lost_episode: Whether it reports that the episode is lost; see the top of this module.
        can_replay: Whether a replay will bring the env to where it was.
        can_retry: Whether the same inputs may be tried once more after a replay.
    """

    user_called_reset: bool
    has_result: bool
    ran_reset: bool
    failed_resets: int
    most_failures: float
    reports_lost_episode: bool
    can_replay: bool = False
    can_retry: bool = False


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


def decide(loss: RequestLoss, facts: RequestFacts, on_failure: OnFailure, autoreset: AutoresetRules) -> Decision:
    """Decide about a request without a result.

    Args:
        loss: The request, and why it has no result.
        facts: The other facts about it.
        on_failure: The option of the vector.
        autoreset: What follows from the end of an episode.
    """
    fate = _choose_fate(loss, facts, on_failure, autoreset)

    # A crash in `reset(seed=7)`: the next process tries seed 7 once more, since something else may have ended the first
    # one. If that fails, too, the third derives another seed. Under "replay", a REDO was the second try already. A
    # failure for which the inputs are not to blame does not use up the try with the user's seed.
    is_first_retry = not facts.failed_resets and (on_failure != "replay" or not loss.may_blame_inputs)
    keeps_seed = fate is EnvFate.RESET and facts.user_called_reset and is_first_retry

    # A crash in the autoreset of seeded episodes: "replay" runs it again with its seed, which needs no replay. If none
    # is possible, since the journal was full, the old episode ends here, so that the REDO is a reset by autoreset.
    redoes_only_autoreset = fate is EnvFate.REDO and facts.reports_lost_episode and not facts.can_replay
    resets_later = fate in (EnvFate.RESET, EnvFate.TRUNCATE) and not facts.user_called_reset

    return Decision(
        fate,
        ends_episode=redoes_only_autoreset or fate not in (EnvFate.REPORT, EnvFate.REDO),
        awaits_autoreset=redoes_only_autoreset or (resets_later and not autoreset.needs_reset_after_end),
        changes_seed=facts.ran_reset and fate is not EnvFate.REDO and not keeps_seed,
        replaces_process=loss.progress is Progress.ENDED and fate not in (EnvFate.FAIL, EnvFate.REPORT),
    )


def _choose_fate(loss: RequestLoss, facts: RequestFacts, on_failure: OnFailure, autoreset: AutoresetRules) -> EnvFate:
    """Choose the fate of a request: the first of these that applies."""
    if not loss.may_continue:
        return EnvFate.FAIL
    if _runs_again(loss, facts):
        return EnvFate.REDO
    if on_failure == "raise":
        return EnvFate.REPORT if loss.progress is Progress.ENDED and not loss.episode_is_over else EnvFate.FAIL
    if facts.has_result and not facts.user_called_reset and not autoreset.resets_within_step:
        return EnvFate.TRUNCATE
    return EnvFate.RESET if facts.failed_resets < facts.most_failures else EnvFate.FAIL


def _runs_again(loss: RequestLoss, facts: RequestFacts) -> bool:
    """Return whether a request runs again as it was, after a replay if it needs its episode."""
    if loss.progress is Progress.NOT_BEGUN:
        return facts.can_replay or not facts.reports_lost_episode
    if loss.reason is EndReason.ENV_RAISED and facts.can_replay:
        return True  # another env has raised, and ended the process
    return facts.can_retry and loss.reason is not EndReason.ABORT
