"""
IMPALA: learn from each process as it finishes
==============================================

IMPALA learns from the rollout of each worker as soon as it arrives, and corrects for the age of the policy that
collected it. `VectorEnv.rollout_each` returns one future per process, and ``ea.as_completed`` yields
them in the order in which they finish. This example trains on CartPole, in four processes of four envs each.
"""

# %%
# One network computes the logits of the two actions, and the other network estimates the value.

from __future__ import annotations

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import envactors as ea

torch.set_num_threads(1)
torch.manual_seed(0)
NUM_ENVS, ENVS_PER_ACTOR, STEPS, ROUNDS = 16, 4, 64, 300
GAMMA, ENTROPY, PASSES = 0.99, 0.01, 2


def network(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


networks = nn.ModuleDict({"policy": network(2), "value": network(1)})
optimizer = torch.optim.Adam(networks.parameters(), lr=2e-3)

# %%
# The workers evaluate the policy network with NumPy, and return the log-probability of each action. They do not need
# the value network: the learner computes the values when it learns, from its latest parameters.


class Policy:
    def load(self, parameters):
        self.parameters = parameters

    def __call__(self, obs, context):
        weights, bias, weights_out, bias_out = self.parameters
        logits = np.tanh(obs @ weights.T + bias) @ weights_out.T + bias_out
        # The action with the highest sum of logit and Gumbel noise is a sample of the softmax distribution.
        actions = np.argmax(logits + context.rng.gumbel(size=logits.shape), axis=1)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return actions, {"log_prob": log_probs[np.arange(len(obs)), actions]}


def parameters_of_policy():
    return [each.detach().numpy() for each in networks["policy"].parameters()]


# %%
# V-trace computes the targets of the value function and the advantages. Its importance weights, clipped at 1, say how
# much likelier the current policy is to choose an action than the policy of the worker was.
#
# With the default ``autoreset="next_step"``, the row after the end of an episode holds the last observation of that
# episode, and ``valid`` is False there. The value of the next row is therefore right even where the time limit
# truncated an episode; only termination makes the future worth nothing. Corrections of later steps do not cross the
# end of an episode.
#
# The factor ``1 - GAMMA`` keeps the values between 0 and 1, so that the entropy bonus has a comparable size throughout.


def v_trace(rollout, values, weights):
    """Return the targets of the values and the advantages, both of shape (steps, envs)."""
    rewards = (1 - GAMMA) * rollout.rewards
    next_values = GAMMA * ~rollout.terminated * values[1:]
    errors = weights * (rewards + next_values - values[:-1])
    goes_further = ~(rollout.terminated | rollout.truncated)
    corrections = np.zeros((STEPS + 1, len(rollout.env_ids)))
    for t in reversed(range(STEPS)):
        corrections[t] = errors[t] + GAMMA * goes_further[t] * weights[t] * corrections[t + 1]
    following = next_values + GAMMA * goes_further * corrections[1:]
    return values[:-1] + corrections[:-1], weights * (rewards + following - values[:-1])


def learn(rollout):
    """Make several updates from one rollout, and return the mean importance weight in the last of them."""
    valid = torch.from_numpy(rollout.valid)
    obs = torch.from_numpy(np.concatenate([rollout.obs, rollout.last_obs[None]]))
    actions = torch.from_numpy(rollout.actions)
    for _ in range(PASSES):
        log_probs = networks["policy"](obs[:-1]).log_softmax(2)
        chosen = log_probs.gather(2, actions[..., None])[..., 0]
        values = networks["value"](obs)[..., 0]
        weights = np.minimum(1, np.exp(chosen.detach().numpy() - rollout.extras["log_prob"]))
        targets, advantages = v_trace(rollout, values.detach().numpy(), weights)
        gain = (chosen * torch.from_numpy(advantages).float())[valid].mean()
        error = (values[:-1] - torch.from_numpy(targets).float())[valid]
        entropy = -(log_probs.exp() * log_probs).sum(2)[valid].mean()
        optimizer.zero_grad()
        (error.square().mean() / 2 - gain - ENTROPY * entropy).backward()
        optimizer.step()
    return weights[rollout.valid].mean()


# %%
# Two rollouts may be in flight, so each process has its next rollout queued while it runs the current one, and does not
# wait for the other processes in between. The learner begins with the first process that finishes, and updates the
# networks twice per result.

finished, mean_weights, running = [], [], np.zeros(NUM_ENVS)


def record(rollout, steps_before):
    """Note the return of every episode that ended, with the number of steps at that time."""
    env_ids = rollout.env_ids
    for t in range(STEPS):
        running[env_ids] += rollout.rewards[t]
        ended = env_ids[rollout.terminated[t] | rollout.truncated[t]]
        finished.extend((steps_before + t * len(env_ids), total) for total in running[ended])
        running[ended] = 0


envs = ea.VectorEnv([lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, envs_per_actor=ENVS_PER_ACTOR)
with envs:
    envs.reset(seed=0)
    envs.set_policy(Policy)
    steps_seen = 0
    futures = envs.rollout_each(STEPS, parameters_of_policy())
    for current in range(ROUNDS):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - current / ROUNDS)
        following = envs.rollout_each(STEPS, parameters_of_policy())
        for future in ea.as_completed(futures):
            rollout = future.result()
            mean_weights.append(learn(rollout))
            record(rollout, steps_seen)
            steps_seen += rollout.rewards.size
        futures = following
    for future in ea.as_completed(futures):
        future.result()

    # %%
    # `VectorEnv.evaluate` plays whole episodes with the final policy.
    final = envs.evaluate(32, parameters_of_policy()).returns

print(f"the mean importance weight in the last pass was {np.mean(mean_weights):.3f}")
print(f"the final policy: a mean return of {final.mean():.0f} over {len(final)} episodes")
assert final.mean() >= 400

# %%
# Each point is an episode. CartPole ends an episode after 500 steps at the latest.

env_steps, returns = np.array(finished).T
mean = [returns[max(0, i - 19) : i + 1].mean() for i in range(len(returns))]
fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.scatter(env_steps, returns, s=8, alpha=0.3, label="an episode")
ax.plot(env_steps, mean, color="C1", label="mean of the last 20")
ax.axhline(final.mean(), color="C2", linestyle="--", label="final policy, mean of 32 episodes")
ax.set(xlabel="env-steps", ylabel="return", title="IMPALA on CartPole-v1, from the rollouts of four processes")
ax.legend(loc="lower right")
