"""A chaos run: a vector env under real faults, with every result checked.

    from chaos.run import run_chaos

    report = run_chaos(my_factory, faults=100, seed=1)
    assert report.ok, report

The faults are real: processes kill themselves, hang in C, are stopped, die while they write. Each happens once. Each
result is compared with that of an oracle: the same envs, stepped one after the other in one process without faults.
Needs ``psutil``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import math
import multiprocessing.resource_tracker
import tempfile
import time
from collections.abc import Callable
from typing import Any

import loky.backend.resource_tracker
from leaks import Inventory, describe, inventory, settled_inventory

import envactors as ea
from chaos.bundles import BundleCheck
from chaos.checker import Limits
from chaos.faults import FaultInjectingEnv, FaultTable, LargeEcho
from chaos.machine_watch import MachineWatch
from chaos.node_faults import NodeFaults
from chaos.node_keeper import NodeKeeper
from chaos.observers import Observers
from chaos.oracle import make_oracle
from chaos.plan import plan_faults
from chaos.process_watch import CHILD_PATIENCE
from chaos.report import ChaosReport, ReportBuilder
from chaos.rollouts import RolloutRunner, without_children
from chaos.runner import ChaosRunner
from envactors.backends.base import Backend
from envactors.remote import LocalNodes
from envactors.vector.options import OnFailure

STALL_MARGIN = 2.0  # seconds that a result may take beyond its deadline
# Restarts of an actor beyond those that its faults cost: a run whose processes all end again has to end, too.
_SPARE_RESTARTS = 50
_LEASE = 3.0  # of nodes, in seconds: their results may take as long as that longer


def run_chaos(
    factory: Callable[[], Any] | None = None,
    *,
    faults: int = 100,
    seed: int = 0,
    num_envs: int = 8,
    envs_per_actor: int = 1,
    on_failure: OnFailure = "renew",
    deadline: float = 1.0,
    backend: Backend | None = None,
    nodes: int = 0,
    observed: bool = False,
    rollouts: bool = False,
    bundles: bool = False,
    watch: Callable[[ChaosReport], None] | None = None,
) -> ChaosReport:
    """Run a vector env under faults and check every result.

    Nothing else in this process should open files or start threads or processes meanwhile: that would count as a leak.

    Args:
        factory: Makes one env, in the workers; None: an echo env, whose results show which calls produced them. The env
            needs an ``action_space`` to sample from, and its resets and steps must take less than the deadline.
        faults: Number of faults.
        seed: Seed of the plan, the actions and the envs.
        num_envs: Number of envs.
        envs_per_actor: Number of envs per process.
        on_failure: ``"renew"`` or ``"replay"``. With ``"replay"`` each fault waits until its actor has recovered from
            the previous one, and no result may have a failure.
        deadline: Deadline of each step and reset, in seconds; must exceed the env's own time on a busy machine.
        backend: Backend of the actors; None: processes of a fork server, which start in milliseconds.
        nodes: If it is not 0, the actors run on this many nodes of this machine, and one fault in twenty ends a node;
            another one joins in its place. Not with ``backend``.
        observed: Whether threads read stats and stacks and ask the monitor all the time, while a trace is recorded.
        rollouts: Whether the policy runs in the workers, of echo envs; no node is ended then.
        bundles: Whether each fault leaves a crash bundle, which is run again afterwards. Not with ``nodes``.
        watch: Called with the report so far, a few times per second.

    Raises:
        ValueError: An argument is invalid, or there are no actions to sample.
        ActorError: The env fails without a fault.
    """
    for name, value in (("faults", faults), ("num_envs", num_envs), ("envs_per_actor", envs_per_actor)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1")
    if rollouts and factory is not None:
        raise ValueError(f"rollouts is True and factory is {factory!r}: expected None, as the echo env is checked")
    if bundles and nodes:
        raise ValueError(f"bundles is True and nodes is {nodes}: expected 0, as a lost node leaves no bundles")
    if on_failure == "raise":
        raise ValueError("on_failure is 'raise': expected 'renew' or 'replay'; with 'raise' the first fault is the end")
    if not 0 < deadline < float("inf"):
        raise ValueError(f"deadline is {deadline}: expected a positive number of seconds")
    started = time.monotonic()
    report_builder = ReportBuilder(faults, seed, on_failure)
    near = ea.ProcessBackend()
    launcher = LocalNodes(nodes) if nodes else None
    before = _start_trackers_and_take_inventory()
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(MachineWatch())
        keeper = None
        if launcher is not None:
            backend = ea.RemoteBackend(launcher, lease=_LEASE, heartbeat=_LEASE / 5)
            keeper = NodeKeeper(launcher, backend, _LEASE, machine.lateness)
        node_faults = None if keeper is None or rollouts else NodeFaults(keeper, faults, seed, report_builder)
        oracle = stack.enter_context(
            make_oracle(factory, num_envs, seed, near if nodes or backend is None else backend, report_builder)
        )
        fault_table = FaultTable.make(num_envs)
        stack.callback(fault_table.remove)
        check = None
        if bundles:
            crash_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="envactors-chaos-"))
            check = BundleCheck(crash_dir, fault_table, report_builder, deadline)
            stack.enter_context(check.no_limits())
        makers = [functools.partial(LargeEcho, i) if factory is None else factory for i in range(num_envs)]
        begun = time.monotonic()
        with ea.VectorEnv(
            [
                functools.partial(FaultInjectingEnv, maker, fault_table.path, num_envs, i)
                for i, maker in enumerate(makers)
            ],
            envs_per_actor=envs_per_actor,
            on_failure=on_failure,
            deadlines=ea.Deadlines(step=deadline, reset=deadline, close=5.0),
            restart=ea.RestartPolicy(
                max_restarts=math.inf, backoff=0.0, max_lifetime_restarts=2 * faults + _SPARE_RESTARTS
            ),
            # Else a replay repeats all steps since the first reset, and each takes longer than the one before.
            seed_episodes=rollouts and on_failure == "replay",
            backend=backend or near,
            crash_dir=None if check is None else check.path,
        ) as envs:
            # All processes started at once: a single one takes less, unless the machine is busier than now.
            start_seconds = time.monotonic() - begun
            stall = deadline + STALL_MARGIN + (2 * _LEASE if nodes else 0)
            limits = Limits(deadline, stall, 2 * start_seconds, machine.lateness)
            plan = plan_faults(faults - (node_faults.count if node_faults else 0), seed, num_envs)
            runner: ChaosRunner | RolloutRunner
            if rollouts:
                runner = RolloutRunner(envs, fault_table, without_children(plan), report_builder, limits, watch)
            else:
                runner = ChaosRunner(envs, fault_table, plan, oracle, report_builder, limits, watch, node_faults)
            with (
                keeper or contextlib.nullcontext(),
                Observers(envs, report_builder.count_miscounted, seed) if observed else contextlib.nullcontext(),
            ):
                runner.run()
        if keeper is not None:
            report_builder.count_lost_nodes(keeper.replaced, keeper.unexplained)
        if check is not None:
            check.run()
        runner.report_leftover_processes()
        del envs, runner
    gc.collect()
    report_builder.leaks += _leaks(before)
    report_builder.seconds = time.monotonic() - started
    return report_builder.report()


def _start_trackers_and_take_inventory() -> Inventory:
    """Start the resource trackers, which live as long as this process, and return the inventory."""
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
