"""Measures what threads gain in parallel: ``python docs/figures/threads.py [SECONDS]``.

Steps one env per core, about 1 ms of Python per step, with ``backend="thread"``: in a thread per env, and all in one
thread. The ratio should be near the number of cores without the GIL, and near one with it. Both sides are measured in
turns.
Needs the extra ``gymnasium``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import numpy as np
from workloads import busy_1ms

import envactors as ea

ROUNDS = 5


def step_rate(envs: ea.VectorEnv, seconds: float) -> float:
    """Return the steps per second of all envs together."""
    actions = np.zeros(envs.num_envs, np.int64)
    start, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        envs.step(actions)
        steps += envs.num_envs
    return steps / elapsed


def main(seconds: float = 1.0) -> None:
    """Print the steps per second of both sides, and their ratio."""
    cores = max(2, len(os.sched_getaffinity(0)))
    rates: dict[int, list[float]] = {1: [], cores: []}
    sides = {
        threads: ea.VectorEnv([busy_1ms] * cores, backend="thread", envs_per_actor=cores // threads)
        for threads in rates
    }
    for envs in sides.values():
        envs.reset(seed=0)
    for _ in range(ROUNDS):
        for threads, envs in sides.items():
            rates[threads].append(step_rate(envs, seconds))
    for envs in sides.values():
        envs.close()
    one, many = (statistics.median(rates[threads]) for threads in sides)
    # Importing an extension module that needs the GIL switches it on, with a warning.
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"Python {sys.version.split()[0]}, GIL {'on' if gil else 'off'}, {cores} envs of 1 ms: ", end="")
    print(f"1 thread {one:.0f} steps/s, {cores} threads {many:.0f} steps/s, ratio {many / one:.2f}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
