"""
PPO in NumPy on CartPole
========================

Proximal policy optimization, written with NumPy alone, trains on a `VectorEnv` of eight envs in two processes. The
loop is that of any algorithm on batches: choose actions, step all envs, learn from the results.
"""

# %%
# The policy and the value function are networks with one hidden layer each. Their gradients are short enough to write
# out.

from __future__ import annotations

import gymnasium
import matplotlib.pyplot as plt
import numpy as np

import envactors as ea

NUM_ENVS, STEPS, UPDATES = 8, 128, 60
GAMMA, LAMBDA, CLIP = 0.98, 0.9, 0.2
rng = np.random.default_rng(0)


class Network:
    """One hidden layer of tanh, trained by Adam."""

    def __init__(self, inputs, outputs, hidden=64, scale=0.01):
        self.weights = [rng.normal(0, inputs**-0.5, (inputs, hidden)), np.zeros(hidden)]
        self.weights += [rng.normal(0, scale, (hidden, outputs)), np.zeros(outputs)]
        self.means = [np.zeros_like(each) for each in self.weights]
        self.squares = [np.zeros_like(each) for each in self.weights]
        self.steps = 0

    def __call__(self, x):
        return np.tanh(x @ self.weights[0] + self.weights[1]) @ self.weights[2] + self.weights[3]

    def descend(self, x, slope, rate):
        """Follow the gradient down; `slope` is that of the loss with respect to the outputs."""
        hidden = np.tanh(x @ self.weights[0] + self.weights[1])
        inner = slope @ self.weights[2].T * (1 - hidden**2)
        self.steps += 1
        for i, gradient in enumerate((x.T @ inner, inner.sum(0), hidden.T @ slope, slope.sum(0))):
            self.means[i] += 0.1 * (gradient - self.means[i])
            self.squares[i] += 0.001 * (gradient**2 - self.squares[i])
            mean = self.means[i] / (1 - 0.9**self.steps)
            square = self.squares[i] / (1 - 0.999**self.steps)
            self.weights[i] -= rate * mean / (np.sqrt(square) + 1e-8)


def probabilities(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


# %%
# An update goes over the batch ten times in minibatches. Where the new policy has moved too far from the old one in
# the direction of the advantage, the gradient is zero: that is the clip of PPO.


def learn(policy, value, obs, actions, old, advantages, returns, rate):
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(10):
        for rows in np.array_split(rng.permutation(len(obs)), 4):
            chosen = np.eye(2)[actions[rows]]
            p = probabilities(policy(obs[rows]))
            ratio = (p * chosen).sum(1) / old[rows]
            moved = np.where(advantages[rows] > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
            weight = np.where(moved, 0, ratio * advantages[rows]) / len(rows)
            policy.descend(obs[rows], -weight[:, None] * (chosen - p), rate)
            error = value(obs[rows])[:, 0] - returns[rows]
            value.descend(obs[rows], error[:, None] / len(rows), rate)


# %%
# The envs reset themselves: with ``autoreset="same_step"`` the observation after the end of an episode is the first of
# the next one. Four envs share a process, since a step of CartPole takes less time than waking one.

policy, value = Network(4, 2), Network(4, 1)
returns_seen, running = [], np.zeros(NUM_ENVS)

envs = ea.VectorEnv([lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, envs_per_actor=4, autoreset="same_step")
with envs:
    obs, _ = envs.reset(seed=0)
    for update in range(UPDATES):
        kept = []
        for step in range(STEPS):
            p = probabilities(policy(obs))
            actions = (rng.random(NUM_ENVS) < p[:, 1]).astype(np.int64)
            following, rewards, terminated, truncated, _ = envs.step(actions)
            ended = terminated | truncated
            kept.append((obs, actions, p[np.arange(NUM_ENVS), actions], rewards, ended))
            running += rewards
            env_steps = (update * STEPS + step + 1) * NUM_ENVS
            returns_seen += [(env_steps, running[i]) for i in np.flatnonzero(ended)]
            running[ended] = 0
            obs = following
        seen, actions, old, rewards, ended = (np.array(each) for each in zip(*kept, strict=True))

        values = np.concatenate([value(seen)[..., 0], value(obs)[None, :, 0]])
        advantages, ahead = np.zeros_like(rewards), np.zeros(NUM_ENVS)
        for t in reversed(range(STEPS)):
            goes_on = 1 - ended[t]
            ahead = rewards[t] + GAMMA * goes_on * values[t + 1] - values[t] + GAMMA * LAMBDA * goes_on * ahead
            advantages[t] = ahead
        batch = (
            seen.reshape(-1, 4),
            actions.ravel(),
            old.ravel(),
            advantages.ravel(),
            (advantages + values[:-1]).ravel(),
        )
        learn(policy, value, *batch, rate=2e-3 * (1 - update / UPDATES))

# %%
# Each point is an episode. CartPole ends an episode after 500 steps at the latest.

env_steps, returns = np.array(returns_seen).T
median = [np.median(returns[max(0, i - 20) : i + 1]) for i in range(len(returns))]
print(f"{len(returns)} episodes, the last 20 with a mean return of {returns[-20:].mean():.0f}")
assert returns[-20:].mean() >= 150

fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.scatter(env_steps, returns, s=8, alpha=0.3, label="an episode")
ax.plot(env_steps, median, color="C1", label="median of the last 20")
solved = env_steps[np.argmax(np.array(median) >= 475)]
ax.set(xlabel="env-steps", ylabel="return", title=f"CartPole-v1 is solved after {solved:,.0f} env-steps")
ax.legend(loc="lower right")
