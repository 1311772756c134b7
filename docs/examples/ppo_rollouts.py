"""
PPO that learns while the envs run
==================================

`VectorEnv.rollout_async` runs the policy in the workers, next to the envs. The learner trains on one rollout while the
workers collect the next. This example trains PPO with PyTorch on CartPole in two processes of four envs each.
"""

# %%
# The learner has one network for the policy and one for the value function. A single thread is enough for networks of
# this size, and leaves the other cores to the workers.

from __future__ import annotations

import time

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import envactors as ea

torch.set_num_threads(1)
torch.manual_seed(0)
NUM_ENVS, STEPS, UPDATES = 8, 128, 70
GAMMA, LAMBDA, CLIP = 0.98, 0.9, 0.2


def network(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


networks = nn.ModuleDict({"policy": network(2), "value": network(1)})
optimizer = torch.optim.Adam(networks.parameters(), lr=2e-3)

# %%
# Each worker makes one ``Policy``. It evaluates the same networks with NumPy, so that the workers do not need to import
# PyTorch. The log-probabilities and values that it returns next to the actions become ``rollout.extras``.


class Policy:
    def load(self, parameters):
        self.parameters = parameters

    def apply(self, name, obs):
        weights, bias, weights_out, bias_out = self.parameters[name]
        return np.tanh(obs @ weights.T + bias) @ weights_out.T + bias_out

    def __call__(self, obs, context):
        logits = self.apply("policy", obs)
        # The action with the highest sum of logit and Gumbel noise is a sample of the softmax distribution.
        actions = np.argmax(logits + context.rng.gumbel(size=logits.shape), axis=1)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        chosen = log_probs[np.arange(len(obs)), actions]
        return actions, {"log_prob": chosen, "value": self.apply("value", obs)[:, 0]}


def parameters_of_networks():
    return {name: [each.detach().numpy() for each in net.parameters()] for name, net in networks.items()}


# %%
# With the default ``autoreset="next_step"``, the step after the end of an episode resets the env. The row of this step
# holds the last observation of the episode that ended, its action is ignored, and ``valid`` is False.
#
# The value of the next row is therefore always the one to bootstrap from, even where the time limit truncated an
# episode. Only termination makes the future worth nothing. The sum over later steps stops at both kinds of ends, and
# the reset rows are left out of the batch.


def advantages_of(rollout):
    with torch.no_grad():
        last_value = networks["value"](torch.from_numpy(rollout.last_obs))[:, 0].numpy()
    values = rollout.extras["value"]
    next_values = np.concatenate([values[1:], last_value[None]])
    errors = rollout.rewards + GAMMA * ~rollout.terminated * next_values - values
    goes_further = ~(rollout.terminated | rollout.truncated)
    advantages, ahead = np.zeros_like(errors), np.zeros(NUM_ENVS)
    for t in reversed(range(STEPS)):
        ahead = errors[t] + GAMMA * LAMBDA * goes_further[t] * ahead
        advantages[t] = ahead
    return advantages


# %%
# The probability ratio compares the current policy with the one that chose the actions. The workers have recorded that
# probability, so the ratio is right even though the learner has made an update since.


def learn(rollout):
    valid = rollout.valid
    advantages = advantages_of(rollout)
    targets = torch.from_numpy((advantages + rollout.extras["value"])[valid]).float()
    advantages = torch.from_numpy(advantages[valid]).float()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    obs = torch.from_numpy(rollout.obs[valid])
    actions = torch.from_numpy(rollout.actions[valid])
    old = torch.from_numpy(rollout.extras["log_prob"][valid]).float()
    for _ in range(8):
        for rows in torch.randperm(len(obs)).chunk(4):
            log_probs = networks["policy"](obs[rows]).log_softmax(1)
            ratio = (log_probs.gather(1, actions[rows, None])[:, 0] - old[rows]).exp()
            gain = torch.min(ratio * advantages[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[rows])
            error = networks["value"](obs[rows])[:, 0] - targets[rows]
            optimizer.zero_grad()
            (error.square().mean() / 2 - gain.mean()).backward()
            optimizer.step()


# %%
# Two rollouts may be in flight: the workers fill ``following`` while the learner works on ``future``. Starting a
# rollout copies the parameters, so the learner can change its networks right away.

finished, running, seconds_learning = [], np.zeros(NUM_ENVS), 0.0


def record(rollout, update):
    """Note the return of every episode that ended, with the number of steps at that time."""
    for t in range(STEPS):
        running[:] += rollout.rewards[t]
        ended = rollout.terminated[t] | rollout.truncated[t]
        finished.extend(((update * STEPS + t + 1) * NUM_ENVS, total) for total in running[ended])
        running[ended] = 0


envs = ea.VectorEnv([lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, envs_per_actor=4)
with envs:
    envs.reset(seed=0)
    envs.set_policy(Policy)
    began = time.perf_counter()
    future = envs.rollout_async(STEPS, parameters_of_networks())
    for update in range(UPDATES):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - update / UPDATES)
        following = envs.rollout_async(STEPS, parameters_of_networks())
        rollout = future.result()
        learning_began = time.perf_counter()
        learn(rollout)
        seconds_learning += time.perf_counter() - learning_began
        record(rollout, update)
        future = following
    future.result()
    seconds = time.perf_counter() - began

    # %%
    # `VectorEnv.evaluate` plays whole episodes with the final policy.
    final = envs.evaluate(20, parameters_of_networks()).returns

print(f"{UPDATES} updates took {seconds:.1f} s, of which the learner worked {seconds_learning / seconds:.0%}")
print(f"the final policy: a mean return of {final.mean():.0f} over {len(final)} episodes")
assert final.mean() >= 400

# %%
# Each point is an episode. CartPole ends an episode after 500 steps at the latest.

env_steps, returns = np.array(finished).T
mean = [returns[max(0, i - 19) : i + 1].mean() for i in range(len(returns))]
fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.scatter(env_steps, returns, s=8, alpha=0.3, label="an episode")
ax.plot(env_steps, mean, color="C1", label="mean of the last 20")
ax.axhline(final.mean(), color="C2", linestyle="--", label="final policy, mean of 20 episodes")
ax.set(xlabel="env-steps", ylabel="return", title="PPO on CartPole-v1, learning during the rollouts")
ax.legend(loc="lower right")
