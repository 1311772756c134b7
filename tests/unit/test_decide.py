"""What becomes of a step or reset that has failed: the whole table, and what holds in every situation."""

from __future__ import annotations

import itertools

import pytest

from envactors.actor.decide import Cause, Decision, Failed, Fate, decide

RUNNING, WAITING, RAISED = Cause
AUTORESETS = ("next_step", "same_step", "disabled")
POLICIES = ("raise", "renew", "replay")
# What the worker was asked: (whether for a reset, whether by the user).
STEP, AUTORESET, RESET = (False, False), (True, False), (True, True)


def failed(on_failure, cause, asked, autoreset="next_step", **more):
    was_reset, asked_reset = asked
    return Failed(cause, on_failure, autoreset, was_reset=was_reset, asked_reset=asked_reset, **more)


# An env that nothing can bring back ----------------------------------------------------------------------

FAILS = Decision(Fate.FAIL, loses_episode=True)
FAILS_AND_GOES_ON = Decision(Fate.FAIL)


def resets(cause, *, replays):
    return Decision(
        Fate.RESET,
        discards_process=cause is RAISED,
        loses_episode=True,
        forgets_journal=replays and cause is not WAITING,
    )


def truncates(cause, *, replays, resets_next):
    return resets(cause, replays=replays)._replace(fate=Fate.TRUNCATE, resets_next=resets_next)


# (on_failure, cause, what was asked) -> per autoreset what follows.
TABLE = {
    ("raise", RUNNING, STEP): [FAILS] * 3,
    ("raise", RUNNING, AUTORESET): [FAILS] * 3,
    ("raise", RUNNING, RESET): [FAILS] * 3,
    ("raise", WAITING, STEP): [FAILS] * 3,
    ("raise", WAITING, AUTORESET): [FAILS] * 3,
    ("raise", WAITING, RESET): [FAILS] * 3,
    ("raise", RAISED, STEP): [FAILS_AND_GOES_ON] * 3,
    ("raise", RAISED, AUTORESET): [FAILS] * 3,
    ("raise", RAISED, RESET): [FAILS] * 3,
    **{
        (on_failure, cause, asked): [
            truncates(cause, replays=on_failure == "replay", resets_next=True),
            resets(cause, replays=on_failure == "replay"),
            truncates(cause, replays=on_failure == "replay", resets_next=False),
        ]
        for on_failure, cause, asked in itertools.product(("renew", "replay"), Cause, (STEP, AUTORESET))
    },
    **{
        (on_failure, cause, RESET): [resets(cause, replays=on_failure == "replay")] * 3
        for on_failure, cause in itertools.product(("renew", "replay"), Cause)
    },
}


@pytest.mark.parametrize("case", TABLE, ids=str)
@pytest.mark.parametrize("autoreset", AUTORESETS)
def test_without_a_replay_an_env_fails_is_reset_or_repeats_its_last_result(case, autoreset):
    assert decide(failed(*case, autoreset)) == TABLE[case][AUTORESETS.index(autoreset)]


@pytest.mark.parametrize(
    ("on_failure", "cause", "asked", "more", "decision"),
    [
        ("raise", WAITING, RESET, {"is_bound": False}, Decision(Fate.REDO)),
        ("renew", WAITING, RESET, {"is_bound": False}, Decision(Fate.REDO)),
        ("renew", WAITING, STEP, {"is_whole": True}, TABLE["renew", WAITING, STEP][0]),
        ("replay", WAITING, STEP, {"is_whole": True}, Decision(Fate.REDO)),
        ("replay", RUNNING, STEP, {"can_retry": True, "is_whole": True}, Decision(Fate.REDO, counts_failure=True)),
        ("replay", RUNNING, RESET, {"can_retry": True}, Decision(Fate.REDO, counts_failure=True)),
        (
            "replay",
            RAISED,
            STEP,
            {"can_retry": True, "is_whole": True},
            Decision(Fate.REDO, discards_process=True, counts_failure=True),
        ),
        ("replay", RUNNING, STEP, {"is_whole": True}, TABLE["replay", RUNNING, STEP][0]),
        (
            "replay",
            RUNNING,
            STEP,
            {"can_retry": True, "is_whole": True, "was_aborted": True},
            TABLE["replay", RUNNING, STEP][0],
        ),
        ("replay", RUNNING, STEP, {"is_whole": True, "is_innocent": True}, Decision(Fate.REDO)),
        ("replay", RUNNING, RESET, {"can_retry": True, "is_innocent": True}, Decision(Fate.REDO)),
        ("renew", RUNNING, STEP, {"has_last": False}, TABLE["renew", RUNNING, RESET][0]),
        ("renew", RAISED, STEP, {"has_last": False}, TABLE["renew", RAISED, RESET][0]),
        ("replay", RUNNING, STEP, {"actor_lives": False, "can_retry": True, "is_whole": True}, FAILS),
        ("renew", WAITING, RESET, {"is_closing": True, "is_bound": False}, FAILS),
    ],
)
def test_calls_that_can_run_again_do_so_unless_the_actor_has_ended(on_failure, cause, asked, more, decision):
    assert decide(failed(on_failure, cause, asked, **more)) == decision


# Every situation -----------------------------------------------------------------------------------------

FLAGS = ("is_bound", "is_whole", "can_retry", "is_innocent", "was_aborted", "is_closing", "actor_lives", "has_last")


def every_situation():
    situations = itertools.product(POLICIES, Cause, (STEP, AUTORESET, RESET), AUTORESETS)
    for situation, flags in itertools.product(situations, itertools.product((False, True), repeat=len(FLAGS))):
        one = failed(*situation, **dict(zip(FLAGS, flags, strict=True)))
        # A process is ended for another env, or by the user, while the env of this request ran.
        if one.cause is RUNNING or not (one.is_innocent or one.was_aborted):
            yield one


SITUATIONS = list(every_situation())


def those_where(holds):
    return [(one, decide(one)) for one in SITUATIONS if holds(one)]


def test_a_call_without_a_process_fails():
    for one, decision in those_where(lambda one: one.is_closing or not one.actor_lives):
        assert decision == FAILS, one


def test_only_raise_fails_while_the_actor_lives():
    for one, decision in those_where(lambda one: one.actor_lives and not one.is_closing):
        if decision.fate is Fate.FAIL:
            assert one.on_failure == "raise", one
        elif one.on_failure == "raise":
            assert (one.cause, decision.fate, one.is_bound) == (WAITING, Fate.REDO, False), one


def test_the_next_process_runs_what_had_not_begun_unless_its_episode_is_gone():
    for one, decision in those_where(lambda one: one.cause is WAITING and one.actor_lives and not one.is_closing):
        comes_back = one.on_failure == "replay" and one.is_whole
        assert (decision.fate is Fate.REDO) is (comes_back or not one.is_bound), one


def test_a_call_that_the_user_ended_does_not_run_again_unless_another_env_failed():
    for one, decision in those_where(lambda one: one.was_aborted and not one.is_innocent):
        assert decision.fate is not Fate.REDO, one


def test_a_failure_counts_only_against_the_inputs_that_ran_and_run_again():
    """No crash between steps, and none that another env is to blame for."""
    for one, decision in those_where(lambda one: decide(one).counts_failure):
        assert one.on_failure == "replay", one
        assert one.can_retry, one
        assert one.cause is not WAITING, one
        assert not one.is_innocent, one
        assert decision.fate is Fate.REDO, one


def test_what_ran_and_ended_its_process_runs_again_only_as_often_as_failures_are_counted():
    for one, decision in those_where(lambda one: one.cause is not WAITING and not one.is_innocent):
        assert decision.counts_failure is (decision.fate is Fate.REDO), one


def test_a_process_is_discarded_only_if_its_env_raised():
    for one, decision in those_where(lambda _: True):
        assert decision.discards_process is (one.cause is RAISED and decision.fate is not Fate.FAIL), one


def test_an_env_keeps_its_episode_only_if_it_runs_again_or_may_continue_after_it_has_raised():
    for one, decision in those_where(lambda one: one.actor_lives and not one.is_closing):
        goes_on = one.on_failure == "raise" and one.cause is RAISED and not one.was_reset
        assert decision.loses_episode is not (decision.fate is Fate.REDO or goes_on), one


def test_only_failed_steps_are_truncated_and_a_reset_follows():
    for one, decision in those_where(lambda _: True):
        if decision.fate is Fate.TRUNCATE:
            assert one.has_last, one
            assert not one.asked_reset, one
            assert one.autoreset != "same_step", one
        assert decision.resets_next is (decision.fate is Fate.TRUNCATE and one.autoreset == "next_step"), one


def test_a_journal_is_forgotten_with_the_request_that_has_failed():
    for one, decision in those_where(lambda _: True):
        is_given_up = decision.fate in (Fate.RESET, Fate.TRUNCATE) and one.cause is not WAITING
        assert decision.forgets_journal is (is_given_up and one.on_failure == "replay"), one


def test_replay_without_a_seeded_reset_behaves_like_renew():
    no_way = {"is_whole": False, "can_retry": False}
    for one, _ in those_where(lambda one: one.on_failure == "replay"):
        replay = decide(one._replace(**no_way))
        assert replay._replace(forgets_journal=False) == decide(one._replace(on_failure="renew", **no_way)), one
