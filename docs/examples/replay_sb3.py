"""
PPO of stable-baselines3 while workers are killed
=================================================

With ``on_failure="replay"`` a crashed worker is restarted, its env is restored to the point of the crash, and the
algorithm does not notice. Here PPO trains twice with the same seed: once undisturbed, and once while a thread kills a
worker with SIGKILL twice a second. Both learning curves are the same, and so are the weights, bit for bit.
"""

# %%
# `envactors.integrations.sb3.ActorVecEnv` takes the place of ``SubprocVecEnv``. ``VecMonitor`` and callbacks work as
# before.

from __future__ import annotations

import os
import random
import signal
import threading

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

import envactors as ea
from envactors.integrations.sb3 import ActorVecEnv

torch.set_num_threads(1)


class Episodes(BaseCallback):
    """Collects the return of each episode, and the env-steps after which it ended."""

    def __init__(self):
        super().__init__()
        self.ends, self.returns = [], []

    def _on_step(self):
        for info in self.locals["infos"]:
            if "episode" in info:
                self.ends.append(self.num_timesteps)
                self.returns.append(info["episode"]["r"])
        return True


# %%
# The killer picks an actor at random. ``envs.actors`` are the handles of the envs' processes.


def kill_now_and_then(envs, episodes, over, kills):
    choose = random.Random(0)
    while not over.wait(0.5):
        pid = choose.choice(envs.actors).pid
        if pid is not None:  # none while a process is being replaced
            os.kill(pid, signal.SIGKILL)
            kills.append(episodes.num_timesteps)


def train(with_kills):
    episodes, over, kills = Episodes(), threading.Event(), []
    envs = ActorVecEnv(
        [lambda: gymnasium.make("CartPole-v1")] * 4,
        on_failure="replay",
        restart=ea.RestartPolicy(max_restarts=1000, backoff=0),  # a new process at once, however many are lost
    )
    killer = threading.Thread(target=kill_now_and_then, args=(envs, episodes, over, kills))
    model = PPO("MlpPolicy", VecMonitor(envs), n_steps=256, seed=3, device="cpu")
    if with_kills:
        killer.start()
    model.learn(12_288, callback=episodes)
    over.set()
    if with_kills:
        killer.join()
    restarts = sum(actor.stats().restarts for actor in envs.actors)
    weights = torch.cat([each.detach().flatten() for each in model.policy.parameters()])
    envs.close()
    return episodes, weights, kills, restarts


undisturbed, weights, _, _ = train(with_kills=False)
disturbed, weights_with_kills, kills, restarts = train(with_kills=True)
print(f"{len(kills)} kills, {restarts} processes replaced, {len(disturbed.returns)} episodes")

# %%
# All episodes and all weights are the same.

assert len(kills) >= 3
assert restarts >= 3
assert disturbed.ends == undisturbed.ends
assert disturbed.returns == undisturbed.returns
assert torch.equal(weights, weights_with_kills)


def smooth(returns, window=20):
    return [np.mean(returns[max(0, i - window) : i + 1]) for i in range(len(returns))]


fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.plot(undisturbed.ends, smooth(undisturbed.returns), linewidth=6, alpha=0.35, label="undisturbed")
ax.plot(disturbed.ends, smooth(disturbed.returns), color="C3", linewidth=1.5, label="a worker killed twice a second")
ax.plot(kills, np.zeros(len(kills)), "|", color="C3", markersize=12, label="SIGKILL")
ax.set(xlabel="env-steps", ylabel="mean return of the last 20 episodes")
ax.set_title(f"{len(kills)} workers are killed, and the learning curve is the same")
ax.legend(loc="upper left")
