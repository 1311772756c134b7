"""The pure decisions, as tables."""

from __future__ import annotations

import math

import pytest

import envactors as ea
from envactors.actor.activity import Activity
from envactors.actor.exits import restart_delay, survives_exit
from envactors.actor.future import ReadyOutcome
from envactors.actor.states import EndReason
from envactors.vector.fates import Cause, EnvFate, Facts, RequestLoss, choose_fate
from envactors.vector.options import AUTORESETS


@pytest.mark.parametrize(
    ("has_begun", "retries", "is_discard", "is_requested", "expected"),
    [
        (False, 0, False, False, True),
        (False, 0, False, True, True),
        (True, 0, False, False, False),
        (True, 1, False, False, True),
        (True, 1, True, False, False),
        (True, 1, False, True, False),
    ],
)
def test_the_call_that_a_process_was_sent(has_begun, retries, is_discard, is_requested, expected):
    found = survives_exit(has_begun=has_begun, retries=retries, is_discard=is_discard, is_requested=is_requested)
    assert found is expected


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


FACTS = Facts(
    ran_reset=False,
    asked_reset=False,
    continues_episode=True,
    has_earlier_error=False,
    on_failure="raise",
    autoreset=AUTORESETS["next_step"],
    resets_next=False,
    has_result=True,
)
LOSS = RequestLoss(Cause.RUNNING, ReadyOutcome(None, ValueError()), 0, Activity("step", 0, 17), has_process=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, EnvFate.FAIL),
        ({"has_process": False, "on_failure": "renew"}, EnvFate.FAIL),
        ({"cause": Cause.ERROR}, EnvFate.REPORT),
        ({"cause": Cause.ERROR, "in_reset": True}, EnvFate.FAIL),
        ({"cause": Cause.NOT_BEGUN}, EnvFate.FAIL),
        ({"cause": Cause.NOT_BEGUN, "continues_episode": False}, EnvFate.REDO),
        ({"on_failure": "renew"}, EnvFate.TRUNCATE),
        ({"on_failure": "renew", "has_result": False}, EnvFate.RESET),
        ({"on_failure": "renew", "asked_reset": True, "in_reset": True}, EnvFate.RESET),
        ({"on_failure": "renew", "autoreset": AUTORESETS["same_step"]}, EnvFate.RESET),
        ({"on_failure": "renew", "autoreset": AUTORESETS["disabled"]}, EnvFate.TRUNCATE),
        ({"on_failure": "renew", "cause": Cause.ERROR}, EnvFate.TRUNCATE),
        ({"on_failure": "replay"}, EnvFate.TRUNCATE),
        ({"on_failure": "replay", "can_replay": True, "can_retry": True}, EnvFate.REDO),
        ({"on_failure": "replay", "can_replay": True}, EnvFate.TRUNCATE),
        ({"on_failure": "replay", "can_replay": True, "cause": Cause.NOT_BEGUN}, EnvFate.REDO),
        ({"on_failure": "replay", "can_retry": True, "reason": EndReason.ABORT}, EnvFate.TRUNCATE),
        ({"on_failure": "replay", "can_replay": True, "reason": EndReason.DISCARD}, EnvFate.REDO),
    ],
)
def test_a_failed_request(changes, expected):
    changes = dict(changes)
    loss = LOSS._replace(**{name: changes.pop(name) for name in LOSS._fields if name in changes})
    assert choose_fate(loss, FACTS._replace(**changes)) is expected
