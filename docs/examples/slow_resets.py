"""
Slow resets: step against send and recv
=======================================

In many simulators a reset takes far longer than a step. `VectorEnv.step` returns when the slowest env is done, so one
reset delays all envs. `VectorEnv.send` and `VectorEnv.recv` return the results that are ready while the other envs
continue.
"""

# %%
# The env sleeps: 4 ms for a step, 60 ms for a reset, and its episodes have different lengths. It puts the time at
# which each step began and ended, and whether it was a reset, into its ``info``; the clock is the same in all
# processes.

from __future__ import annotations

import time

import matplotlib.pyplot as plt
import numpy as np

import envactors as ea

NUM_ENVS, SECONDS = 6, 3.0


class Simulator:
    observation_space = ea.ArraySpec((1,), np.float32)
    action_space = ea.ArraySpec((), np.int64)

    def __init__(self):
        self.rng = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.left = int(self.rng.integers(10, 40))
        return np.zeros(1, np.float32), self.spend(0.06, "reset")

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, self.spend(0.004, "step")

    def spend(self, seconds, what):
        begun = time.perf_counter()
        time.sleep(seconds)
        return {"span": (begun, time.perf_counter(), what)}

    def close(self):
        pass


# %%
# Both loops collect the spans of all envs. In the second one, ``min_envs=1`` waits for at least one env and
# takes all that are ready. The agent chooses actions for ``batch.env_ids`` only.


def with_step(envs):
    spans, begun = [], time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        *_, infos = envs.step([0] * NUM_ENVS)
        spans += [(env_id, info["span"]) for env_id, info in enumerate(infos)]
    return spans


def with_recv(envs):
    spans, begun = [], time.perf_counter()
    envs.send([0] * NUM_ENVS)
    while time.perf_counter() - begun < SECONDS:
        batch = envs.recv(min_envs=1)
        spans += [(env_id, info["span"]) for env_id, info in zip(batch.env_ids, batch.infos, strict=True)]
        envs.send([0] * len(batch.env_ids), env_ids=batch.env_ids)
    envs.recv()
    return spans


runs = {}
for name, loop in (("step", with_step), ("send and recv", with_recv)):
    with ea.VectorEnv([Simulator] * NUM_ENVS) as envs:
        envs.reset(seed=0)
        runs[name] = loop(envs)

rates = {name: sum(what == "step" for _, (_, _, what) in spans) / SECONDS for name, spans in runs.items()}
for name, rate in rates.items():
    print(f"{name}: {rate:.0f} steps per second")
assert rates["send and recv"] > 1.3 * rates["step"]

# %%
# Half a second of each. White is time in which an env waits for the others.

fig, axes = plt.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
for ax, (name, spans) in zip(axes, runs.items(), strict=True):
    start = min(begun for _, (begun, _, _) in spans) + 1.0
    for what, color in (("step", "C0"), ("reset", "C1")):
        for env_id in range(NUM_ENVS):
            bars = [
                (1000 * (begun - start), 1000 * (ended - begun))
                for env, (begun, ended, kind) in spans
                if env == env_id and kind == what
            ]
            ax.broken_barh(bars, (env_id - 0.4, 0.8), facecolors=color, label=what if env_id == 0 else None)
    ax.set(xlim=(0, 500), ylabel="env", yticks=range(NUM_ENVS), title=f"{name}: {rates[name]:.0f} steps per second")
axes[1].set_xlabel("time (ms)")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
fig.suptitle(f"With slow resets, recv makes {rates['send and recv'] / rates['step']:.1f} times the steps")
