"""A storm of faults over a vector env, whose results are all accounted for.

    from envactors.testing.chaos import chaos

    report = chaos(my_factory, faults=100, seed=1)
    assert report.ok, report

The faults are real: processes kill themselves, hang in C, are stopped, die while they write. Each happens once. Each
result is compared with that of a rehearsal: the same envs, stepped one after the other in one process that nothing
happens to. Needs ``psutil``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import multiprocessing.resource_tracker
import time
from collections.abc import Callable
from typing import Any

import loky.backend.resource_tracker

import envactors as ea
from envactors.backends.base import Backend
from envactors.testing.census import CHILD_PATIENCE
from envactors.testing.leaks import Inventory, describe, inventory, settled_inventory
from envactors.testing.plan import plan_faults
from envactors.testing.referee import Limits
from envactors.testing.rehearsal import rehearse
from envactors.testing.sabotage import LargeEcho, Orders, Saboteur
from envactors.testing.storm import Storm
from envactors.testing.tally import ChaosReport, Tally
from envactors.vector.slot import OnFailure

STALL_MARGIN = 2.0  # seconds that a result may take beyond the deadline
_MAX_RESTARTS = 1_000_000


def chaos(
    factory: Callable[[], Any] | None = None,
    *,
    faults: int = 100,
    seed: int = 0,
    num_envs: int = 8,
    envs_per_actor: int = 1,
    on_failure: OnFailure = "renew",
    deadline: float = 1.0,
    shared_memory: bool = True,
    backend: Backend | None = None,
    watch: Callable[[ChaosReport], None] | None = None,
) -> ChaosReport:
    """Raises a storm of faults over a vector env and accounts for every result.

    Nothing else should open files or start threads and processes in this process meanwhile: it would count as a leak.

    Args:
        factory: Makes one env, in the workers; None: an echo env, whose results tell which calls made them. The env
            needs an ``action_space`` to sample from, and whatever its reset and steps do must take less than the
            deadline.
        faults: How many.
        seed: Decides the plan of faults, the actions, and the seeds of the envs.
        num_envs: How many envs.
        envs_per_actor: How many of them share a process.
        on_failure: ``"renew"`` or ``"replay"``. Where failures are replayed, each fault comes after the one before
            it in its actor is over, and no result may tell of a failure.
        deadline: Of each step and reset, in seconds; longer than what a busy machine makes of the env's own time.
        shared_memory: As for `envactors.VectorEnv`.
        backend: Where the actors live; None: processes of a fork server, which start in milliseconds.
        watch: Is given what the storm has shown so far, a few times a second.

    Raises:
        ValueError: An argument makes no sense, or there are no actions to sample.
        ActorError: The env fails without being made to.
    """
    for name, value in (("faults", faults), ("num_envs", num_envs), ("envs_per_actor", envs_per_actor)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1")
    if on_failure == "raise":
        raise ValueError("on_failure is 'raise': expected 'renew' or 'replay'; with 'raise' the first fault is the end")
    if not 0 < deadline < float("inf"):
        raise ValueError(f"deadline is {deadline}: expected a positive number of seconds")
    backend = backend or ea.ProcessBackend(start_method="forkserver")
    started = time.monotonic()
    tally = Tally(faults, seed, on_failure)
    before = _take_stock()
    with contextlib.ExitStack() as stack:
        rehearsal = stack.enter_context(rehearse(factory, num_envs, seed, backend, tally))
        orders = Orders.make(num_envs)
        stack.callback(orders.remove)
        makers = [functools.partial(LargeEcho, i) if factory is None else factory for i in range(num_envs)]
        begun = time.monotonic()
        with ea.VectorEnv(
            [functools.partial(Saboteur, maker, orders.path, num_envs, i) for i, maker in enumerate(makers)],
            envs_per_actor=envs_per_actor,
            on_failure=on_failure,
            deadlines=ea.Deadlines(step=deadline, reset=deadline, close=5.0),
            restart=ea.RestartPolicy(max_restarts=_MAX_RESTARTS, backoff=0.0),
            backend=backend,
            shared_memory=shared_memory,
        ) as envs:
            # All processes at once: no single one takes longer, unless the machine has more to do than now.
            start_seconds = time.monotonic() - begun
            limits = Limits(deadline, deadline + STALL_MARGIN, 2 * start_seconds)
            storm = Storm(envs, orders, plan_faults(faults, seed, num_envs), rehearsal, tally, limits, watch)
            storm.run()
        storm.account_for_processes()
        del envs, storm
    gc.collect()
    tally.leaks += _leaks(before)
    tally.seconds = time.monotonic() - started
    return tally.report()


def _take_stock() -> Inventory:
    """Starts what stays until this process ends, and takes stock."""
    loky.backend.resource_tracker.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    gc.collect()
    return inventory()


def _leaks(before: Inventory) -> list[str]:
    after = settled_inventory(before, CHILD_PATIENCE)
    leaks = [f"process {pid}: {describe(pid)}" for pid in sorted({*after.children} - {*before.children})]
    if after.descriptors > before.descriptors:
        leaks.append(f"{after.descriptors} descriptors, {before.descriptors} before")
    if threads := collections.Counter(after.threads) - collections.Counter(before.threads):
        leaks.append(f"the threads {sorted(threads.elements())}")
    if after.shm != before.shm:
        leaks.append(f"in /dev/shm {sorted({*after.shm} - {*before.shm})}")
    return leaks
