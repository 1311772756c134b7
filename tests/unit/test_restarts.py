"""Restart policies and deadlines: pure functions of what happened and a clock."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
import weakref

import numpy as np
import pytest
from budget import examples
from helpers import SOON
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.actor.actor_process import restart_delay
from envactors.testing import EchoEnv

quick = settings(max_examples=examples(100))

seconds = st.floats(0.0, 1e6)
# Backoffs of zero or of a sensible size: see the doubling without rounding to nothing.
backoffs = st.just(0.0) | st.floats(1e-3, 1e3)
windows = st.just(0.0) | st.floats(0.01, 100.0)
lifetimes = st.just(math.inf) | st.integers(0, 20)
policies = st.builds(ea.RestartPolicy, st.integers(0, 6), windows, backoffs, st.floats(0.0, 1e4), lifetimes)
# The time between a restart and the next loss: mostly short, so that windows fill up.
lives = st.lists(st.floats(0.0, 5.0) | st.floats(0.0, 300.0), max_size=40)


def simulate(policy, lives):
    """One actor whose processes live so long each.

    Returns:
        The times at which a restart was granted, the times at which it happened, and the delays between.
    """
    now, granted, restarted, delays = 0.0, [], [], []
    for life in lives:
        now += life
        delay = restart_delay(policy, granted, now)
        if delay is None:
            continue  # the user renews the actor immediately
        granted.append(now)
        now += delay
        restarted.append(now)
        delays.append(delay)
    return granted, restarted, delays


def most_in_any_window(times, window):
    """The most of these times that lie within less than ``window`` of each other."""
    return max((sum(1 for other in times if 0.0 <= other - time < window) for time in times), default=0)


@quick
@given(policies, lives)
def test_no_window_has_more_restarts_than_allowed(policy, lives):
    granted, restarted, _ = simulate(policy, lives)
    assert most_in_any_window(granted, policy.window) <= policy.max_restarts
    # A sum of floats may be rounded to within the window's edge.
    assert most_in_any_window(restarted, policy.window * (1 - 1e-6)) <= policy.max_restarts
    assert len(granted) <= policy.max_lifetime_restarts


@quick
@given(policies, lives)
def test_delays_are_bounded(policy, lives):
    *_, delays = simulate(policy, lives)
    assert all(min(policy.backoff, policy.backoff_max) <= delay <= policy.backoff_max for delay in delays)


@quick
@given(policies, lives, st.floats(0.0, 5.0))
def test_a_restart_is_rejected_only_when_the_allowance_is_spent(policy, lives, later):
    granted, *_ = simulate(policy, lives)
    now = (granted[-1] if granted else 0.0) + later
    recent = sum(1 for time in granted if time >= now - policy.window)
    spent = recent >= policy.max_restarts or len(granted) >= policy.max_lifetime_restarts
    assert (restart_delay(policy, granted, now) is None) is spent


@quick
@given(st.floats(1e-3, 1e3), st.floats(0.0, 1e9), st.integers(0, 2000))
def test_the_backoff_doubles_up_to_its_bound(backoff, backoff_max, count):
    policy = ea.RestartPolicy(count + 1, window=10.0, backoff=backoff, backoff_max=backoff_max)
    delay = restart_delay(policy, [1.0] * count, 2.0)
    expected = backoff * 2.0**count if count < 900 else math.inf
    assert delay == min(backoff_max, expected)


def test_restarts_outside_the_window_are_forgotten():
    policy = ea.RestartPolicy(max_restarts=2, window=10.0, backoff=0.5)
    assert restart_delay(policy, [0.0, 5.0], 10.0) is None
    assert restart_delay(policy, [0.0, 5.0], 10.1) == 1.0
    assert restart_delay(policy, [0.0, 5.0], 15.1) == 0.5


def test_the_limit_for_the_lifetime_looks_beyond_the_window():
    policy = ea.RestartPolicy(max_restarts=1, window=10.0, backoff=0.5, max_lifetime_restarts=3)
    assert restart_delay(policy, [0.0, 100.0], 200.0) == 0.5
    assert restart_delay(policy, [0.0, 100.0, 200.0], 300.0) is None


def test_only_starts_that_fail_in_a_row_without_a_delay_have_a_limit():
    policy = ea.RestartPolicy(max_restarts=math.inf, backoff=0)
    assert restart_delay(policy, [0.0] * 100, 0.0, failed_starts=9) == 0
    assert restart_delay(policy, [0.0] * 100, 0.0, failed_starts=10) is None
    assert restart_delay(ea.RestartPolicy(math.inf, backoff=0.1), [0.0], 0.0, failed_starts=11) == 0.2


def test_a_restart_policy_without_a_limit_is_valid():
    assert restart_delay(ea.RestartPolicy(max_restarts=math.inf, backoff_max=1.0), [0.0] * 10_000, 0.0) == 1.0


@quick
@given(lives, seconds)
def test_no_restarts_allowed_means_none(times, now):
    assert restart_delay(ea.RestartPolicy(max_restarts=0), sorted(times), now) is None
    assert restart_delay(ea.RestartPolicy(max_lifetime_restarts=0), sorted(times), now) is None


BAD = [-1, -0.001, -math.inf, math.nan, True, False, "3", b"3", [1.0], 1j]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ea.RestartPolicy)])
def test_a_bad_restart_policy_is_rejected(field):
    for value in BAD:
        with pytest.raises(ValueError) as caught:
            ea.RestartPolicy(**{field: value})
        assert f"RestartPolicy({field}={value!r})" in str(caught.value)
        assert "expected a number >= 0" in str(caught.value)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ea.Deadlines)])
def test_a_bad_deadline_is_rejected(field):
    for value in BAD:
        with pytest.raises(ValueError) as caught:
            ea.Deadlines(**{field: value})
        assert f"Deadlines({field}=...) is {value!r}" in str(caught.value)
        assert "expected seconds >= 0" in str(caught.value)


# The characters that texts have by default: hypothesis takes ten times as long to list those.
texts = st.text(st.characters(exclude_categories=["Cs"]))
good = st.none() | st.integers(0, 10**9) | st.floats(0.0, math.inf)


@quick
@given(call=good, reset=good, step=good, method=texts)
def test_the_deadline_of_a_method(call, reset, step, method):
    deadlines = ea.Deadlines(call=call, reset=reset, step=step)
    assert deadlines.of("step") == (call if step is None else step)
    assert deadlines.of("reset") == (call if reset is None else reset)
    if method == "policy":
        assert deadlines.of(method) is None
    elif method not in ("step", "reset"):
        assert deadlines.of(method) == call


def test_a_deadline_of_zero_is_a_deadline():
    assert ea.Deadlines(call=3.0, step=0, reset=0.0).of("step") == 0
    assert ea.Deadlines(call=3.0, step=0, reset=0.0).of("reset") == 0


def test_a_method_named_policy_has_the_deadline_of_calls():
    assert ea.Deadlines(call=3.0, policy=1.0).of("policy") == 3


def test_defaults_are_those_of_the_api():
    assert dataclasses.astuple(ea.Deadlines()) == (60.0, None, None, None, 5.0, None, 30.0)
    assert dataclasses.astuple(ea.RestartPolicy()) == (3, 600.0, 0.1, 30.0, math.inf)


@pytest.mark.parametrize("options", [ea.Deadlines(), ea.RestartPolicy()], ids=lambda options: type(options).__name__)
def test_options_are_frozen(options):
    name = dataclasses.fields(options)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, name, 1)


def test_no_backoff_stays_no_backoff():
    assert restart_delay(ea.RestartPolicy(5000, 600.0, backoff=0.0, backoff_max=30.0), [0.0] * 1024, 0.0) == 0.0


def test_numbers_of_numpy_and_huge_ones_are_numbers():
    assert ea.Deadlines(step=np.float32(1.5)).step == 1.5
    assert ea.RestartPolicy(max_restarts=np.int64(2)).max_restarts == 2
    assert ea.RestartPolicy(max_restarts=10**400).max_restarts == 10**400  # OverflowError: too large for a float


def test_a_closed_actor_is_forgotten_though_an_error_of_its_own_leads_to_its_handle():
    actor = ea.spawn(EchoEnv, backend="thread")
    core = actor._actor
    try:
        raise ea.ActorDiedError("with this frame, and so with the handle")
    except ea.ActorDiedError as error:
        core.restart_tracker.delay_after(core.process, error, is_first=False)
    actor.close()
    forgotten = weakref.ref(core)
    del actor, core
    end = time.monotonic() + SOON
    while forgotten() is not None and time.monotonic() < end:  # threads of the runtime that end may still know it
        gc.collect()
    assert forgotten() is None


def test_a_renewal_that_fails_is_no_call_that_has_failed():
    def make_once():
        if ea.current_actor().incarnation > 0:
            raise OSError("no second env")
        return EchoEnv()

    with ea.spawn(make_once, backend="thread", restart=ea.RestartPolicy(max_restarts=0)) as actor:
        assert isinstance(actor.renew().exception(SOON), ea.ActorStartError)
        assert actor.stats().failed == 0
