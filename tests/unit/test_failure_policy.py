"""What becomes of an env's result when its request fails: the whole table, and what holds for all of it."""

from __future__ import annotations

import itertools

import pytest
from budget import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envactors.vector.failure_policy import Action, Failed, FailureDecision, decide_failure

AUTORESETS = ("next_step", "same_step", "disabled")

RAISED = FailureDecision(Action.RAISE)
RAISED_WITHOUT_EPISODE = FailureDecision(Action.RAISE, loses_episode=True)
RETRIED = FailureDecision(Action.RETRY, discards_process=True)


def reset(*, discards):
    return FailureDecision(Action.RESET, discards_process=discards, loses_episode=True)


def reported(*, discards, resets_next):
    return FailureDecision(Action.REPORT, discards_process=discards, loses_episode=True, resets_next=resets_next)


# What was asked of the worker: (by the user, whether it was a reset).
STEP, AUTORESET, RESET = ("step", False), ("step", True), ("reset", True)
# (on_failure, what has happened, what was asked) -> per autoreset what follows.
TABLE = {
    ("raise", "lost", STEP): [RAISED_WITHOUT_EPISODE] * 3,
    ("raise", "lost", AUTORESET): [RAISED_WITHOUT_EPISODE] * 3,
    ("raise", "lost", RESET): [RAISED_WITHOUT_EPISODE] * 3,
    ("raise", "raised", STEP): [RAISED] * 3,
    ("raise", "raised", AUTORESET): [RAISED_WITHOUT_EPISODE] * 3,
    ("raise", "raised", RESET): [RAISED_WITHOUT_EPISODE] * 3,
    **{
        (on_failure, what, asked): [
            reported(discards=what == "raised", resets_next=True),
            reset(discards=what == "raised"),
            reported(discards=what == "raised", resets_next=False),
        ]
        for on_failure, what, asked in itertools.product(("renew", "replay"), ("lost", "raised"), (STEP, AUTORESET))
    },
    **{
        (on_failure, what, RESET): [reset(discards=what == "raised")] * 3
        for on_failure, what in itertools.product(("renew", "replay"), ("lost", "raised"))
    },
}


def failed(on_failure, what, asked, autoreset, **more):
    by_user, was_reset = asked
    facts = {"actor_lives": True, "can_retry": False, "has_last": True, **more}
    return Failed(
        on_failure, autoreset, lost=what == "lost", was_reset=was_reset, asked_reset=by_user == "reset", **facts
    )


@pytest.mark.parametrize("case", TABLE, ids=str)
@pytest.mark.parametrize("autoreset", AUTORESETS)
def test_the_table(case, autoreset):
    assert decide_failure(failed(*case, autoreset)) == TABLE[case][AUTORESETS.index(autoreset)]


@pytest.mark.parametrize("asked", [STEP, AUTORESET, RESET], ids=str)
@pytest.mark.parametrize("autoreset", AUTORESETS)
def test_what_an_env_has_raised_is_tried_once_more_after_a_replay(autoreset, asked):
    assert decide_failure(failed("replay", "raised", asked, autoreset, can_retry=True)) == RETRIED
    # Where the process has ended, the actor itself has tried again; what comes here has failed twice.
    lost = failed("replay", "lost", asked, autoreset, can_retry=True)
    assert decide_failure(lost) == decide_failure(lost._replace(on_failure="renew"))


@pytest.mark.parametrize("what", ["lost", "raised"])
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_an_env_without_a_result_is_reset_at_once(on_failure, autoreset, what):
    """There is no observation that could stand in for the lost one."""
    decision = decide_failure(failed(on_failure, what, STEP, autoreset, has_last=False))
    assert decision == reset(discards=what == "raised")


@pytest.mark.parametrize("what", ["lost", "raised"])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_an_actor_that_has_no_other_process_raises(on_failure, what):
    decision = decide_failure(failed(on_failure, what, STEP, "next_step", actor_lives=False))
    assert decision == (RAISED_WITHOUT_EPISODE if what == "lost" else RAISED)


some_failures = st.builds(
    Failed,
    on_failure=st.sampled_from(["raise", "renew", "replay"]),
    autoreset=st.sampled_from(AUTORESETS),
    lost=st.booleans(),
    was_reset=st.booleans(),
    asked_reset=st.booleans(),
    actor_lives=st.booleans(),
    can_retry=st.booleans(),
    has_last=st.booleans(),
).filter(lambda failed: failed.was_reset or not failed.asked_reset)
each_failure = settings(max_examples=examples(500))


@each_failure
@given(some_failures)
def test_nothing_but_raise_raises_while_the_actor_lives(failed):
    assume(failed.actor_lives)
    assert (decide_failure(failed).action is Action.RAISE) is (failed.on_failure == "raise")


@each_failure
@given(some_failures)
def test_a_process_is_discarded_only_for_what_its_env_has_raised(failed):
    decision = decide_failure(failed)
    assert decision.discards_process is (not failed.lost and decision.action is not Action.RAISE)


@each_failure
@given(some_failures)
def test_an_env_whose_process_is_gone_has_no_episode(failed):
    decision = decide_failure(failed)
    if failed.lost or (decision.discards_process and decision.action is not Action.RETRY):
        assert decision.loses_episode
    if decision.action is Action.RETRY:
        assert not decision.loses_episode, "it is brought back to where it was"


@each_failure
@given(some_failures)
def test_a_report_needs_an_observation_and_is_followed_by_a_reset(failed):
    decision = decide_failure(failed)
    if decision.action is Action.REPORT:
        assert failed.has_last
        assert not failed.asked_reset
        assert failed.autoreset != "same_step"
    assert decision.resets_next is (decision.action is Action.REPORT and failed.autoreset == "next_step")


@each_failure
@given(some_failures)
def test_replay_without_another_try_is_renew(failed):
    replay = failed._replace(on_failure="replay", can_retry=False)
    assert decide_failure(replay) == decide_failure(replay._replace(on_failure="renew"))
