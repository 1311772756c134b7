"""The pure decisions, as tables."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest

import envactors as ea
from envactors.actor import actor_process
from envactors.actor.actor_process import ActorProcess, EndReason, RestartTracker, restart_delay
from envactors.actor.calls import Call
from envactors.actor.future import ReadyOutcome
from envactors.actor.job import Activity, ProcessExit, Uncompleted
from envactors.mailbox.messages import Kind
from envactors.vector.fates import EnvFate, Progress, RequestFacts, RequestLoss, decide
from envactors.vector.options import AUTORESETS


@pytest.mark.parametrize(
    ("reason", "counts", "closes", "expected"),
    [
        (None, True, False, True),
        (EndReason.TIMEOUT, True, False, True),
        (EndReason.HELPER_LOST, False, False, True),
        (EndReason.ENV_RAISED, True, False, False),
        (EndReason.ABORT, False, False, False),
        (EndReason.TIMEOUT, False, False, False),
        (None, True, True, False),
        (EndReason.HELPER_LOST, False, True, False),
    ],
)
def test_whether_an_exit_lets_a_call_run_again(reason, counts, closes, expected):
    process, error = ActorProcess(0, end_reason=reason, counts=counts), ea.ActorDiedError("ended")
    process_exit = ProcessExit(process, None, Uncompleted(), error, closes, 0.0)
    assert process_exit.allows_retry is expected


@pytest.mark.parametrize(
    ("has_begun", "retries", "closes", "expected"),
    [
        (False, 0, False, (False, 0)),
        (False, 1, True, (False, 1)),
        (True, 0, False, (True, 0)),
        (True, 2, False, (False, 1)),
        (True, 1, True, (True, 1)),
    ],
)
def test_the_call_that_an_ended_process_was_sent(has_begun, retries, closes, expected):
    call = Call("echo", 0, Kind.CALL, Mock(), retries=retries)
    culprit = Activity("echo", 0, 1) if has_begun else None
    error = ea.ActorDiedError("ended")
    process_exit = ProcessExit(ActorProcess(0), call, Uncompleted(culprit), error, closes, 0.0)
    assert (call.handle_exit(process_exit), call.retries) == expected
    assert call.future.set_exception.called is expected[0]


@pytest.mark.parametrize(
    ("policy", "granted", "expected"),
    [
        ({"max_restarts": 0}, [], None),
        ({"max_restarts": 2, "backoff": 1.0}, [], 1.0),
        ({"max_restarts": 2, "backoff": 1.0}, [90.0], 2.0),
        ({"max_restarts": 2, "backoff": 1.0}, [90.0, 95.0], None),
        ({"max_restarts": 2, "backoff": 1.0, "window": 6.0}, [90.0, 95.0], 2.0),
        ({"max_restarts": math.inf, "backoff": 1.0, "backoff_max": 5.0}, [90.0] * 200, 5.0),
        ({"max_restarts": 9, "window": 1.0, "max_lifetime_restarts": 2}, [1.0, 2.0], None),
    ],
)
def test_the_delay_of_a_restart(policy, granted, expected):
    assert restart_delay(ea.RestartPolicy(**policy), granted, 100.0) == expected


REQUEST = RequestFacts(
    user_called_reset=False,
    has_result=True,
    ran_reset=False,
    failed_resets=0,
    most_failures=1,
    reports_lost_episode=True,
)
LOSS = RequestLoss(Progress.BEGUN, ReadyOutcome(None, ValueError()), 0, Activity("step", 0, 17), may_continue=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, EnvFate.FAIL),
        ({"may_continue": False, "on_failure": "renew"}, EnvFate.FAIL),
        ({"progress": Progress.ENDED}, EnvFate.REPORT),
        ({"progress": Progress.ENDED, "episode_is_over": True}, EnvFate.FAIL),
        ({"progress": Progress.NOT_BEGUN}, EnvFate.FAIL),
        ({"progress": Progress.NOT_BEGUN, "reports_lost_episode": False}, EnvFate.REDO),
        ({"on_failure": "renew"}, EnvFate.TRUNCATE),
        ({"on_failure": "renew", "has_result": False}, EnvFate.RESET),
        ({"on_failure": "renew", "user_called_reset": True}, EnvFate.RESET),
        ({"on_failure": "renew", "autoreset": AUTORESETS["same_step"]}, EnvFate.RESET),
        ({"on_failure": "renew", "autoreset": AUTORESETS["disabled"]}, EnvFate.TRUNCATE),
        ({"on_failure": "renew", "progress": Progress.ENDED}, EnvFate.TRUNCATE),
        ({"on_failure": "replay"}, EnvFate.TRUNCATE),
        ({"on_failure": "replay", "can_replay": True, "can_retry": True}, EnvFate.REDO),
        ({"on_failure": "replay", "can_replay": True}, EnvFate.TRUNCATE),
        ({"on_failure": "replay", "can_replay": True, "progress": Progress.NOT_BEGUN}, EnvFate.REDO),
        ({"on_failure": "replay", "can_retry": True, "reason": EndReason.ABORT}, EnvFate.TRUNCATE),
        ({"on_failure": "replay", "can_replay": True, "reason": EndReason.ENV_RAISED}, EnvFate.REDO),
    ],
)
def test_a_failed_request(changes, expected):
    changes = {"on_failure": "raise", "autoreset": AUTORESETS["next_step"], **changes}
    facts = [
        each._replace(**{name: changes.pop(name) for name in each._fields if name in changes})
        for each in (LOSS, REQUEST)
    ]
    assert decide(*facts, **changes).fate is expected


def crashed(policy, *times, monkeypatch):
    """Return a tracker of crashes at these times."""
    tracker, process = RestartTracker(ea.RestartPolicy(**policy)), ActorProcess(0, has_started=True)
    for when in times:
        monkeypatch.setattr(actor_process.time, "monotonic", lambda when=when: when)
        tracker.delay_after(process, ea.ActorDiedError(f"at {when}"), is_first=False)
    return tracker


def test_a_restart_is_counted_against_the_limit_that_is_reached_first(monkeypatch):
    limits = {"max_restarts": 2, "window": 10.0, "max_lifetime_restarts": 9}
    tracker = crashed(limits, 0.0, 20.0, 40.0, monkeypatch=monkeypatch)
    assert tracker.describe(0.01) == "restart 1 of 2 in 0.01 s"
    limits["max_lifetime_restarts"] = 3
    tracker = crashed(limits, 0.0, 20.0, 40.0, monkeypatch=monkeypatch)
    assert tracker.describe(25.6) == "restart 3 of 3 in 25.6 s"


@pytest.mark.parametrize("lifetime", [9, math.inf])
def test_a_restart_as_long_ago_as_the_window_counts_for_the_decision_and_for_its_texts(lifetime, monkeypatch):
    limits = {"max_restarts": 2, "window": 10.0, "max_lifetime_restarts": lifetime}
    tracker = crashed(limits, 0.0, 5.0, 10.0, monkeypatch=monkeypatch)
    assert tracker.describe(0.01) == "restart 2 of 2 in 0.01 s"
    assert [str(error) for error in tracker.errors] == ["at 0.0", "at 5.0", "at 10.0"]


def test_exhausted_restarts_are_those_that_count_against_the_limit(monkeypatch):
    limits = {"max_restarts": 2, "window": 10.0, "max_lifetime_restarts": 9}
    tracker = crashed(limits, 0.0, 20.0, 40.0, 41.0, 42.0, monkeypatch=monkeypatch)
    assert [str(error) for error in tracker.errors] == ["at 40.0", "at 41.0", "at 42.0"]
    limits["max_lifetime_restarts"] = 2
    tracker = crashed(limits, 0.0, 20.0, 40.0, monkeypatch=monkeypatch)
    assert [str(error) for error in tracker.errors] == ["at 0.0", "at 20.0", "at 40.0"]


@pytest.mark.parametrize("window", [10.0, math.inf])
@pytest.mark.parametrize(("max_restarts", "lifetime", "kept"), [(0, 0, 1), (0, math.inf, 1), (9, 2, 3), (2, 9, 3)])
def test_crashes_of_an_actor_that_is_revived_again_and_again_are_not_kept(
    monkeypatch, window, max_restarts, lifetime, kept
):
    limits = {"max_restarts": max_restarts, "window": window, "max_lifetime_restarts": lifetime}
    tracker = crashed(limits, *(when / 100 for when in range(100)), monkeypatch=monkeypatch)
    assert len(tracker._exits) == kept
    assert str(tracker.errors[-1]) == "at 0.99"
