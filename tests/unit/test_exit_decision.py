"""What follows from the end of a process: every row of the table, and what holds for all of them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from budget import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envactors.actor.decide import Fate
from envactors.actor.exit_decision import Next, decide, decide_call
from envactors.actor.states import EndReason
from envactors.mailbox.messages import Kind

RENEW, ABORT, CLOSE, TIMEOUT, DISCARDED = (
    EndReason.RENEW,
    EndReason.ABORT,
    EndReason.CLOSE,
    EndReason.TIMEOUT,
    EndReason.DISCARDED,
)
CALL, RENEWAL, REPLAY = Kind.CALL, None, Kind.REPLAY


class Exit(NamedTuple):
    """The end of a process."""

    reason: EndReason | None = None
    closing: bool = False
    adopting: bool = False
    refused: bool = False

    def follows(self):
        return decide(self.reason, is_closing=self.closing, is_adopting=self.adopting, is_refused=self.refused)


TABLE = {
    # The actor is being closed: it ends, whyever the process has ended.
    "closed": (Exit(CLOSE, closing=True), Next.CLOSED),
    "dies while it is closed": (Exit(None, closing=True), Next.CLOSED),
    "closed while it starts": (Exit(CLOSE, closing=True, adopting=True), Next.CLOSED),
    # Wanted ends: the next process at once, and nothing is counted.
    "renewed": (Exit(RENEW), Next.LAUNCH),
    "aborted": (Exit(ABORT), Next.LAUNCH),
    # If a standby ends while it takes over, another process is launched.
    "a standby is lost on its way": (Exit(None, adopting=True), Next.LAUNCH_AGAIN),
    "a standby hangs on its way": (Exit(TIMEOUT, adopting=True), Next.LAUNCH_AGAIN),
    "one that was a standby dies later": (Exit(None), Next.RESTART),
    # What cannot be started is not tried again.
    "refused": (Exit(None, refused=True), Next.DEAD),
    # Anything else counts as a restart.
    "dies": (Exit(None), Next.RESTART),
    "dies in its factory": (Exit(None), Next.RESTART),
    "hangs in its factory": (Exit(TIMEOUT), Next.RESTART),
    "passes its deadline": (Exit(TIMEOUT), Next.RESTART),
    "another env is discarded": (Exit(DISCARDED), Next.RESTART),
}

# What the actor does next, why the parent ended the process, the kind of the running call, and its retries.
CALLS = {
    "closed in a call": ((Next.CLOSED, CLOSE, CALL, 0), Fate.FAIL),
    "dies while it is closed": ((Next.CLOSED, None, CALL, 0), Fate.FAIL),
    "closed, and the call had retries": ((Next.CLOSED, CLOSE, CALL, 3), Fate.FAIL),
    "closed in a renewal": ((Next.CLOSED, CLOSE, RENEWAL, 0), Fate.FAIL),
    "renewed": ((Next.LAUNCH, RENEW, RENEWAL, 0), Fate.HOLD),
    "aborted in a call": ((Next.LAUNCH, ABORT, CALL, 3), Fate.FAIL),
    "aborted in a renewal": ((Next.LAUNCH, ABORT, RENEWAL, 0), Fate.FAIL),
    "a standby hangs on its way to a renewal": ((Next.LAUNCH_AGAIN, TIMEOUT, RENEWAL, 0), Fate.HOLD),
    "refused in a renewal": ((Next.DEAD, None, RENEWAL, 0), Fate.HOLD),
    "dies in the factory of a renewal": ((Next.RESTART, None, RENEWAL, 0), Fate.HOLD),
    "dies in a replay": ((Next.RESTART, None, REPLAY, 0), Fate.DROP),
    "dies in a call": ((Next.RESTART, None, CALL, 0), Fate.FAIL),
    "dies in a call with retries": ((Next.RESTART, None, CALL, 1), Fate.REDO),
    "a call passes its deadline": ((Next.RESTART, TIMEOUT, CALL, 0), Fate.FAIL),
    "a call with retries passes its deadline": ((Next.RESTART, TIMEOUT, CALL, 2), Fate.REDO),
    "another env is discarded during a call": ((Next.RESTART, DISCARDED, CALL, 2), Fate.FAIL),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_next_action_of_an_actor_whose_process_ended(case):
    facts, following = TABLE[case]
    assert facts.follows() is following


@pytest.mark.parametrize("case", CALLS)
def test_the_fate_of_the_running_call(case):
    facts, fate = CALLS[case]
    assert decide_call(*facts) is fate


some_facts = st.builds(
    Exit,
    reason=st.none() | st.sampled_from(EndReason),
    closing=st.booleans(),
    adopting=st.booleans(),
    refused=st.booleans(),
)
some_kind = st.none() | st.sampled_from([Kind.CALL, Kind.GET, Kind.SET, Kind.SAVE, Kind.REPLAY, Kind.EXTEND])
some_retries = st.integers(0, 3)
each_fact = settings(max_examples=examples(500))


@each_fact
@given(some_facts)
def test_only_an_actor_that_is_being_closed_ends_as_closed(facts):
    assert (facts.follows() is Next.CLOSED) is facts.closing


@each_fact
@given(some_facts)
def test_only_deliberate_ends_are_not_counted(facts):
    assume(not facts.closing)
    uncounted = facts.reason in (RENEW, ABORT) or facts.adopting
    counted = Next.DEAD if facts.refused else Next.RESTART
    assert (facts.follows() is counted) is not uncounted


@each_fact
@given(some_facts, some_kind, some_retries)
def test_a_running_call_is_never_forgotten(facts, kind, retries):
    """Only a replay is: the next process is asked anew."""
    fate = decide_call(facts.follows(), facts.reason, kind, retries)
    assert fate is not Fate.DROP or kind is REPLAY


@each_fact
@given(some_facts, some_kind, some_retries)
def test_nothing_runs_again_that_was_aborted_or_whose_actor_is_closed(facts, kind, retries):
    assume(facts.reason is ABORT or facts.closing)
    assert decide_call(facts.follows(), facts.reason, kind, retries) is Fate.FAIL


@each_fact
@given(some_facts, some_kind, some_retries)
def test_only_calls_that_end_their_own_process_use_up_a_retry(facts, kind, retries):
    if decide_call(facts.follows(), facts.reason, kind, retries) is Fate.REDO:
        assert facts.reason is not DISCARDED
        assert retries > 0


@pytest.mark.parametrize(("retries", "deaths"), list(itertools.product(range(4), [None, TIMEOUT])))
def test_a_call_survives_as_many_crashes_as_it_has_retries(retries, deaths):
    survived, left = 0, retries
    while decide_call(Exit(deaths).follows(), deaths, CALL, left) is Fate.REDO:
        survived += 1
        left -= 1
    assert survived == retries
