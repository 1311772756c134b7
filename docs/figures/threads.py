"""Measures what threads gain in parallel: ``python docs/figures/threads.py [SECONDS]``.

Steps one env per core, about 1 ms of Python per step, with ``backend="thread"``: in a thread per env, and all in one
thread. The ratio should be near the number of cores without the GIL, and near one with it. Both sides are measured in
turns.
Needs the extra ``gymnasium``.
"""

from __future__ import annotations

import functools
import os
import sys

from turns import SECONDS, compare, per_second, times
from vectors import our_vector, stepping
from workloads import busy_1ms

ROUNDS = 5


def main(seconds: float = 2 * SECONDS) -> None:
    """Print the steps per second of both sides, and their ratio."""
    cores = max(2, len(os.sched_getaffinity(0)))
    sides = {}
    for name, envs_per_thread in (("one", cores), ("many", 1)):
        vectorize = functools.partial(our_vector, envs_per_actor=envs_per_thread, backend="thread")
        sides[name] = functools.partial(stepping, busy_1ms, cores, False, vectorize)
    one, many = compare(sides, ROUNDS, seconds).values()
    # Importing an extension module that needs the GIL switches it on, with a warning.
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"Python {sys.version.split()[0]}, GIL {'on' if gil else 'off'}, {cores} envs of 1 ms: ", end="")
    print(f"1 thread {per_second(one)} steps/s, {cores} threads {per_second(many)} steps/s, ratio {times(many, one)}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
