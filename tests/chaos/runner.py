"""Runner that drives a vector env through a plan of faults."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import envactors as ea
from chaos.checker import Limits, ResultChecker
from chaos.driver import ActorDriver
from chaos.faults import FaultTable
from chaos.history import Delivered, EnvHistory
from chaos.node_faults import NodeFaults
from chaos.oracle import Oracle
from chaos.plan import PlannedFault
from chaos.process_watch import ProcessWatch
from chaos.report import ChaosReport, ReportBuilder
from envactors.mailbox.specs import split_batch

# Seconds beyond the limits after which a result counts as lost.
_PATIENCE = 20.0
_IDLE_SECONDS = 0.002
_RECV_TIMEOUT = 0.05
_WATCH_PERIOD = 0.1
_LONGEST_EPISODE = 200  # steps after which an env is reset with a new seed
_LAST_ROUNDS = 3


class _RunEndedError(Exception):
    """The run cannot continue; the reason is in the report."""


class ChaosRunner:
    """Drives a vector env through a plan of faults and checks every result.

    Args:
        envs: Vector env of `FaultInjectingEnv`.
        fault_table: Table through which faults reach the envs.
        plan: Planned faults.
        oracle: Source of actions and expected results.
        report_builder: Counts everything.
        limits: Time limits.
        watch: Called with the report so far, a few times per second.
        node_faults: Ends nodes; None without nodes.
    """

    def __init__(
        self,
        envs: ea.VectorEnv,
        fault_table: FaultTable,
        plan: Sequence[PlannedFault],
        oracle: Oracle,
        report_builder: ReportBuilder,
        limits: Limits,
        watch: Callable[[ChaosReport], None] | None,
        node_faults: NodeFaults | None = None,
    ) -> None:
        self._envs = envs
        self._oracle = oracle
        self._report = report_builder
        self._patience = limits.stall + limits.start + _PATIENCE
        self._lateness = limits.lateness
        self._watch = watch
        self._node_faults = node_faults
        self._watched = 0.0
        self._dice = random.Random(report_builder.seed)  # no secret
        self._process_watch = ProcessWatch(envs.actors, fault_table, report_builder, limits)
        self._checker = ResultChecker(envs, oracle, report_builder, limits)
        self._histories = [EnvHistory(i, envs[i]) for i in range(envs.num_envs)]
        size = -(-envs.num_envs // len(envs.actors))
        self._drivers = [
            ActorDriver(
                actor,
                self._histories[index * size : (index + 1) * size],
                plan,
                fault_table,
                self._process_watch,
                report_builder,
                limits.deadline,
            )
            for index, actor in enumerate(envs.actors)
        ]
        self._driver_of = {history.env_id: driver for driver in self._drivers for history in driver.histories}
        self._seeds = report_builder.seed

    # Main loop -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all planned faults have happened, and a few rounds more."""
        try:
            self._reset(self._histories)
            while any(driver.faults for driver in self._drivers) or not (
                self._node_faults is None or self._node_faults.is_done
            ):
                self._check_progress()
                if self._node_faults is not None:
                    self._node_faults.inject_if_due(self._drivers)
                for driver in self._drivers:
                    driver.inject_due_faults()
                if self._dice.random() < 0.03 or len(self._envs_due_for_reset()) > 1 + len(self._drivers) // 3:
                    self._step_synchronously()
                else:
                    self._send()
                    self._receive()
            self._drain()
            for _ in range(_LAST_ROUNDS):
                self._send()
                self._drain()
            self._reset([history for history in self._histories if self._oracle.expected_results])
            self._send()
            self._drain()
            self._check_counts()
        except _RunEndedError:
            pass
        except (ea.ActorError, ea.VectorEnvError) as error:
            with contextlib.suppress(_RunEndedError):
                self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._update_report(at_once=True)
        lost_nodes = 0 if self._node_faults is None else len(self._node_faults.keeper.replaced)
        stats = self._envs.stats()
        for index, (driver, actor) in enumerate(zip(self._drivers, stats.actors, strict=True)):
            explained = driver.process_ends + lost_nodes
            if actor.restarts > explained:
                self._report.unexplained += actor.restarts - explained
                self._report.add_problem(
                    f"actor {index} was restarted {actor.restarts} times, and lost {explained} processes by faults; "
                    f"the last failure: {actor.last_failure}"
                )

    def _check_counts(self) -> None:
        for history, steps in zip(self._histories, self._envs.stats().steps, strict=True):
            if steps != history.delivered_steps:
                problem = f"env {history.env_id} has delivered {history.delivered_steps} steps, and stats say {steps}"
                self._report.count_miscounted(problem)

    def report_leftover_processes(self) -> None:
        """Report processes that are left once the envs are closed."""
        self._process_watch.close()

    def _update_report(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now < self._watched + _WATCH_PERIOD and not at_once:
            return
        self._watched = now
        self._report.renewals = sum(actor.incarnation for actor in self._envs.actors)
        self._process_watch.update()
        if self._watch is not None:
            self._watch(self._report.report())

    def _check_progress(self) -> None:
        self._update_report()
        idle = time.monotonic() - self._report.progress
        if idle > self._patience and idle > self._patience + self._lateness(self._report.progress):
            waiting = [fault for driver in self._drivers for fault in driver.faults]
            self._give_up(f"nothing happens any more, and these faults are pending: {waiting[:3]}")

    def _give_up(self, why: str) -> None:
        """Count all pending results as lost and end the run."""
        pending = [history.env_id for history in self._histories if history.requested_at is not None]
        self._report.lost += max(len(pending), 1)
        self._report.add_problem(f"round {self._report.round}, the envs {pending} have results pending: {why}")
        raise _RunEndedError

    # Requests --------------------------------------------------------------------------------------------

    def _record_requests(self, histories: Iterable[EnvHistory]) -> tuple[list[Any], list[int]]:
        """Record a request to each env and return the actions and env ids."""
        actions, ids = [], []
        for history in histories:
            history.record_request(self._oracle.action(history.env_id, self._report.round))
            actions.append(history.action)
            ids.append(history.env_id)
        self._report.round += 1
        return actions, ids

    def _idle_envs(self) -> list[EnvHistory]:
        """Return the envs that may get a request, in random order."""
        idle = [
            history
            for driver in self._drivers
            if not driver.is_held
            for history in driver.histories
            if history.requested_at is None
        ]
        self._dice.shuffle(idle)
        return idle

    def _envs_due_for_reset(self) -> list[EnvHistory]:
        """Return the envs that need an explicit reset."""
        due = set().union(*(driver.envs_due_for_reset() for driver in self._drivers))
        return [
            history
            for history in self._histories
            if history.steps >= _LONGEST_EPISODE
            or (not history.is_predictable and self._oracle.expected_results is not None)
            or history.env_id in due
        ]

    def _send(self) -> None:
        idle = self._idle_envs()
        if idle:
            self._envs.send(*self._record_requests(idle))

    def _receive(self) -> None:
        owing = sum(history.requested_at is not None for history in self._histories)
        if not owing:
            time.sleep(_IDLE_SECONDS)
            return
        least = self._dice.randint(1, owing) if self._dice.random() < 0.1 else 1
        most = least if self._dice.random() < 0.2 else None
        batch = self._envs.recv(min_envs=least, max_envs=most, timeout=_RECV_TIMEOUT)
        self._record_batch(
            [self._histories[env_id] for env_id in batch.env_ids.tolist()],
            batch.obs,
            batch.rewards,
            batch.terminated.tolist(),
            batch.truncated.tolist(),
            batch.infos,
            batch.incarnations.tolist(),
        )

    def _drain(self) -> None:
        while any(history.requested_at is not None for history in self._histories):
            self._check_progress()
            self._receive()
        for driver in self._drivers:
            driver.record_fired_faults()

    def _step_synchronously(self) -> None:
        """Collect all results, then make the next requests through `step` or `submit`."""
        self._drain()
        self._reset(self._envs_due_for_reset())
        # A renewed env's seed depends on its incarnation, which `step` does not return and which may change later.
        if self._dice.random() < 0.5 and not any(history.renewed for history in self._histories):
            self._step_all()
        else:
            self._submit()

    def _step_all(self) -> None:
        actions, _ = self._record_requests(self._histories)
        obs, rewards, terminated, truncated, infos = self._envs.step(actions, timeout=self._patience)
        unknown = [None] * len(infos)
        self._record_batch(self._histories, obs, rewards, terminated.tolist(), truncated.tolist(), infos, unknown)

    def _submit(self) -> None:
        idle = self._idle_envs()
        histories = idle[: self._dice.randint(0, len(idle))]
        if not histories:
            return
        futures = self._envs.submit(*self._record_requests(histories))
        try:
            for future in ea.as_completed(futures, timeout=self._patience):
                step = future.result()
                self._record_results([Delivered(self._histories[step.env_id], *step[1:])])
        except concurrent.futures.TimeoutError:
            self._give_up("submitted steps have not come")

    def _reset(self, histories: Sequence[EnvHistory]) -> None:
        """Reset envs explicitly, with new seeds."""
        if not histories:
            return
        _, ids = self._record_requests(histories)
        seeds = [self._seeds + i for i in range(len(histories))]
        self._seeds += len(histories)
        obs, infos = self._envs.reset(seed=seeds, env_ids=ids, timeout=self._patience)
        for history, seed in zip(histories, seeds, strict=True):
            history.begin_episode(seed)
        count = len(histories)
        self._record_batch(
            histories, obs, [0.0] * count, [False] * count, [False] * count, infos, [None] * count, seeds
        )

    # Results ---------------------------------------------------------------------------------------------

    def _record_batch(self, histories: Sequence[EnvHistory], obs: Any, *columns: Iterable[Any]) -> None:
        """Check a batch of results; ``columns`` are the further fields of `Delivered`."""
        rows = split_batch(self._envs.observation_spec, obs, len(histories), "observations")
        self._record_results([Delivered(*row) for row in zip(histories, rows, *columns, strict=True)])

    def _record_results(self, results: Iterable[Delivered]) -> None:
        admitted = self._checker.admit(results)
        for result in admitted:
            self._driver_of[result.history.env_id].record_result(result.history.env_id, result.incarnation)
        self._checker.judge(admitted)
