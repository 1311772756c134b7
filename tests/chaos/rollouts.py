"""Runner of a chaos run with rollouts: the policy runs in the workers, and every row of every rollout is checked."""

from __future__ import annotations

import collections
import dataclasses
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import envactors as ea
from chaos.checker import Limits
from chaos.faults import ArmedFault, FaultKind, FaultTable, LargeEcho, Place, head_of
from chaos.plan import PlannedFault
from chaos.process_watch import ProcessWatch
from chaos.report import ChaosReport, ReportBuilder
from envactors.testing import expected_checksum

# Longer than an episode of the echo env, so that each rollout has resets, too.
_STEPS = 12
_MOST_ACTION = 1000
_PATIENCE = 60.0  # seconds without a fault after which the run ends


def make_policy() -> Callable[[Any, ea.PolicyContext], npt.NDArray[np.int64]]:
    """Return a policy whose actions follow from its random numbers."""
    return lambda obs, context: context.rng.integers(_MOST_ACTION, size=len(obs))


class RolloutRunner:
    """Runs rollouts, two in flight, while faults happen to their envs.

    Args:
        envs: A vector of echo envs.
        fault_table: Table through which faults reach the envs.
        plan: The planned faults.
        report_builder: Counts what happens.
        limits: How long results may take.
        watch: Called with the report so far after each rollout.
    """

    def __init__(
        self,
        envs: ea.VectorEnv,
        fault_table: FaultTable,
        plan: Sequence[PlannedFault],
        report_builder: ReportBuilder,
        limits: Limits,
        watch: Callable[[ChaosReport], None] | None,
    ) -> None:
        self._envs = envs
        self._fault_table = fault_table
        self._report = report_builder
        self._limits = limits
        self._watch = watch
        self._process_watch = ProcessWatch(list(envs.actors), fault_table, report_builder, limits)
        self._per_actor = envs.num_envs // len(envs.actors)
        self._queues: list[collections.deque[PlannedFault]] = [collections.deque() for _ in envs.actors]
        for fault in plan:
            self._queues[fault.env_id // self._per_actor].append(fault)
        # The fault of each actor that is armed, and how many have happened to it.
        self._armed: list[PlannedFault | None] = [None] * len(self._queues)
        self._happened = [0] * len(self._queues)
        # How many had happened before each of the last rollouts was waited for: two are in flight.
        self._before = collections.deque([[0] * len(self._queues)] * 2, 3)
        # The round in which each actor's last fault was noticed.
        self._noticed = [0] * len(self._queues)
        # Of each env its last observation's head, and whether its episode is over.
        self._heads: list[list[int]] = []
        self._over = [False] * envs.num_envs

    def run(self) -> None:
        """Run until all faults have happened, and two rollouts more."""
        try:
            self._run()
        except (ea.ActorError, ea.VectorEnvError) as error:
            self._report.lost += 1
            self._report.add_problem(f"round {self._report.round}: {type(error).__name__}: {error}")

    def _run(self) -> None:
        envs = self._envs
        obs, _ = envs.reset(seed=self._report.seed, timeout=_PATIENCE)
        self._heads = [obs[index, :4].tolist() for index in range(envs.num_envs)]
        envs.set_policy(make_policy, seed=self._report.seed)
        in_flight = collections.deque([self._begin()])
        begun = time.monotonic()
        while self._is_open() and time.monotonic() < self._report.progress + _PATIENCE:
            in_flight.append(self._begin())
            self._inject()
            begun = self._finish(in_flight.popleft(), begun)
        while in_flight:
            begun = self._finish(in_flight.popleft(), begun)
        self._note_happened()

    def report_leftover_processes(self) -> None:
        """Report processes that are left once the envs are closed."""
        self._process_watch.close()

    # Faults ----------------------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        return any(self._queues) or any(self._armed)

    def _note_happened(self) -> None:
        for number, fault in enumerate(self._armed):
            if fault is not None and (fault.place is None or not self._fault_table.is_armed(fault.env_id, fault.place)):
                self._armed[number] = None
                self._happened[number] += 1
                self._noticed[number] = self._report.round
                self._report.count_fault(fault.kind)

    def _inject(self) -> None:
        """Arm the next fault of each actor whose last one has happened, and under replay, cost all that it costs."""
        waits = 3 if self._report.replays else 0
        for number, queue in enumerate(self._queues):
            is_settled = self._report.round >= self._noticed[number] + waits
            if queue and self._armed[number] is None and is_settled:
                fault = self._armed[number] = queue.popleft()
                if fault.place is not None:
                    seconds = self._limits.deadline + fault.overrun
                    self._fault_table.arm(fault.env_id, fault.place, ArmedFault(fault.kind, seconds))
                if fault.place in (None, Place.FACTORY) and (pid := self._envs.actors[number].pid) is not None:
                    self._fault_table.kill(fault.env_id, pid)

    # Results ---------------------------------------------------------------------------------------------

    def _begin(self) -> Any:
        self._report.round += 1
        return self._envs.rollout_async(_STEPS)

    def _finish(self, future: Any, begun: float) -> float:
        """Wait for a rollout and check it; return the time."""
        self._before.append(list(self._happened))
        rollout = future.result(_PATIENCE)
        now = time.monotonic()
        self._report.longest_stall = max(self._report.longest_stall, now - begun)
        # Of each actor one fault at a time, at most two in a rollout: one that waited from the one before.
        most = 2 * (self._limits.stall + self._limits.start)
        if now - begun > most and now - begun - self._limits.lateness(begun) > most:
            self._report.stalls += 1
            self._report.add_problem(f"a rollout took {now - begun:.1f} s")
        self._note_happened()
        self._check(rollout, [after - before for before, after in zip(self._before[0], self._happened, strict=True)])
        self._process_watch.update()
        self._report.renewals = sum(actor.incarnation for actor in self._envs.actors)
        if self._watch is not None:
            self._watch(self._report.report())
        return time.monotonic()

    def _check(self, rollout: ea.Rollout, happened: list[int]) -> None:
        report = self._report
        report.delivered += int(rollout.valid.sum())
        report.failures += len(rollout.failures)
        if rollout.failures and report.replays:
            report.not_replayed += len(rollout.failures)
            told = [(step, env_id, repr(error)[:300]) for step, env_id, error in rollout.failures[:3]]
            report.add_problem(f"round {report.round}: failures under replay: {told}")
        # Counted per env: a crash costs a step of each env of its process, not always the same one, since a step that
        # was complete is delivered.
        for env_id, count in collections.Counter(env_id for _, env_id, _ in rollout.failures).items():
            number = env_id // self._per_actor
            if count > happened[number] + (self._armed[number] is not None) + 1:
                report.unexplained += 1
                report.add_problem(f"{count} failures after {happened[number]} faults of its actor", env_id)
        stood_in = {(step, env_id) for step, env_id, _ in rollout.failures}
        infos = {(step, env_id): info for step, env_id, info in rollout.infos}
        for index in range(self._envs.num_envs):
            for step in range(_STEPS):
                self._check_row(rollout, step, index, (step, index) in stood_in, infos.get((step, index), {}))

    def _check_row(self, rollout: ea.Rollout, step: int, index: int, stood_in: bool, info: dict[str, Any]) -> None:
        """Check one step of an env against what has to follow from the step before."""
        report, before, was_over = self._report, self._heads[index], self._over[index]
        obs = rollout.last_obs[index] if step == _STEPS - 1 else rollout.obs[step + 1, index]
        head = head_of(obs)
        if head is None:
            report.torn_observations += 1
            report.add_problem("an observation mixes two writes", index)
            head = obs[:4].tolist()
        action = int(rollout.actions[step, index])
        ended = bool(rollout.terminated[step, index] or rollout.truncated[step, index])
        if stood_in:
            expected, is_over = before, True
        elif was_over:
            expected, is_over = [index, 0, -1, expected_checksum(info.get("seed"), ())], False
        else:
            checksum = zlib.crc32(struct.pack("<q", action), before[3])
            expected, is_over = [index, before[1] + 1, action, checksum], before[1] + 1 >= LargeEcho.EPISODE_LENGTH
        valid = not stood_in and not was_over
        reward = action if valid else rollout.rewards[step, index]
        found = head, ended, bool(rollout.valid[step, index]), rollout.rewards[step, index]
        if found != (expected, is_over, valid, reward):
            report.mixed_up += 1
            report.add_problem(f"step {step} is {found}: expected {(expected, is_over, valid, reward)}", index)
        self._heads[index], self._over[index] = head, ended


def without_children(plan: Sequence[PlannedFault]) -> list[PlannedFault]:
    """Return a plan in which envs exit where they would leave a child running: a rollout does not say when they did."""
    return [
        dataclasses.replace(fault, kind=FaultKind.EXIT) if fault.kind is FaultKind.CHILD else fault for fault in plan
    ]
