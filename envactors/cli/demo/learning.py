"""Learning of a linear policy by the cross-entropy method."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.cli.demo.faults import Fault, plan_faults
from envactors.cli.demo.reports import Generation, Reporter
from envactors.cli.demo.rollouts import Episode, OutOfTimeError, Policy, Rollouts

Policies = npt.NDArray[np.float64]  # one policy per row

_POPULATION = 24
_ELITES = 8
# Share of the old distribution kept per generation; with less, learning is faster but stalls more often.
_INERTIA = 0.5
# Noise added to the elites' spread against early convergence; decays per generation.
_NOISE, _NOISE_DECAY, _LEAST_NOISE = 0.3, 0.8, 0.2

# A check costs more than a generation, so the candidates' mean return must reach this first.
_WORTH_A_CHECK = 350.0
_CHECK_EPISODES = 24
# Far above the goal, since a policy that fails once in ten episodes can pass a check and fail the evaluation.
_GOOD_ENOUGH = 498.0


class Streams(NamedTuple):
    """Independent random generators.

    Attributes:
        candidates: Draws candidates.
        training: Draws seeds of the candidates' episodes.
        checks: Draws seeds of the episodes of checks.
        evaluation: Draws seeds of the evaluation's episodes.
        faults: Draws the plan of faults.
    """

    candidates: np.random.Generator
    training: np.random.Generator
    checks: np.random.Generator
    evaluation: np.random.Generator
    faults: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Streams:
        """Return the generators derived from a seed."""
        return cls(*(np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)))


class CrossEntropy:
    """Normal distribution of policies that moves towards its best samples.

    Args:
        size: Number of weights of a policy.
        population: Number of candidates per generation.
        rng: Draws the candidates.
    """

    def __init__(self, size: int, population: int, rng: np.random.Generator) -> None:
        self.mean: Policy = np.zeros(size)
        self._deviation: Policy = np.ones(size)
        self._population = population
        self._rng = rng
        self._noise = _NOISE

    def ask(self) -> Policies:
        """Return the candidates of a generation, one per row."""
        return self.mean + self._deviation * self._rng.standard_normal((self._population, self.mean.size))

    def tell(self, candidates: Policies, returns: npt.NDArray[np.float64]) -> None:
        """Move the distribution towards the best candidates.

        Args:
            candidates: Candidates returned by `ask`.
            returns: Their returns.
        """
        # Include ties with the last elite: many candidates have the highest possible return.
        elites = candidates[returns >= np.sort(returns)[-_ELITES]]
        spread = np.sqrt(elites.var(axis=0) + self._noise**2)
        self.mean = _INERTIA * self.mean + (1 - _INERTIA) * elites.mean(axis=0)
        self._deviation = _INERTIA * self._deviation + (1 - _INERTIA) * spread
        self._noise = max(self._noise * _NOISE_DECAY, _LEAST_NOISE)


class Budget:
    """Decides when learning must stop so that the evaluation still has time.

    Args:
        seconds: Time for everything.
        reserved_steps: Number of steps after learning.
        started: Start time (`time.monotonic`).
    """

    # Seconds before which the measured rate is ignored.
    _SETTLING = 1.0
    # Seconds that the evaluation may take beyond its reserve.
    _GRACE = 8.0

    def __init__(self, seconds: float, reserved_steps: int, started: float) -> None:
        self._end = started + seconds
        # Faults can make the measured rate far too low, so reserve at most half of the time.
        self._most_reserved = seconds / 2
        self._reserved_steps = reserved_steps

    def is_spent(self, steps: int, seconds: float) -> bool:
        """Return whether learning must stop, given the steps made so far and their duration."""
        reserve = self._reserved_steps * seconds / max(steps, 1) if seconds > self._SETTLING else 0.0
        return time.monotonic() + min(reserve, self._most_reserved) >= self._end

    def is_overdrawn(self) -> bool:
        """Return whether even the evaluation must stop."""
        return time.monotonic() >= self._end + self._GRACE


@dataclasses.dataclass(frozen=True)
class Learnt:
    """Result of learning.

    Attributes:
        policy: Learnt weights.
        generations: Number of completed generations.
        stopped_by: Limit that ended learning; None if the policy was good enough.
    """

    policy: Policy
    generations: int
    stopped_by: str | None


def learn(
    rollouts: Rollouts,
    size: int,
    streams: Streams,
    generations: int,
    budget: Budget,
    reporter: Reporter,
    *,
    with_faults: bool,
) -> Learnt:
    """Learn until the policy does well in episodes that it was not trained on.

    Args:
        rollouts: Plays the episodes.
        size: The number of a policy's weights.
        streams: Random generators.
        generations: Largest number of generations.
        budget: Time limit.
        reporter: Shows each generation.
        with_faults: True to inject faults in the first generations; the result is the same without.

    Returns:
        The policy, good enough or not.
    """
    # With fewer candidates than envs some envs would be idle.
    population = max(_POPULATION, rollouts.num_envs)
    method = CrossEntropy(size, population, streams.candidates)
    plan = plan_faults(streams.faults, generations, population) if with_faults else {}
    trials = 1
    for number in range(1, generations + 1):
        reporter.phase(f"generation {number}")
        candidates = method.ask()
        returns = _play(rollouts, candidates, trials, streams.training, budget, plan.get(number))
        if returns is None:
            return Learnt(method.mean, number - 1, "time limit")
        method.tell(candidates, returns)
        check = None
        if returns.mean() >= _WORTH_A_CHECK:
            reporter.phase(f"generation {number}, checking the policy")
            check = _play(rollouts, method.mean[np.newaxis], _CHECK_EPISODES, streams.checks, budget)
            # A single episode cannot rank good policies.
            trials = 2
        check_return = None if check is None else float(check[0])
        reporter.generation(
            Generation(number, float(returns.mean()), float(returns.max()), rollouts.steps, check_return)
        )
        if check_return is not None and check_return >= _GOOD_ENOUGH:
            return Learnt(method.mean, number, None)
    return Learnt(method.mean, generations, "limit of generations")


def evaluate(
    rollouts: Rollouts, policy: Policy, episodes: int, seeds: np.random.Generator, budget: Budget
) -> float | None:
    """Return the mean return of a policy in new episodes, or None if time ran out."""
    try:
        return float(rollouts.play(_episodes(policy[np.newaxis], episodes, seeds), budget.is_overdrawn).mean())
    except OutOfTimeError:
        return None


def _play(
    rollouts: Rollouts,
    policies: Policies,
    trials: int,
    seeds: np.random.Generator,
    budget: Budget,
    faults: Mapping[int, Fault] | None = None,
) -> npt.NDArray[np.float64] | None:
    """Return the mean return of each policy over ``trials`` episodes, or None if time ran out."""
    try:
        returns = rollouts.play(
            _episodes(policies, trials, seeds),
            lambda: budget.is_spent(rollouts.steps, rollouts.busy_seconds),
            faults,
        )
    except OutOfTimeError:
        return None
    means: npt.NDArray[np.float64] = returns.reshape(len(policies), trials).mean(axis=1)
    return means


def _episodes(policies: Policies, trials: int, seeds: np.random.Generator) -> list[Episode]:
    repeated = np.repeat(policies, trials, axis=0)
    return [
        Episode(policy, int(seed))
        for policy, seed in zip(repeated, seeds.integers(2**31, size=len(repeated)), strict=True)
    ]
