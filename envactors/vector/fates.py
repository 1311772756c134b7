"""The fate of a step or reset that has failed: facts, a pure choice, and its effects on episodes and journals.

                         raise              renew                               replay
    its process ended    raised; the env    the last observation, truncated     the same again, in a process that was
    while it ran         needs a reset      (next_step), or a reset             brought to the same point; else as renew
    the env raised       raised             its process is replaced, then       likewise, once
                                            as after the end of a process

The columns are the values of ``on_failure``. A request that the worker had not begun runs in the next process, unless
it needs an episode that no replay can bring back. Nothing here starts or ends processes.

An example: envs 0 and 1 share a process, both are in an episode, and it crashes in the step of env 0. The vector has
``on_failure="renew"`` and ``autoreset="next_step"``.

    env  cause      needs_episode  fate                           then the episode            repeats_reset
    0    RUNNING    True           TRUNCATE: it cannot run again  is over; its next step      False
    1    NOT_BEGUN  True           TRUNCATE: its episode is lost  resets each of the envs     False

With a call of ``reset`` in place of the steps, env 0 gets RESET with ``repeats_reset``, since the user's seed may not
be the reason, and env 1 gets REDO, since a reset needs no episode.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from envactors.actor.activity import Activity
from envactors.actor.exits import ProcessExit
from envactors.actor.future import Outcome, ReadyOutcome
from envactors.actor.states import EndReason, is_crash
from envactors.errors import ActorError
from envactors.mailbox.messages import Failure
from envactors.replay import Journal
from envactors.vector.episodes import Episodes


class Cause(enum.Enum):
    """Why a request has no result."""

    RUNNING = enum.auto()  # its process ended while it ran
    NOT_BEGUN = enum.auto()  # its process ended before it began
    RAISED = enum.auto()  # the env raised, or its result cannot be read


class FailedRequest(NamedTuple):
    """A step or reset without a result.

    Attributes:
        cause: Why it has none.
        error: The error.
        incarnation: The process in which it failed, or whose end it did not survive.
        activity: The request.
        text: Description of an exception that an env raised.
        raised: That exception, pickled; None if the worker has not sent it.
        reason: Why the parent ended the process, if that concerns the request.
        counts_as_crash: Whether its inputs may be the cause: the env raised, or the process crashed or was late.
        in_reset: Whether it failed in a reset, perhaps within a step.
        has_run: Whether the env has made the step, and only its result cannot be read.
    """

    cause: Cause
    error: Outcome
    incarnation: int
    activity: Activity
    text: str = ""
    raised: Failure | None = None
    reason: EndReason | None = None
    counts_as_crash: bool = True
    in_reset: bool = False
    has_run: bool = False


def lost_request(
    ended: ProcessExit, cause: Cause, error: ActorError, activity: Activity, reason: EndReason | None
) -> FailedRequest:
    """Return a request that a process which has ended did not complete. For the other arguments see the result."""
    index, counts = ended.incarnation.index, is_crash(ended.reason)
    return FailedRequest(cause, ReadyOutcome(None, error), index, activity, reason=reason, counts_as_crash=counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that the fate of a failed request depends on, besides the failure and the episode of its env.

    Attributes:
        ran_only_reset: Whether the worker ran nothing but a reset, for the user or for autoreset.
        asked_reset: Whether the user asked for a reset.
        needs_episode: Whether the request needs the episode that the env had.
        has_process: Whether the actor has a process now, or will have another one.
        has_failed: Whether the same request has failed before.
        can_replay: Whether a replay brings the env to where it was.
        can_retry: Whether the same inputs may be tried once more after a replay.
    """

    ran_only_reset: bool
    asked_reset: bool
    needs_episode: bool
    has_process: bool
    has_failed: bool
    can_replay: bool = False
    can_retry: bool = False


class EnvFate(enum.Enum):
    """The fate of the request."""

    FAIL = enum.auto()  # the error is the outcome, and the episode is lost
    REPORT = enum.auto()  # the error is the outcome, and the episode continues
    REDO = enum.auto()  # it runs again, ahead of everything that waits
    RESET = enum.auto()  # the next process resets the env, and the result contains the failure
    TRUNCATE = enum.auto()  # the last observation is the result, truncated; the env is reset later


class Decision(NamedTuple):
    """The fate of a failed request, and what its actor has to do.

    Attributes:
        fate: Its fate.
        repeats_reset: Whether the next process repeats a reset as the user has requested it.
        replaces_process: Whether the env raised and its process is not fit for use any more.
    """

    fate: EnvFate
    repeats_reset: bool
    replaces_process: bool


def choose_fate(failure: FailedRequest, facts: Facts, episodes: Episodes, index: int) -> EnvFate:
    """Choose the fate of a failed request of an env."""
    cause, reason, on_failure = failure.cause, failure.reason, episodes.on_failure
    if not facts.has_process:
        return EnvFate.FAIL
    if cause is Cause.NOT_BEGUN and (not facts.needs_episode or (on_failure == "replay" and facts.can_replay)):
        return EnvFate.REDO
    if on_failure == "replay" and reason is EndReason.DISCARD and facts.can_replay:
        return EnvFate.REDO
    if on_failure == "replay" and facts.can_retry and cause is not Cause.NOT_BEGUN and reason is not EndReason.ABORT:
        return EnvFate.REDO
    if on_failure == "raise":
        return EnvFate.REPORT if cause is Cause.RAISED and not failure.in_reset else EnvFate.FAIL
    if facts.asked_reset or episodes.autoreset == "same_step" or not episodes.has_result(index):
        return EnvFate.RESET
    return EnvFate.TRUNCATE


def settle(
    failure: FailedRequest, facts: Facts, episodes: Episodes, index: int, journal: Journal | None = None
) -> Decision:
    """Choose the fate of a failed request, and apply it to the episode and the journal of the env.

    Args:
        failure: The failure.
        facts: The facts.
        episodes: The episodes of all envs.
        index: The env.
        journal: Its journal; None without one.
    """
    fate = choose_fate(failure, facts, episodes, index)
    has_begun = failure.cause is not Cause.NOT_BEGUN
    if fate in (EnvFate.FAIL, EnvFate.RESET, EnvFate.TRUNCATE):
        resets_next = fate is EnvFate.TRUNCATE and episodes.autoreset == "next_step"
        episodes.end_without_result(index, resets_next=resets_next)
        if journal is not None:
            journal.forget()
    elif journal is not None and fate is EnvFate.REDO and has_begun and failure.counts_as_crash:
        journal.count_crash()
    # Inputs that have failed twice are not tried a third time.
    may_repeat = episodes.on_failure != "replay" or not failure.counts_as_crash
    repeats_reset = fate is EnvFate.RESET and facts.asked_reset and not facts.has_failed and may_repeat
    if facts.ran_only_reset and has_begun and fate is not EnvFate.REDO and not repeats_reset:
        episodes.advance(index)  # the next episode has another seed, in case this one's is the cause
    continues = fate in (EnvFate.REDO, EnvFate.RESET, EnvFate.TRUNCATE)
    return Decision(fate, repeats_reset, failure.cause is Cause.RAISED and continues)
