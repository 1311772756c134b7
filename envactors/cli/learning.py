"""Learns a linear policy by the cross-entropy method."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.cli.faults import Fault, plan_faults
from envactors.cli.reports import Generation, Reporter
from envactors.cli.rollouts import Episode, OutOfTimeError, Policy, Rollouts

Policies = npt.NDArray[np.float64]  # one a row

_POPULATION = 24
_ELITES = 8
# How much of the old distribution a generation leaves in place; with less, learning is quicker and stalls more often.
_INERTIA = 0.5
# Added to the elites' spread against early agreement, less from one generation to the next.
_NOISE, _NOISE_DECAY, _LEAST_NOISE = 0.3, 0.8, 0.2

# A check costs more than a generation: it waits until the candidates, which are spread around it, do well.
_WORTH_A_CHECK = 350.0
_CHECK_EPISODES = 24
# Far above the goal: a policy that fails once in ten episodes may pass a check and miss the goal in the evaluation.
_GOOD_ENOUGH = 498.0


class Streams(NamedTuple):
    """Random numbers, independent of each other.

    Attributes:
        candidates: For drawing candidates.
        training: For the seeds of the candidates' episodes.
        checks: For those of the checks.
        evaluation: For those of the evaluation.
        faults: For when faults are injected.
    """

    candidates: np.random.Generator
    training: np.random.Generator
    checks: np.random.Generator
    evaluation: np.random.Generator
    faults: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Streams:
        """The streams of a seed."""
        return cls(*(np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)))


class CrossEntropy:
    """A normal distribution of policies that moves to where the best of its samples lie.

    Args:
        size: The number of a policy's weights.
        population: How many candidates a generation has.
        rng: Draws them.
    """

    def __init__(self, size: int, population: int, rng: np.random.Generator) -> None:
        self.mean: Policy = np.zeros(size)
        self._deviation: Policy = np.ones(size)
        self._population = population
        self._rng = rng
        self._noise = _NOISE

    def ask(self) -> Policies:
        """The candidates of a generation, one a row."""
        return self.mean + self._deviation * self._rng.standard_normal((self._population, self.mean.size))

    def tell(self, candidates: Policies, returns: npt.NDArray[np.float64]) -> None:
        """Moves the distribution.

        Args:
            candidates: What `ask` gave.
            returns: Their returns.
        """
        # All that are as good as the last elite: many have the highest return there is, and none of them is better.
        elites = candidates[returns >= np.sort(returns)[-_ELITES]]
        spread = np.sqrt(elites.var(axis=0) + self._noise**2)
        self.mean = _INERTIA * self.mean + (1 - _INERTIA) * elites.mean(axis=0)
        self._deviation = _INERTIA * self._deviation + (1 - _INERTIA) * spread
        self._noise = max(self._noise * _NOISE_DECAY, _LEAST_NOISE)


class Budget:
    """Says when learning must stop so that there is time for what comes after it.

    Args:
        seconds: How long everything may take.
        reserved_steps: The steps to be made after the learning.
        started: When everything began, a time of `time.monotonic`.
    """

    # A rate taken from the first few steps says nothing.
    _SETTLING = 1.0
    # What the evaluation may take beyond the time that was reserved for it, in seconds.
    _GRACE = 8.0

    def __init__(self, seconds: float, reserved_steps: int, started: float) -> None:
        self._end = started + seconds
        # Where faults have held up the envs, their rate so far promises far too little: half of the time is theirs.
        self._most_reserved = seconds / 2
        self._reserved_steps = reserved_steps

    def is_spent(self, steps: int, seconds: float) -> bool:
        """Whether it is time to stop, after so many steps that took so long."""
        reserve = self._reserved_steps * seconds / max(steps, 1) if seconds > self._SETTLING else 0.0
        return time.monotonic() + min(reserve, self._most_reserved) >= self._end

    def is_overdrawn(self) -> bool:
        """Whether it is time to stop whatever is being done."""
        return time.monotonic() >= self._end + self._GRACE


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What came of the learning.

    Attributes:
        policy: The learnt weights.
        generations: How many generations were completed.
        stopped_by: What ended it where the policy was not good enough yet, None where it was.
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
    """Learns until the policy does well on episodes that it did not learn from.

    Args:
        rollouts: Plays the episodes.
        size: The number of a policy's weights.
        streams: Random numbers.
        generations: The most generations.
        budget: The time.
        reporter: Is told of each generation.
        with_faults: Whether faults are injected in the first generations; they make no difference to what is learnt.

    Returns:
        The policy, good enough or not.
    """
    # With fewer candidates than envs some envs would have nothing to do.
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
            # One episode does not tell good policies from better ones.
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
    """The mean return of a policy in new episodes; None where there was no time for all of them."""
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
    """The mean return of each policy in so many episodes; None where there was no time for all of them."""
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
