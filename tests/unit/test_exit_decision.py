"""What follows from the end of a process: every row of the table, and what holds for all of them."""

from __future__ import annotations

import itertools

import pytest
from budget import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envactors.actor.exit_decision import ExitDecision, ExitFacts, Fate, Next, Running, decide
from envactors.actor.states import EndReason

RENEW, ABORT, CLOSE, TIMEOUT, DISCARDED = (
    EndReason.RENEW,
    EndReason.ABORT,
    EndReason.CLOSE,
    EndReason.TIMEOUT,
    EndReason.DISCARDED,
)
NOTHING, RENEWAL, REPLAY, CALL = Running

TABLE = {
    # The actor is being closed: whatever waits fails, whyever the process has ended.
    "closed while idle": (ExitFacts(CLOSE, closing=True), ExitDecision(Next.CLOSED)),
    "closed in a call": (
        ExitFacts(CLOSE, closing=True, running=CALL),
        ExitDecision(Next.CLOSED, Fate.FAIL),
    ),
    "dies while it is closed": (ExitFacts(None, closing=True, running=CALL), ExitDecision(Next.CLOSED, Fate.FAIL)),
    "closed, and the call had retries": (
        ExitFacts(CLOSE, closing=True, running=CALL, retries=3),
        ExitDecision(Next.CLOSED, Fate.FAIL),
    ),
    "closed while it starts": (
        ExitFacts(CLOSE, closing=True, started=False, adopting=True),
        ExitDecision(Next.CLOSED),
    ),
    # Wanted ends: the next process at once, and nothing is counted.
    "renewed": (ExitFacts(RENEW, running=RENEWAL), ExitDecision(Next.LAUNCH, Fate.HOLD)),
    "aborted while idle": (ExitFacts(ABORT), ExitDecision(Next.LAUNCH)),
    "aborted in a call": (
        ExitFacts(ABORT, running=CALL, retries=3),
        ExitDecision(Next.LAUNCH, Fate.FAIL),
    ),
    # A standby that ends on its way is replaced as if there had been none.
    "a standby is lost on its way": (ExitFacts(None, started=False, adopting=True), ExitDecision(Next.LAUNCH_AGAIN)),
    "a standby hangs on its way to a renewal": (
        ExitFacts(TIMEOUT, started=False, adopting=True, running=RENEWAL),
        ExitDecision(Next.LAUNCH_AGAIN, Fate.HOLD),
    ),
    "one that was a standby dies later": (ExitFacts(None, started=True, adopting=True), ExitDecision(Next.RESTART)),
    # What cannot be started is not tried again.
    "refused": (ExitFacts(None, started=False, refused=True), ExitDecision(Next.DEAD)),
    "refused in a renewal": (
        ExitFacts(None, started=False, running=RENEWAL, refused=True),
        ExitDecision(Next.DEAD, Fate.HOLD),
    ),
    # Anything else counts as a restart.
    "dies while idle": (ExitFacts(None), ExitDecision(Next.RESTART)),
    "dies in its factory": (ExitFacts(None, started=False), ExitDecision(Next.RESTART)),
    "hangs in its factory": (ExitFacts(TIMEOUT, started=False), ExitDecision(Next.RESTART)),
    "dies in the factory of a renewal": (
        ExitFacts(None, started=False, running=RENEWAL),
        ExitDecision(Next.RESTART, Fate.HOLD),
    ),
    "dies in a replay": (ExitFacts(None, running=REPLAY), ExitDecision(Next.RESTART)),
    "dies in a call": (ExitFacts(None, running=CALL), ExitDecision(Next.RESTART, Fate.FAIL)),
    "dies in a call with retries": (
        ExitFacts(None, running=CALL, retries=1),
        ExitDecision(Next.RESTART, Fate.AGAIN),
    ),
    "a call passes its deadline": (ExitFacts(TIMEOUT, running=CALL), ExitDecision(Next.RESTART, Fate.FAIL)),
    "a call with retries passes its deadline": (
        ExitFacts(TIMEOUT, running=CALL, retries=2),
        ExitDecision(Next.RESTART, Fate.AGAIN),
    ),
    "another env is discarded during a call": (
        ExitFacts(DISCARDED, running=CALL, retries=2),
        ExitDecision(Next.RESTART, Fate.FAIL),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table(case):
    facts, decision = TABLE[case]
    assert decide(facts) == decision


some_facts = st.builds(
    ExitFacts,
    reason=st.none() | st.sampled_from(EndReason),
    closing=st.booleans(),
    started=st.booleans(),
    adopting=st.booleans(),
    running=st.sampled_from(Running),
    retries=st.integers(0, 3),
    refused=st.booleans(),
)
each_fact = settings(max_examples=examples(500))


@each_fact
@given(some_facts)
def test_what_is_being_closed_launches_nothing_and_nothing_else_is_closed(facts):
    assert (decide(facts).next is Next.CLOSED) is facts.closing


@each_fact
@given(some_facts)
def test_a_wanted_end_is_not_counted_and_whatever_else_is(facts):
    assume(not facts.closing)
    uncounted = facts.reason in (RENEW, ABORT) or (facts.adopting and not facts.started)
    counted = Next.DEAD if facts.refused else Next.RESTART
    assert (decide(facts).next is counted) is not uncounted


@each_fact
@given(some_facts)
def test_a_running_call_is_never_forgotten(facts):
    """Only a replay is: the next process is asked anew."""
    decision = decide(facts)
    if facts.running is NOTHING:
        assert decision.fate is Fate.DROP
    elif facts.running is not REPLAY:
        assert decision.fate is not Fate.DROP


@each_fact
@given(some_facts)
def test_nothing_runs_again_that_was_aborted_or_whose_actor_is_closed(facts):
    assume(facts.reason is ABORT or facts.closing)
    assert decide(facts).fate in (Fate.FAIL, Fate.DROP)


@each_fact
@given(some_facts)
def test_only_what_kills_its_own_process_spends_a_retry(facts):
    decision = decide(facts)
    if decision.fate is Fate.AGAIN:
        assert facts.reason in (None, TIMEOUT, CLOSE)
        assert facts.retries > 0


@pytest.mark.parametrize(("retries", "deaths"), list(itertools.product(range(4), [None, TIMEOUT])))
def test_a_call_survives_as_many_crashes_as_it_has_retries(retries, deaths):
    survived, left = 0, retries
    while decide(ExitFacts(deaths, running=CALL, retries=left)).fate is Fate.AGAIN:
        survived += 1
        left -= 1
    assert survived == retries
