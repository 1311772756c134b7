"""PPO for CartPole in one file, in CleanRL's style, with the lines that the recipe changes.

``python cleanrlppo.py 100`` trains with failures and prints the returns of the last ten episodes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions.categorical import Categorical
from trainingfaults import Failing

import envactors as ea
from envactors.integrations.gymnasium import ActorVectorEnv


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    seed: int = 1
    learning_rate: float = 2.5e-3
    num_envs: int = 4
    num_steps: int = 128
    num_iterations: int = 4
    num_minibatches: int = 4
    update_epochs: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


def make_env(env_id, every, count):
    def thunk():
        return gym.wrappers.RecordEpisodeStatistics(Failing(gym.make(env_id), every, count))

    return thunk


def make_failing(every, count):
    """Make the env, for an id that is registered."""
    return make_env("CartPole-v1", every, count)()


def layer(inputs, outputs, gain):
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        features = int(np.prod(envs.single_observation_space.shape))
        self.actor = nn.Sequential(
            layer(features, 64, 2**0.5), nn.Tanh(), layer(64, int(envs.single_action_space.n), 0.01)
        )
        self.critic = nn.Sequential(layer(features, 64, 2**0.5), nn.Tanh(), layer(64, 1, 1.0))

    def act(self, obs, action=None):
        choice = Categorical(logits=self.actor(obs))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(obs).flatten()


class Rollout:
    """What a batch of steps has stored: each of shape (steps, envs) or (steps, envs, ...)."""

    def __init__(self, args, envs):
        shape = args.num_steps, args.num_envs
        self.obs = torch.zeros(*shape, *envs.single_observation_space.shape)
        self.actions = torch.zeros(shape, dtype=torch.long)
        self.logprobs, self.rewards, self.dones, self.values = (torch.zeros(shape) for _ in range(4))

    def advantages(self, args, next_value, next_done):
        advantages, last = torch.zeros_like(self.rewards), 0.0
        for t in reversed(range(args.num_steps)):
            is_last = t == args.num_steps - 1
            following = next_value if is_last else self.values[t + 1]
            continues = 1.0 - (next_done if is_last else self.dones[t + 1])
            delta = self.rewards[t] + args.gamma * following * continues - self.values[t]
            last = delta + args.gamma * args.gae_lambda * continues * last
            advantages[t] = last
        return advantages


def update(args, agent, optimizer, rollout, advantages):
    """Update the agent with all steps, several times."""
    batch_size = args.num_steps * args.num_envs
    obs, actions = rollout.obs.flatten(0, 1), rollout.actions.flatten()
    logprobs, gains, returns = rollout.logprobs.flatten(), advantages.flatten(), (advantages + rollout.values).flatten()
    for _ in range(args.update_epochs):
        for rows in torch.randperm(batch_size).chunk(args.num_minibatches):
            _, logprob, entropy, value = agent.act(obs[rows], actions[rows])
            ratio = (logprob - logprobs[rows]).exp()
            gain = (gains[rows] - gains[rows].mean()) / (gains[rows].std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            policy_loss = -torch.minimum(gain * ratio, gain * clipped).mean()
            value_loss = 0.5 * (value - returns[rows]).square().mean()
            loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


def train(args, envs):
    """Train with these envs; return the agent, and the return of each episode."""
    torch.manual_seed(args.seed)
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    rollout, episodic_returns = Rollout(args, envs), []
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs, next_done = torch.Tensor(next_obs), torch.zeros(args.num_envs)
    for _ in range(args.num_iterations):
        for step in range(args.num_steps):
            rollout.obs[step], rollout.dones[step] = next_obs, next_done
            with torch.no_grad():
                action, rollout.logprobs[step], _, rollout.values[step] = agent.act(next_obs)
            rollout.actions[step] = action
            next_obs, reward, terminations, truncations, infos = envs.step(action.numpy())
            rollout.rewards[step] = torch.tensor(reward)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(np.logical_or(terminations, truncations))
            if "final_info" in infos and "episode" in infos["final_info"]:
                final = infos["final_info"]
                episodic_returns.extend(final["episode"]["r"][final["_episode"]].tolist())
        with torch.no_grad():
            advantages = rollout.advantages(args, agent.critic(next_obs).flatten(), next_done)
        update(args, agent, optimizer, rollout, advantages)
    envs.close()
    return agent, episodic_returns


def train_with_failures(args, every, count, on_failure="replay"):
    """Train with the vector env of the recipe; return what `train` does, and how often processes were replaced."""
    envs = ActorVectorEnv(
        [make_env(args.env_id, every + 7 * i, count) for i in range(args.num_envs)],
        autoreset_mode="SameStep",
        envs_per_actor="auto",
        on_failure=on_failure,
        restart=ea.RestartPolicy(max_restarts=1000, backoff=0.0),
    )
    agent, episodic_returns = train(args, envs)
    return agent, episodic_returns, [actor.incarnation for actor in envs.actors]


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, found, replaced = train_with_failures(Args(num_iterations=int(sys.argv[1])), 900, 4)
    sys.stdout.write(f"returns {found[-10:]}, processes replaced {replaced}\n")
