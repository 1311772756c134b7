"""
Evolution strategies with evaluate
==================================

`VectorEnv.evaluate` plays whole episodes with a policy that runs in the workers. This example evaluates a whole
population with one call per generation: the policy holds every candidate, and each env plays with its own. The task is
Acrobot, which has to swing its tip above a line; every step until then costs 1.
"""

# %%
# A candidate is the weight matrix of a linear policy. ``context.env_ids`` are the ids of the worker's envs, and select
# the candidates that play there.

from __future__ import annotations

import gymnasium
import matplotlib.pyplot as plt
import numpy as np

import envactors as ea

GENERATIONS, POPULATION, EPISODES = 20, 32, 2
SHAPE = (6, 3)  # observations and actions of Acrobot


class Population:
    def load(self, candidates):
        self.candidates = candidates

    def __call__(self, obs, context):
        scores = np.einsum("no,noa->na", obs, self.candidates[context.env_ids])
        return scores.argmax(axis=1)


# %%
# Of ``n`` envs, env ``i`` plays the episodes ``i``, ``i + n``, and so on. With one env per candidate, the returns of
# ``EPISODES * POPULATION`` episodes are therefore a table with a column for each candidate, however long each episode
# was.
#
# The seeds of the episodes follow from the seed of the policy. A new seed for each generation keeps the search
# from fitting a few initial states.
#
# The candidates come in pairs, on opposite sides of the center. The gradient estimate weighs them by the ranks of their
# returns.

rng = np.random.default_rng(0)
center = np.zeros(SHAPE)
sigma, rate = 0.5, 0.5
history = []

envs = ea.VectorEnv([lambda: gymnasium.make("Acrobot-v1")] * POPULATION, envs_per_actor=POPULATION // 2)
with envs:
    for generation in range(GENERATIONS):
        half = rng.normal(size=(POPULATION // 2, *SHAPE))
        noise = np.concatenate([half, -half])
        envs.set_policy(Population, seed=generation)
        evaluation = envs.evaluate(EPISODES * POPULATION, center + sigma * noise)
        returns = evaluation.returns.reshape(EPISODES, POPULATION).mean(axis=0)
        history.append(returns)
        ranks = returns.argsort().argsort() / (POPULATION - 1) - 0.5
        center = center + rate * np.tensordot(ranks, noise, axes=1) / POPULATION**0.5
        sigma *= 0.97

    # %%
    # The final test gives the center to every env.
    envs.set_policy(Population, seed=1000)
    final = envs.evaluate(64, np.broadcast_to(center, (POPULATION, *SHAPE)).copy()).returns

print(f"the final policy: a mean return of {final.mean():.0f} over {len(final)} episodes")
assert final.mean() >= -110

# %%
# The band is the whole population, from the worst to the best candidate of each generation.

history = np.array(history)
generations = np.arange(1, GENERATIONS + 1)
fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.fill_between(generations, history.min(1), history.max(1), alpha=0.25, label="worst to best")
ax.plot(generations, np.median(history, 1), marker="o", markersize=4, label="median of 32 candidates")
ax.axhline(final.mean(), color="C1", linestyle="--", label="final policy, mean of 64 episodes")
ax.set(xlabel="generation", ylabel="mean return of two episodes", title="A population learns to swing up Acrobot-v1")
ax.legend(loc="lower right")
