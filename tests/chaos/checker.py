"""Checker that compares the results of a chaos run with those of the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

import envactors as ea
from chaos.faults import LargeEcho, head_of
from chaos.history import Delivered, EnvHistory
from chaos.oracle import Oracle, Request, Result, identical
from chaos.report import ReportBuilder
from envactors.mailbox.messages import renewed_seed
from envactors.mailbox.specs import Spec, conform, spec_of_value


class Limits(NamedTuple):
    """Time limits in seconds.

    Attributes:
        deadline: Deadline of a step or reset.
        stall: Longest time from a request to its result.
        start: Additional time if a process has to start.
        lateness: Returns by how much the machine was late since a time (`time.monotonic`), which does not count.
    """

    deadline: float
    stall: float
    start: float
    lateness: Callable[[float], float]


class ResultChecker:
    """Compares results with expected ones and counts the differences.

    Args:
        envs: Vector env that delivers the results.
        oracle: Source of the expected results.
        report_builder: Counts everything.
        limits: Time limits.
    """

    def __init__(self, envs: ea.VectorEnv, oracle: Oracle, report_builder: ReportBuilder, limits: Limits) -> None:
        self._envs = envs
        self._oracle = oracle
        self._report = report_builder
        self._limits = limits

    def admit(self, results: Iterable[Delivered]) -> list[Delivered]:
        """Return the results that were requested; count unrequested and late ones."""
        admitted = []
        for result in results:
            history = result.history
            self._report.delivered += 1
            if history.requested_at is None:
                self._report.duplicated += 1
                self._report.add_problem("a result that nobody asked for", history.env_id)
                continue
            self._report.progress = time.monotonic()
            self._check_stall(history, history.requested_at)
            history.requested_at = None
            admitted.append(result)
        return admitted

    def judge(self, results: Iterable[Delivered]) -> None:
        """Compare requested results with the expected ones."""
        requests, whole = [], []
        for result in results:
            history = result.history
            if "failure" in result.info:
                self._report.failures += 1
                if self._report.replays:
                    self._report.not_replayed += 1
                    self._report.add_problem(f"not replayed after {result.info['failure']!r}", history.env_id)
                if result.seed is None:
                    self._record_failure(result)
                    continue
            request = self._request(result)
            if self._oracle.expected_results is not None and history.is_predictable:
                requests.append(request)
                whole.append(result)
            history.steps += 1
            history.delivered_steps += not history.resets
            history.resets = result.terminated or result.truncated
            history.renewed = False
            history.last_obs = result.obs
        if requests:
            assert self._oracle.expected_results is not None, "only then is there something to compare"
            for result, request, expected in zip(whole, requests, self._oracle.expected_results(requests), strict=True):
                self._compare(result, request, expected)

    def _check_stall(self, history: EnvHistory, requested_at: float) -> None:
        """Count a result that took too long, even if the time by which the machine was late is not counted."""
        stall = self._report.progress - requested_at
        self._report.longest_stall = max(self._report.longest_stall, stall)
        if stall <= self._limits.stall:
            return
        started = self._report.replays or history.renewed or history.handle.incarnation != history.requested_incarnation
        late = self._limits.lateness(requested_at)
        if stall - late > self._limits.stall + (self._limits.start if started else 0.0):
            self._report.stalls += 1
            problem = f"its result took {stall:.2f} s, of which the machine was late for {late:.2f} s"
            self._report.add_problem(problem, history.env_id)

    def _request(self, result: Delivered) -> Request:
        """Return the request that this result answers."""
        history, incarnation, seed = result.history, result.incarnation, result.seed
        if history.resets and history.renewed and incarnation is not None:
            seed = renewed_seed(history.root_seed, incarnation)
        announced = history.resets or self._report.replays or None in (incarnation, history.incarnation)
        if not announced and incarnation != history.incarnation:
            self._count_mixed_up(history, f"incarnation {incarnation} came unannounced after {history.incarnation}")
        if incarnation is not None or history.resets:
            history.incarnation = incarnation
        return Request(history.env_id, history.resets, seed if history.resets else history.action)

    def _record_failure(self, result: Delivered) -> None:
        """Check the result of a failed step, which repeats the last observation; a reset comes next."""
        history = result.history
        if history.is_predictable and not (
            identical(result.obs, history.last_obs)
            and result.reward == 0.0
            and not result.terminated
            and result.truncated
        ):
            self._count_mixed_up(history, "a failure came without the last observation, reward 0 and truncated")
        history.incarnation = result.incarnation
        history.resets = history.renewed = True

    def _matches(self, result: Delivered, expected: Result) -> bool:
        reward = conform(self._envs.reward_spec, expected.reward, "the expected reward")
        return (
            identical(result.obs, self._observation(result, expected))
            and identical(np.asarray(result.reward), np.asarray(reward))
            and (result.terminated, result.truncated) == (expected.terminated, expected.truncated)
        )

    def _observation(self, result: Delivered, expected: Result) -> Any:
        spec: Spec = self._envs.observation_spec or spec_of_value(result.obs)
        return conform(spec, expected.obs, "the expected observation")

    def _has_another_seed(self, result: Delivered) -> bool:
        """Return whether an explicit reset that was lost twice came with a derived seed instead of its own."""
        history, play = result.history, self._oracle.expected_results
        if result.seed is None or "failure" not in result.info or play is None:
            return False
        for incarnation in range(history.requested_incarnation + 2, history.handle.incarnation + 1):
            (expected,) = play([Request(history.env_id, True, renewed_seed(result.seed, incarnation))])
            if self._matches(result, expected):
                return True
        return False

    def _compare(self, result: Delivered, request: Request, expected: Result) -> None:
        history = result.history
        if self._matches(result, expected) or self._has_another_seed(result):
            return
        obs = self._observation(result, expected)
        history.is_predictable = False  # until the next explicit reset
        if isinstance(obs, np.ndarray) and obs.shape == (LargeEcho.SIZE,):
            self._classify(result, head_of(result.obs), obs[:4].tolist())
        else:
            self._count_mixed_up(
                history, f"asked {request}, got {result[1:5]} of incarnation {result.incarnation}, expected {expected}"
            )

    def _classify(self, result: Delivered, head: list[int] | None, expected: list[int]) -> None:
        """Count and describe a wrong result of an echo env."""
        report_builder, env_id = self._report, result.history.env_id
        if head is None:
            report_builder.torn_observations += 1
        elif head[0] != env_id:
            report_builder.mixed_up += 1
        elif head[1] > expected[1]:
            report_builder.duplicated += 1
        elif head[1] < expected[1]:
            report_builder.lost += 1
        else:
            report_builder.mixed_up += 1
        shown = result.obs[:4].tolist() if head is None else head
        report_builder.add_problem(
            f"[env, steps, action, checksum] is {shown}{' and torn' if head is None else ''}, expected {expected}; "
            f"reward {result.reward}, terminated {result.terminated}, truncated {result.truncated}, incarnation "
            f"{result.incarnation}",
            env_id,
        )

    def _count_mixed_up(self, history: EnvHistory, what: str) -> None:
        self._report.mixed_up += 1
        self._report.add_problem(what, history.env_id)
