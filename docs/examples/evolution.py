"""
Evolution strategies with an ActorPool
======================================

An evolution strategy evaluates many parameter vectors, each for a whole episode, and moves toward the good ones. The
evaluations are independent calls of different lengths, which is what `ActorPool` is for: it sends each call to the
next idle actor.
"""

# %%
# The actor holds an env, and its one method plays an episode with a linear policy. Any class works, without any env
# interface, and the pool has the methods of an executor.

from __future__ import annotations

import gymnasium
import matplotlib.pyplot as plt
import numpy as np

import envactors as ea

GENERATIONS, POPULATION = 24, 32


class Player:
    def __init__(self):
        self.env = gymnasium.make("CartPole-v1")

    def evaluate(self, candidate):
        """Return the sum of the rewards of one episode; the seed makes it the same on any actor."""
        parameters, seed = candidate
        obs, _ = self.env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = self.env.step(int(obs @ parameters > 0))
            total, ended = total + reward, terminated or truncated
        return total


# %%
# Each generation samples around a center, more closely than the previous generation. The gradient estimate weighs the
# samples by the ranks of their returns. `ActorPool.map` returns the results in the order of the candidates.

rng = np.random.default_rng(2)
center = np.zeros(4)
history = []

with ea.ActorPool(Player, 2) as pool:
    for generation in range(GENERATIONS):
        noise, sigma = rng.normal(size=(POPULATION, 4)), 0.3 * 0.92**generation
        candidates = [(center + sigma * each, generation) for each in noise]
        returns = np.array(list(pool.map("evaluate", candidates)))
        history.append(returns)
        ranks = returns.argsort().argsort() / (POPULATION - 1) - 0.5
        center = center + sigma * (ranks @ noise) / POPULATION**0.5

    # %%
    # `ActorPool.map_unordered` returns results as they come, which suits a test of the final policy.
    final = list(pool.map_unordered("evaluate", [(center, 1000 + seed) for seed in range(20)]))

print(f"the final policy: a mean return of {np.mean(final):.0f} over {len(final)} episodes")
assert np.mean(final) > 2 * history[0].mean()

# %%
# The band is the whole population, from the worst to the best return of each generation.

history = np.array(history)
generations = np.arange(1, GENERATIONS + 1)
fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.fill_between(generations, history.min(1), history.max(1), alpha=0.25, label="worst to best")
ax.plot(generations, np.median(history, 1), marker="o", markersize=4, label="median of 32 candidates")
ax.axhline(np.mean(final), color="C1", linestyle="--", label="final policy, mean of 20 episodes")
ax.set(xlabel="generation", ylabel="return of an episode", title="The whole population moves to the longest episodes")
ax.legend(loc="lower right")
