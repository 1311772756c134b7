"""
PPO of TorchRL on CartPole
==========================

TorchRL's parts for proximal policy optimization, a collector, generalized advantages and the clipped loss, train on
an `envactors.integrations.torchrl.ActorEnv` of eight envs in two processes.
"""

# %%
# The env is one of TorchRL, with a batch size of eight; transforms go around it. ``RewardSum`` adds up the rewards of
# each episode.

from __future__ import annotations

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, InitTracker, RewardSum, TransformedEnv, check_env_specs
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from envactors.integrations.torchrl import ActorEnv

torch.set_num_threads(1)
torch.manual_seed(0)
NUM_ENVS, STEPS, UPDATES = 8, 128, 40

envs = ActorEnv([lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, envs_per_actor=4)
env = TransformedEnv(envs, Compose(InitTracker(), RewardSum()))
check_env_specs(env)
env.set_seed(0)

# %%
# Policy and value function. Actions are one-hot, as ``GymEnv`` has them.


def network(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


policy = ProbabilisticActor(
    TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"]),
    spec=env.action_spec,
    in_keys=["logits"],
    distribution_class=torch.distributions.OneHotCategorical,
    return_log_prob=True,
)
value = ValueOperator(network(1), in_keys=["observation"])

# %%
# The collector steps the envs, resets those that are done, and returns batches of the shape ``[8, 128]``. An update
# goes over a batch ten times in minibatches.

advantages = GAE(gamma=0.98, lmbda=0.9, value_network=value, average_gae=True)
loss = ClipPPOLoss(policy, value, clip_epsilon=0.2, entropy_coeff=0.0)
optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
frames = NUM_ENVS * STEPS
collector = Collector(env, policy, frames_per_batch=frames, total_frames=frames * UPDATES)

ends, returns = [], []
for update, batch in enumerate(collector):
    done = batch["next", "done"].squeeze(-1)
    numbers = update * frames + NUM_ENVS * (1 + torch.arange(STEPS)).expand(NUM_ENVS, STEPS)
    ends += numbers[done].tolist()
    returns += batch["next", "episode_reward"][done].flatten().tolist()

    optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / UPDATES)
    with torch.no_grad():
        advantages(batch)
    rows = batch.reshape(-1)
    for _ in range(10):
        for part in rows[torch.randperm(len(rows))].split(256):
            losses = loss(part)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()

collector.shutdown()  # closes the env

# %%
# Each point is an episode. CartPole ends an episode after 500 steps at the latest.

median = [np.median(returns[max(0, i - 20) : i + 1]) for i in range(len(returns))]
print(f"{len(returns)} episodes, the last 20 with a mean return of {np.mean(returns[-20:]):.0f}")
assert np.mean(returns[-20:]) >= 150

fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
ax.scatter(ends, returns, s=8, alpha=0.3, label="an episode")
ax.plot(ends, median, color="C1", label="median of the last 20")
ax.set(xlabel="env-steps", ylabel="return", title="PPO of TorchRL on CartPole-v1")
ax.legend(loc="lower right")
