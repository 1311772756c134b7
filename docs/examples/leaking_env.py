"""
An env that leaks memory, recycled
==================================

Simulators leak, and a run of several days ends when the machine has no memory left. With
``recycle=ea.RecyclePolicy(max_memory=...)``, an env whose process has grown too large gets a new process between two
episodes, so that no episode is cut short.
"""

# %%
# This env leaks a quarter of a megabyte at each step.

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

import envactors as ea

MB = 2**20
EPISODE, STEPS = 50, 1500


class LeakyEnv:
    observation_space = ea.ArraySpec((1,), np.float32)
    action_space = ea.ArraySpec((), np.int64)

    def __init__(self):
        self.leak = []

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.leak.append(np.ones(MB // 4, np.uint8))
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == EPISODE, False, {}

    def close(self):
        pass


# %%
# ``actor.stats().rss`` is the resident memory of an actor's process, and ``incarnation`` is the index of its process.
# Recycling does not use up the restarts of the `RestartPolicy`.


def run(recycle):
    memory, processes, lengths, length = [], [], [], 0
    with ea.VectorEnv([LeakyEnv], recycle=recycle, autoreset="same_step") as envs:
        envs.reset(seed=0)
        for _ in range(STEPS):
            _, _, terminated, truncated, infos = envs.step([0])
            assert "failure" not in infos[0]
            length += 1
            if terminated[0] or truncated[0]:
                lengths.append(length)
                length = 0
            stats = envs.actors[0].stats()
            memory.append(stats.rss / MB)
            processes.append(stats.incarnation)
        assert stats.restarts == 0
    assert set(lengths) == {EPISODE}  # whole episodes only
    return np.array(memory), np.array(processes)


LIMIT = 100  # MB
leaking, _ = run(None)
recycled, processes = run(ea.RecyclePolicy(max_memory=LIMIT * MB))
print(f"{leaking.max():.0f} MB without recycling, {recycled.max():.0f} MB with {processes[-1] + 1} processes")

# %%
# An env exceeds the limit until its episode ends.

assert leaking.max() > 300
assert recycled.max() < LIMIT + EPISODE / 4 + 20
assert processes[-1] >= 3

steps = np.arange(STEPS)
fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.plot(steps, leaking, color="C1", label="left alone")
ax.plot(steps, recycled, color="C0", label=f"RecyclePolicy(max_memory={LIMIT} MB)")
changes = steps[1:][np.diff(processes) > 0]
ax.plot(changes, recycled[changes], "o", color="C0", markersize=5, label="a new process")
ax.axhline(LIMIT, color="gray", linestyle=":", linewidth=1)
ax.set(xlabel="steps", ylabel="resident memory of the worker (MB)", ylim=(0, None))
ax.set_title(f"Recycling keeps a leaking env at {recycled.max():.0f} MB at most")
ax.legend(loc="upper left")
