"""The scenarios whose interleavings are explored, by their names on the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from envactors.actor import callbacks, future, pool, reactor, signal_deferral, wait_set
from envactors.actor.signal_deferral import DeferredCalls
from envactors.actor.wait_set import Parking
from envactors.rollout import rollouts
from simulation import pool_calls, rollout_ends, waits
from simulation.schedule import Run, Scenario
from simulation.waits import Check

_WAITS = (reactor, wait_set)
_POOL = (pool,)

_BUILDERS: list[tuple[str, tuple[ModuleType, ...], Callable[[Run], Check]]] = [
    ("one-waiter", _WAITS, waits.waiters("a", settle=["a"])),
    ("same-key", _WAITS, waits.waiters("a", "a", send=["a"])),
    ("same-key-without-reply", _WAITS, waits.waiters("a", "a", settle=["a"])),
    ("different-keys", _WAITS, waits.waiters("a", "b", send=["b", "a"])),
    ("timeout", _WAITS, waits.timeout),
    ("nested", _WAITS, waits.nested),
    ("nested-after-look", _WAITS, waits.nested_after_look),
    ("loop", _WAITS, waits.loop),
    ("ring-and-reply", _WAITS, waits.ring_and_reply),
    ("sleepers-same-key", _WAITS, waits.sleepers(Parking, "a", "a")),
    ("sleepers-different-keys", _WAITS, waits.sleepers(Parking, "a", "b")),
    ("sleepers-for-rings", _WAITS, waits.ring_sleepers(Parking)),
    ("crossed-calls", (signal_deferral,), waits.crossed_calls(DeferredCalls)),
    ("submitted-jobs", (callbacks,), waits.submitted_jobs),
    ("pool-submit", _POOL, pool_calls.pool_submit),
    ("pool-two-actors", _POOL, pool_calls.pool_two_actors),
    ("pool-cancel", _POOL, pool_calls.pool_cancel),
    ("pool-cancel-waiting", _POOL, pool_calls.pool_cancel_waiting),
    ("pool-idle-again", _POOL, pool_calls.pool_idle_again),
    ("pool-wait", (pool, future), pool_calls.pool_wait),
    ("pool-interrupt", _POOL, pool_calls.pool_interrupt),
    ("rollout-ends", (rollouts,), functools.partial(rollout_ends.ends, 1)),
    ("rollout-ends-each", (rollouts,), functools.partial(rollout_ends.ends, 2)),
]
SCENARIOS = {name: Scenario(name, modules, build, waits.installed) for name, modules, build in _BUILDERS}
