"""
Which settings are fastest
==========================

Whether processes pay off, and how many envs each should have, depends on what a step costs. `tune` measures an env with
different settings on this machine and returns the fastest. Here it measures three kinds of steps.
"""

# %%
# One env does nothing, one computes for about 0.1 ms, and one sleeps for 2 ms on average. Any factory of an env works.

from __future__ import annotations

import random
import time

import matplotlib.pyplot as plt

import envactors as ea
from envactors.testing import EchoEnv


class Computes(EchoEnv):
    def step(self, action):
        sum(range(5_000))
        return super().step(action)


class Sleeps(EchoEnv):
    def step(self, action):
        time.sleep(random.expovariate(1 / 0.002))
        return super().step(action)


NUM_ENVS = 8
ENVS = {"does nothing": EchoEnv, "computes 0.1 ms": Computes, "sleeps 2 ms": Sleeps}

tunings = {name: ea.tune(factory, NUM_ENVS, seconds=12) for name, factory in ENVS.items()}

# %%
# A `Tuning` has the line to paste, and ``str`` of it is a table.

for name, tuning in tunings.items():
    print(f"{name}: {tuning.line}")
print(f"\n{tunings['computes 0.1 ms']}")

# %%
# Each bar is the fastest setting of its kind, as a multiple of a loop in one process (``backend="inline"``).


def kind(candidate):
    if candidate.backend != "process":
        return {"inline": "in-process", "thread": "threads"}[candidate.backend]
    return "one process each" if candidate.envs_per_actor == 1 else "processes, several envs each"


KINDS = ["in-process", "threads", "one process each", "processes, several envs each"]
shares = {}
for name, tuning in tunings.items():
    best = {}
    for result in tuning.results:
        best[kind(result.candidate)] = max(result.rate, best.get(kind(result.candidate), 0))
    shares[name] = {each: best.get(each, 0) / best["in-process"] for each in KINDS}

assert shares["does nothing"]["in-process"] > shares["does nothing"]["one process each"]
assert max(shares["sleeps 2 ms"].values()) > 2

fig, axes = plt.subplots(1, 3, sharey=True, figsize=(8, 3.6), layout="constrained")
for ax, (name, bars) in zip(axes, shares.items(), strict=True):
    winner = max(bars, key=bars.get)
    shown = ax.barh(KINDS, bars.values(), color=["C1" if each == winner else "C0" for each in KINDS])
    ax.bar_label(shown, fmt="%.2g", padding=2)
    ax.set(title=name, xlim=(0, 1.25 * max(bars.values())))
axes[0].invert_yaxis()
fig.supxlabel("steps per second, as a multiple of the loop in one process", fontsize="medium")
fig.suptitle("The more a step costs or waits, the more processes are worth")
