"""
Where the time goes
===================

`VectorEnv.stats` says in one line whether envs, the caller or the library take the time, and which env is the
slowest. `trace` records each step for a closer look. Here one of eight envs is slow now and then, and every batch
waits for it.
"""

# %%
# The envs sleep 3 ms per step, but in one of eight steps, env 5 sleeps ten times as long. Two envs share a process.

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import envactors as ea
from envactors.testing import EchoEnv

NUM_ENVS, BATCHES, SLOW = 8, 200, 5


class Arm(EchoEnv):
    def step(self, action):
        slow = self.env_id == SLOW and action == 1
        time.sleep(0.03 if slow else 0.003)
        return super().step(action)


# %%
# The first call of `VectorEnv.stats` starts the clocks. The caller sleeps 2 ms per batch, in place of a policy. The
# trace is a JSON file that Perfetto also opens.

rng = np.random.default_rng(0)
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory, "run.json")
    with ea.VectorEnv([lambda i=i: Arm(i) for i in range(NUM_ENVS)], envs_per_actor=2) as envs:
        envs.reset(seed=0)
        envs.stats()
        with ea.trace(file):
            for _ in range(BATCHES):
                envs.step(np.full(NUM_ENVS, rng.integers(8) == 0, np.int64))
                time.sleep(0.002)
            stats = envs.stats()
    events = json.loads(file.read_text())["traceEvents"]

print(stats)

# %%
# The trace has one track of spans per actor, and one for the caller, whose spans say what the caller waited for.

tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
spans = [
    (tracks[event["pid"], event["tid"]], event["name"], event["ts"] / 1000, event["dur"] / 1000)
    for event in events
    if event["ph"] == "X"
]
p50 = np.array([1000 * each.p50 for each in stats.step_seconds])
p99 = np.array([1000 * each.p99 for each in stats.step_seconds])
assert p99.argmax() == SLOW
assert p99[SLOW] > 5 * np.delete(p99, SLOW).max()

# %%
# Env 5 has the same median as the other envs. Its slow steps show in its 99th percentile, and in the gaps of all
# other actors.

fig, axes = plt.subplot_mosaic("ab;cc", figsize=(8, 6), layout="constrained")
shares = [part.rsplit(" ", 2)[:2] for part in str(stats).partition(";")[0].split(", ")]
bars = axes["a"].bar([name for name, _ in shares], [int(share) for _, share in shares], color=["C0", "C2", "C7"])
axes["a"].bar_label(bars, fmt="%d %%")
axes["a"].set(ylabel="share of the time (%)", ylim=(0, 100), title="envs.stats()")

axes["b"].bar(range(NUM_ENVS), p99, color="C1", label="99th percentile")
axes["b"].bar(range(NUM_ENVS), p50, color="C0", label="median")
axes["b"].set(xlabel="env", ylabel="time of a step (ms)", title="stats.step_seconds")
axes["b"].legend(loc="upper left")

colors = {"step": "C0", "policy": "C2", "wait in step": "C7"}
names = sorted({track for track, *_ in spans}, reverse=True)
slow = next(begun for _, name, begun, length in spans if name == "step" and length > 25)
for kind, color in colors.items():
    for row, track in enumerate(names):
        seen = [(begun - slow + 30, length) for one, name, begun, length in spans if (one, name) == (track, kind)]
        axes["c"].broken_barh([span for span in seen if -40 < span[0] < 120], (row - 0.4, 0.8), facecolors=color)
    axes["c"].barh(0, 0, color=color, label=kind)
axes["c"].set(xlim=(0, 100), xlabel="time (ms)", yticks=range(len(names)), yticklabels=names, title="ea.trace")
axes["c"].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
fig.suptitle("Env 5 is slow now and then, and all others wait for it")
