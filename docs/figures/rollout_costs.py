"""Prints what surrounds a rollout: ``python docs/figures/rollout_costs.py overlap|parameters|memory``.

overlap      a learner that sleeps as long as a rollout takes: two in flight, against one after the other
parameters   10 MB to 8 workers, against one copy of them and a wake-up of each worker
memory       shared memory, and the caller's own, after short and after long rollouts

All sides of a question take turns in one run; the figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil

import envactors as ea

ROUNDS = 15


def make_cartpole() -> Any:
    """Return an env."""
    return gymnasium.make("CartPole-v1")


def make_vector(envs: int = 8, actors: int = 2) -> ea.VectorEnv:
    """Return a vector of CartPoles that were reset."""
    vector = ea.VectorEnv([make_cartpole] * envs, envs_per_actor=envs // actors)
    vector.reset(seed=0)
    return vector


def balance(obs: Any, context: ea.PolicyContext) -> Any:
    """Push the cart to where the pole falls."""
    del context
    return (obs[:, 2] > 0).astype(np.int64)


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def print_overlap() -> None:
    """Compare two rollouts in flight with one after the other."""
    count = 12
    with make_vector() as envs:
        envs.set_policy(lambda: balance)
        envs.rollout(1024)
        ratios = []
        for _ in range(ROUNDS):
            pause = statistics.median(seconds(lambda: envs.rollout(1024)) for _ in range(5))

            def alternate(pause: float = pause) -> None:
                for _ in range(count):
                    envs.rollout(1024)
                    time.sleep(pause)

            def overlap(pause: float = pause) -> None:
                future = envs.rollout_async(1024)
                for _ in range(count):
                    following = envs.rollout_async(1024)
                    future.result()
                    time.sleep(pause)
                    future = following
                future.result()

            # One rollout more is made beside the pauses.
            ratios.append(seconds(alternate) / count / (seconds(overlap) / (count + 1)))
    print(f"overlap: {statistics.median(ratios):.2f} times the rollouts of alternating")


class Timed:
    """A policy that tells when it has got its parameters, and when it was first called."""

    def __init__(self) -> None:
        self.loaded = 0.0

    def load(self, parameters: Any) -> None:
        """Note the time."""
        del parameters
        self.loaded = time.monotonic()

    def __call__(self, obs: Any, context: ea.PolicyContext) -> Any:
        times = np.full((len(obs), 2), (self.loaded, time.monotonic()))
        return balance(obs, context), {"times": times}


def print_parameters() -> None:
    """Compare giving 10 MB of parameters with one copy of them, and a wake-up of each worker."""
    parameters = {f"layer {number}": np.random.default_rng(0).random(125_000) for number in range(10)}
    copies = {name: array.copy() for name, array in parameters.items()}

    def copy() -> None:
        for name, array in parameters.items():
            np.copyto(copies[name], array)

    with make_vector(8, 8) as envs:
        envs.set_policy(Timed)
        envs.rollout(1, parameters)
        given, copied, woken = [], [], []
        for _ in range(4 * ROUNDS):
            begun = time.monotonic()
            given.append(envs.rollout(1, parameters).extras["times"][0, :, 0].max() - begun)
            copied.append(seconds(copy))
            begun = time.monotonic()
            woken.append(envs.rollout(1).extras["times"][0, :, 1].max() - begun)
    ratio = statistics.median(one / (two + three) for one, two, three in zip(given, copied, woken, strict=True))
    took = [f"{statistics.median(each) * 1e3:.2f} ms" for each in (given, copied, woken)]
    print(f"parameters: given in {took[0]}, copied in {took[1]}, 8 workers woken in {took[2]}: ratio {ratio:.2f}")


def count_descriptors(envs: ea.VectorEnv) -> list[int]:
    """Return how many descriptors each worker has."""
    return [len(list(Path(f"/proc/{actor.pid}/fd").iterdir())) for actor in envs.actors]


def print_memory() -> None:
    """Tell what rollouts of different lengths leave."""
    process = psutil.Process()
    for steps in (128, 1024, 8192):
        with make_vector() as envs:
            descriptors = count_descriptors(envs)
            envs.set_policy(lambda: balance)
            for _ in range(4):
                envs.rollout(steps)
            before = process.memory_full_info()
            for _ in range(20):
                envs.rollout(steps)
            after = process.memory_full_info()
            rollout = envs.rollout(steps)
            size = sum(value.nbytes for value in rollout if isinstance(value, np.ndarray))
            grown = (after.uss - before.uss) / 1e6
            print(
                f"memory, {steps} steps: a rollout has {size / 1e6:.2f} MB; the caller grew by {grown:.2f} MB; "
                f"descriptors of workers: {descriptors}, then {count_descriptors(envs)}"
            )


QUESTIONS = {
    "overlap": print_overlap,
    "parameters": print_parameters,
    "memory": print_memory,
}


def main() -> None:
    """Answer the questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", choices=QUESTIONS)
    for question in parser.parse_args().questions:
        QUESTIONS[question]()


if __name__ == "__main__":
    main()
