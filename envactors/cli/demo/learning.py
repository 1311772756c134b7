"""Learning of a linear policy by the cross-entropy method, on envs that meet faults."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.cli.demo.faults import FAULTS
from envactors.cli.units import duration

Weights = npt.NDArray[np.float64]  # one linear policy per row

_LONGEST_EPISODE = 500
_SHORTEST_EPISODE = 8  # no policy loses its balance sooner

_POPULATION, _ELITES = 24, 8
# Noise that keeps the search from converging too early. It decays with each generation.
_NOISE, _NOISE_DECAY, _LEAST_NOISE = 1.0, 0.6, 0.05
# The search ends when its candidates return this much on average: their mean is better than they are.
_GOOD_ENOUGH = 450.0


class LinearPolicies:
    """Policy in a worker: each env plays with its own row of weights."""

    def load(self, weights: Weights) -> None:
        """Take the weights of all envs, one row per env."""
        self._weights = weights

    def __call__(self, obs: Any, context: ea.PolicyContext) -> npt.NDArray[np.int64]:
        """Return action 1 where the weighted sum of the observation is positive, else 0."""
        sums: Weights = np.einsum("ij,ij->i", obs, self._weights[context.env_ids])
        return (sums > 0).astype(np.int64)


class Fault(NamedTuple):
    """A fault in the episode of one candidate.

    Attributes:
        kind: A key of `envactors.cli.demo.faults.FAULTS`.
        candidate: Index of the candidate.
        step: Step of the episode, from 1.
    """

    kind: str
    candidate: int
    step: int


class Learner:
    """Learns by the cross-entropy method: sample policies around a mean, then move the mean to the best ones.

    The results depend on the seed alone: each episode has its own seed, and envactors replays an interrupted one.

    Args:
        envs: Vector env of `FaultyCartPole` with a `LinearPolicies` policy.
        seed: Decides candidates, episodes, and faults.

    Attributes:
        steps: Steps of all episodes.
        faults: Number of injected faults.
        survived: Number of faults after which the episode continued in a new process.
        lost: Number of episodes that a failure ended.
    """

    def __init__(self, envs: ea.VectorEnv, seed: int) -> None:
        self.steps: int = 0
        self.faults: int = 0
        self.survived: int = 0
        self.lost: int = 0
        self._envs = envs
        streams = np.random.SeedSequence(seed).spawn(3)
        self._samples, self._seeds, self._places = map(np.random.default_rng, streams)

    def learn(self, generations: int, *, with_faults: bool) -> Weights:
        """Print one line per generation, and return the weights of the learned policy, the same for each env.

        Args:
            generations: Largest number of generations.
            with_faults: Whether to inject one fault into each of the first generations.
        """
        population = max(_POPULATION, self._envs.num_envs)  # with fewer candidates, some envs would be idle
        faults = self._plan_faults(population) if with_faults else []
        mean, deviation, noise = np.zeros(4), np.ones(4), _NOISE
        for generation in range(1, generations + 1):
            candidates = mean + deviation * self._samples.standard_normal((population, 4))
            returns = self._play(candidates, faults.pop(0) if faults else None)
            print(
                f"generation {generation:2d}: mean return {returns.mean():5.1f}, best {returns.max():5.1f}, "
                f"{self.steps:6,} steps",
                flush=True,
            )
            # Include ties with the last elite: many candidates have the highest possible return.
            elites = candidates[returns >= np.sort(returns)[-_ELITES]]
            mean, deviation = elites.mean(axis=0), np.sqrt(elites.var(axis=0) + noise**2)
            noise = max(noise * _NOISE_DECAY, _LEAST_NOISE)
            if returns.mean() >= _GOOD_ENOUGH and not faults:
                break
        return np.tile(mean, (self._envs.num_envs, 1))

    def _plan_faults(self, population: int) -> list[Fault]:
        candidates = self._places.choice(population, len(FAULTS), replace=False)
        steps = self._places.integers(1, _SHORTEST_EPISODE, len(FAULTS))
        return [Fault(*each) for each in zip(FAULTS, candidates.tolist(), steps.tolist(), strict=True)]

    def _play(self, candidates: Weights, fault: Fault | None) -> npt.NDArray[np.float64]:
        """Play one episode with each candidate, and return the returns."""
        width = self._envs.num_envs
        seeds = self._seeds.integers(2**31, size=len(candidates))
        returns: list[npt.NDArray[np.float64]] = []
        for first in range(0, len(candidates), width):
            playing = np.arange(first, first + width) % len(candidates)  # in the last turn, some may play again
            self._envs.reset(seed=seeds[playing].tolist())
            with self._injecting(fault, first):
                rollout = self._envs.rollout(_LONGEST_EPISODE, candidates[playing])
            self.lost += len(rollout.failures)
            returns.append(rollout.rewards.sum(axis=0))
        counted = np.concatenate(returns)[: len(candidates)]
        self.steps += int(counted.sum())  # each step is rewarded with 1
        return counted

    @contextlib.contextmanager
    def _injecting(self, fault: Fault | None, first: int) -> Iterator[None]:
        """Arm a fault if the candidates from ``first`` on are its target, and report afterwards how it ended."""
        if fault is None or not first <= fault.candidate < first + self._envs.num_envs:
            yield
            return
        env_id = fault.candidate - first
        print(f"fault: {fault.kind} in step {fault.step} of env {env_id}", flush=True)
        self.faults += 1
        with tempfile.TemporaryDirectory(prefix="envactors-demo-") as folder:
            self._envs[env_id].arm(fault.kind, fault.step, f"{folder}/fault")
            yield
            seconds = self._envs[env_id].recovered_in().result()
        print(f"  {str(self._envs.stats().actors[env_id].last_failure).splitlines()[0]}")
        if seconds is None:
            print("  not survived: the step was not repeated", flush=True)
        else:
            self.survived += 1
            print(f"  survived: a new process repeated the step {duration(seconds)} after the fault", flush=True)
