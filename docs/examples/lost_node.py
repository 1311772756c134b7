"""
Two Dask nodes, one of which is lost
====================================

On a cluster a vector env runs on the nodes of Dask. When a node is lost, its envs start again on the other nodes. With
``on_failure="replay"`` they continue where they were, and the observations are the same as in an undisturbed run.
"""

# %%
# A small cluster on this machine: a scheduler and two workers, started by their commands as on any cluster. The envs
# take 4 ms per step.

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
from distributed import Client

import envactors as ea
from envactors.integrations.dask import DaskBackend

NUM_ENVS, BATCHES, LOST_AT = 6, 600, 250


class SlowCartPole(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.004)
        return super().step(action)


def make():
    return SlowCartPole(gymnasium.make("CartPole-v1"))


@contextlib.contextmanager
def cluster(*nodes):
    """Start a scheduler and a worker for each node; yield a client and the workers' processes."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "scheduler.json")
        local = f"--scheduler-file {file} --host 127.0.0.1 --no-dashboard"
        commands = [f"scheduler {local} --port 0"]
        commands += [
            f"worker {local} --name {name} --nthreads 1 --no-nanny --local-directory {directory}" for name in nodes
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes = [subprocess.Popen([sys.executable, "-m", "dask", *line.split()], **quiet) for line in commands]
        try:
            while not file.exists():
                time.sleep(0.05)
            with Client(scheduler_file=str(file)) as client:
                client.wait_for_workers(len(nodes))
                yield client, processes[1:]
        finally:
            for process in processes:
                process.kill()
                process.wait()


# %%
# Here all processes of a node are killed. The broken connection shows within two seconds that the node is lost; a
# silent node is lost when the lease is over. The envs start on the other node once their old processes are known to
# have ended, or 1.1 leases later, since they might still be running.


def run(backend, lose_a_node):
    actions = np.random.default_rng(0).integers(0, 2, (BATCHES, NUM_ENVS))
    seen, times, nodes = [], [], []
    with ea.VectorEnv([make] * NUM_ENVS, backend=backend, on_failure="replay", autoreset="same_step") as envs:
        seen.append(envs.reset(seed=0)[0])
        begun = time.perf_counter()
        for i, action in enumerate(actions):
            if i == LOST_AT and lose_a_node is not None:
                lose_a_node()
            seen.append(envs.step(action)[0])
            times.append(time.perf_counter() - begun)
            nodes.append([actor.node for actor in envs.actors])
        failures = [actor.stats().last_failure for actor in envs.actors]
    return np.array(seen), np.array(times), nodes, failures


with cluster("node-a", "node-b") as (client, workers):
    seen, times, nodes, failures = run(DaskBackend(client, lease=2.0, heartbeat=0.4), workers[1].kill)
undisturbed, *_ = run("process", None)

lost = [failure for failure in failures if failure is not None]
print(f"{len(lost)} envs lost their node: {lost[0]}")

# %%
# The observations of a run on one machine, without any loss, are the same.

assert all(isinstance(failure, ea.NodeLostError) for failure in lost)
assert len(lost) == NUM_ENVS // 2
assert np.array_equal(seen, undisturbed)
assert set(nodes[0]) == {"node-a", "node-b"}
assert set(nodes[-1]) == {"node-a"}

fig, axes = plt.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
starts = np.concatenate([[0], times[:-1]])
for env_id in range(NUM_ENVS):
    for node, color in (("node-a", "C0"), ("node-b", "C1")):
        bars = [(starts[i], times[i] - starts[i]) for i in range(BATCHES) if nodes[i][env_id] == node]
        axes[0].broken_barh(bars, (env_id - 0.4, 0.8), facecolors=color)
axes[0].set(ylabel="env", yticks=range(NUM_ENVS))
for node, color in (("node-a", "C0"), ("node-b", "C1")):
    axes[0].barh(0, 0, color=color, label=node)
axes[0].legend(loc="lower right", ncols=2, framealpha=1)
bins = np.arange(0, times[-1], 0.1)
rates = np.histogram(times, bins)[0] * NUM_ENVS / 0.1
axes[1].stairs(rates, bins, fill=True)
axes[1].set(xlabel="time (s)", ylabel="env-steps per second")
for ax in axes:
    ax.axvline(times[LOST_AT - 1], color="C3", linestyle="--")
axes[0].set_title("node-b is killed: its envs continue on node-a, with the same observations")
