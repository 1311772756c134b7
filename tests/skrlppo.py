"""PPO of skrl for CartPole, with a vector env that the recipe makes or Gymnasium's."""

from __future__ import annotations

import gymnasium
import torch
import tqdm
from skrl.agents.torch import ExperimentCfg
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer, SequentialTrainerCfg
from torch import nn
from trainingfaults import Failing

tqdm.tqdm.monitor_interval = 0  # it would leave a thread behind


def make_env(every, count):
    def thunk():
        return Failing(gymnasium.make("CartPole-v1"), every, count)

    return thunk


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, outputs))


class Policy(CategoricalMixin, Model):
    def __init__(self, observation_space, action_space, device):
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device=device)
        CategoricalMixin.__init__(self)
        self.net = network(self.num_observations, self.num_actions)

    def compute(self, inputs, role=""):
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, observation_space, action_space, device):
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device=device)
        DeterministicMixin.__init__(self)
        self.net = network(self.num_observations, 1)

    def compute(self, inputs, role=""):
        return self.net(inputs["observations"]), {}


def train(envs, timesteps, seed=1):
    """Train with a vector env of Gymnasium; return the policy."""
    envs.reset(seed=seed)  # skrl resets without a seed
    torch.manual_seed(seed)
    env = wrap_env(envs, verbose=False)
    spaces = env.observation_space, env.action_space, env.device
    models = {"policy": Policy(*spaces), "value": Value(*spaces)}
    cfg = PPO_CFG(
        rollouts=64,
        learning_epochs=8,
        mini_batches=4,
        learning_rate=3e-3,
        experiment=ExperimentCfg(write_interval=0, checkpoint_interval=0),
    )
    memory = RandomMemory(memory_size=cfg.rollouts, num_envs=env.num_envs, device=env.device)
    agent = PPO(
        models=models,
        memory=memory,
        observation_space=env.observation_space,
        action_space=env.action_space,
        device=env.device,
        cfg=cfg,
    )
    trainer_cfg = SequentialTrainerCfg(
        timesteps=timesteps, headless=True, disable_progressbar=True, close_environment_at_exit=False
    )
    SequentialTrainer(env=env, agents=agent, cfg=trainer_cfg).train()
    env.close()
    return models["policy"]
