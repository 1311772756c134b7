"""What becomes of a step or reset that has failed: the whole table, and what holds in every situation."""

from __future__ import annotations

import itertools

import pytest

from envactors.actor.decide import Cause, Failed, Fate, decide
from envactors.actor.states import EndReason

RUNNING, WAITING, RAISED = Cause
AUTORESETS = ("next_step", "same_step", "disabled")
POLICIES = ("raise", "renew", "replay")
# What the worker was asked: (whether for a reset, whether by the user).
STEP, AUTORESET, RESET = (False, False), (True, False), (True, True)


def failed(on_failure, cause, asked, autoreset="next_step", **more):
    was_reset, asked_reset = asked
    return Failed(cause, on_failure, autoreset, was_reset=was_reset, asked_reset=asked_reset, **more)


# An env that nothing can bring back ----------------------------------------------------------------------

FAIL, REPORT, REDO, RESET_FIRST, TRUNCATE = Fate.FAIL, Fate.REPORT, Fate.REDO, Fate.RESET, Fate.TRUNCATE

# (on_failure, cause, what was asked) -> per autoreset what follows.
TABLE = {
    **{("raise", cause, asked): [FAIL] * 3 for cause, asked in itertools.product(Cause, (STEP, AUTORESET, RESET))},
    ("raise", RAISED, STEP): [REPORT] * 3,
    **{
        (on_failure, cause, asked): [TRUNCATE, RESET_FIRST, TRUNCATE]
        for on_failure, cause, asked in itertools.product(("renew", "replay"), Cause, (STEP, AUTORESET))
    },
    **{
        (on_failure, cause, RESET): [RESET_FIRST] * 3
        for on_failure, cause in itertools.product(("renew", "replay"), Cause)
    },
}


@pytest.mark.parametrize("case", TABLE, ids=str)
@pytest.mark.parametrize("autoreset", AUTORESETS)
def test_without_a_replay_an_env_fails_is_reset_or_repeats_its_last_result(case, autoreset):
    assert decide(failed(*case, autoreset)) is TABLE[case][AUTORESETS.index(autoreset)]


@pytest.mark.parametrize(
    ("on_failure", "cause", "asked", "more", "fate"),
    [
        ("raise", WAITING, RESET, {"is_bound": False}, REDO),
        ("renew", WAITING, RESET, {"is_bound": False}, REDO),
        ("renew", WAITING, STEP, {"is_whole": True}, TRUNCATE),
        ("replay", WAITING, STEP, {"is_whole": True}, REDO),
        ("replay", RUNNING, STEP, {"can_retry": True, "is_whole": True}, REDO),
        ("replay", RUNNING, RESET, {"can_retry": True}, REDO),
        ("replay", RAISED, STEP, {"can_retry": True, "is_whole": True}, REDO),
        ("replay", RUNNING, STEP, {"is_whole": True}, TRUNCATE),
        ("replay", RUNNING, STEP, {"can_retry": True, "is_whole": True, "reason": EndReason.ABORT}, TRUNCATE),
        ("replay", RUNNING, STEP, {"is_whole": True, "reason": EndReason.DISCARDED}, REDO),
        ("replay", RUNNING, RESET, {"can_retry": True, "reason": EndReason.DISCARDED}, REDO),
        ("renew", RUNNING, STEP, {"has_last": False}, RESET_FIRST),
        ("renew", RAISED, STEP, {"has_last": False}, RESET_FIRST),
        ("replay", RUNNING, STEP, {"is_over": True, "can_retry": True, "is_whole": True}, FAIL),
        ("renew", WAITING, RESET, {"is_over": True, "is_bound": False}, FAIL),
    ],
)
def test_calls_that_can_run_again_do_so_unless_the_actor_has_ended(on_failure, cause, asked, more, fate):
    assert decide(failed(on_failure, cause, asked, **more)) is fate


# Every situation -----------------------------------------------------------------------------------------

FLAGS = ("is_bound", "is_whole", "can_retry", "is_over", "has_last")


def every_situation():
    situations = itertools.product(POLICIES, Cause, (STEP, AUTORESET, RESET), AUTORESETS)
    for situation, flags in itertools.product(situations, itertools.product((False, True), repeat=len(FLAGS))):
        # A process is ended for another env, or by the user, while the env of this request ran.
        for reason in (None, *EndReason) if situation[1] is RUNNING else (None,):
            yield failed(*situation, reason=reason, **dict(zip(FLAGS, flags, strict=True)))


SITUATIONS = list(every_situation())


def those_where(holds):
    return [(one, decide(one)) for one in SITUATIONS if holds(one)]


def test_a_call_without_a_process_fails():
    for one, fate in those_where(lambda one: one.is_over):
        assert fate is FAIL, one


def test_only_raise_fails_while_the_actor_lives():
    for one, fate in those_where(lambda one: not one.is_over):
        if fate in (FAIL, REPORT):
            assert one.on_failure == "raise", one
        elif one.on_failure == "raise":
            assert (one.cause, fate, one.is_bound) == (WAITING, REDO, False), one


def test_the_next_process_runs_what_had_not_begun_unless_its_episode_is_gone():
    for one, fate in those_where(lambda one: one.cause is WAITING and not one.is_over):
        comes_back = one.on_failure == "replay" and one.is_whole
        assert (fate is REDO) is (comes_back or not one.is_bound), one


def test_a_call_that_the_user_ended_does_not_run_again():
    for one, fate in those_where(lambda one: one.reason is EndReason.ABORT):
        assert fate is not REDO, one


def test_what_ran_and_ended_its_process_runs_again_only_if_it_may_be_tried_once_more():
    for one, fate in those_where(lambda one: one.cause is not WAITING and one.reason is not EndReason.DISCARDED):
        if fate is REDO:
            assert one.on_failure == "replay", one
            assert one.can_retry, one


def test_an_env_that_fails_keeps_its_episode_only_after_it_has_raised_in_a_step():
    for one, fate in those_where(lambda one: not one.is_over):
        goes_on = one.on_failure == "raise" and one.cause is RAISED and not one.was_reset
        assert (fate is REPORT) is goes_on, one


def test_only_failed_steps_are_truncated():
    for one, fate in those_where(lambda _: True):
        if fate is TRUNCATE:
            assert one.has_last, one
            assert not one.asked_reset, one
            assert one.autoreset != "same_step", one


def test_replay_without_a_seeded_reset_behaves_like_renew():
    no_way = {"is_whole": False, "can_retry": False}
    for one, _ in those_where(lambda one: one.on_failure == "replay"):
        assert decide(one._replace(**no_way)) is decide(one._replace(on_failure="renew", **no_way)), one
