"""The scenarios whose interleavings are explored, by their names on the command line."""

from __future__ import annotations

from envactors.actor import callbacks, future, pool, reactor, wait_set
from envactors.actor.callbacks import DeferredCalls
from envactors.actor.wait_set import Parking
from simulation import pool_calls, waits
from simulation.schedule import Scenario

_WAITS = (reactor, wait_set)
_POOL = (pool,)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("one-waiter", _WAITS, waits.one_waiter, waits.installed),
        Scenario("same-key", _WAITS, waits.same_key, waits.installed),
        Scenario("same-key-without-reply", _WAITS, waits.same_key_without_reply, waits.installed),
        Scenario("different-keys", _WAITS, waits.different_keys, waits.installed),
        Scenario("timeout", _WAITS, waits.timeout, waits.installed),
        Scenario("nested", _WAITS, waits.nested, waits.installed),
        Scenario("nested-after-look", _WAITS, waits.nested_after_look, waits.installed),
        Scenario("loop", _WAITS, waits.loop, waits.installed),
        Scenario("ring-and-reply", _WAITS, waits.ring_and_reply, waits.installed),
        Scenario("sleepers-same-key", _WAITS, waits.sleepers(Parking, "a", "a"), waits.installed),
        Scenario("sleepers-different-keys", _WAITS, waits.sleepers(Parking, "a", "b"), waits.installed),
        Scenario("sleepers-for-rings", _WAITS, waits.ring_sleepers(Parking), waits.installed),
        Scenario("crossed-calls", (callbacks,), waits.crossed_calls(DeferredCalls), waits.installed),
        Scenario("submitted-jobs", (callbacks,), waits.submitted_jobs, waits.installed),
        Scenario("pool-submit", _POOL, pool_calls.pool_submit, waits.installed),
        Scenario("pool-two-actors", _POOL, pool_calls.pool_two_actors, waits.installed),
        Scenario("pool-cancel", _POOL, pool_calls.pool_cancel, waits.installed),
        Scenario("pool-cancel-waiting", _POOL, pool_calls.pool_cancel_waiting, waits.installed),
        Scenario("pool-idle-again", _POOL, pool_calls.pool_idle_again, waits.installed),
        Scenario("pool-wait", (pool, future), pool_calls.pool_wait, waits.installed),
        Scenario("pool-interrupt", _POOL, pool_calls.pool_interrupt, waits.installed),
    )
}
