"""An unreliable CartPole, and a program that trains PPO of RLlib on it and prints what it counted."""

from __future__ import annotations

import json
import math
import os
import signal
import sys

import gymnasium
import numpy as np

import envactors as ea
from envactors.integrations.rllib import on_actors

FOREVER = ea.RestartPolicy(max_restarts=math.inf, backoff=0.0)


class Unreliable(gymnasium.Wrapper):
    """CartPole that raises or kills its process with the probabilities per step that its config has."""

    def __init__(self, config):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.config = config
        self.random = np.random.default_rng()

    def step(self, action):
        drawn = self.random.random() - self.config.get("crashes", 0)
        if drawn < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if drawn < self.config.get("errors", 0):
            raise RuntimeError("unreliable")
        return self.env.step(action)


def count_end(episode, metrics_logger, **kwargs):
    """Called in the env runner at the end of each episode."""
    failed = "failure" in episode.get_infos(-1)
    metrics_logger.log_value("failed" if failed else "finished", 1, reduce="lifetime_sum")


def describe(runner):
    """Called in the env runner after training."""
    stats = runner.env.unwrapped.vector.stats()
    return os.getpid(), stats.episodes, sum(actor.restarts for actor in stats.actors)


def play(module, seed):
    """Play an episode of CartPole without faults, and return its return."""
    import torch

    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    steps, ended = 0, False
    while not ended:
        with torch.no_grad():
            logits = module.forward_inference({"obs": torch.tensor(observation)[None]})["action_dist_inputs"]
        observation, _, terminated, truncated, _ = env.step(int(logits.argmax()))
        steps, ended = steps + 1, terminated or truncated
    env.close()
    return steps


def evaluate(module):
    """Return the mean return of ten episodes without faults."""
    return np.mean([play(module, seed) for seed in range(10)])


def train(crashes, errors, iterations, batch_size):
    """Train, and return what happened."""
    import ray
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune.registry import register_env

    torch.set_num_threads(1)  # more only spin on so small a network
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    register_env("unreliable", on_actors(Unreliable, restart=FOREVER))
    config = (
        PPOConfig()
        .environment("unreliable", env_config={"crashes": crashes, "errors": errors})
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=4,
            gym_env_vectorize_mode="vector_entry_point",
            sample_timeout_s=600,
        )
        .callbacks(on_episode_end=count_end)
        .training(train_batch_size_per_learner=batch_size, minibatch_size=128, num_epochs=8, lr=0.0005)
        .debugging(seed=1)
    )
    algorithm = config.build_algo()
    group = algorithm.env_runner_group
    untrained = evaluate(algorithm.get_module())
    ((first_pid, _, _),) = group.foreach_env_runner(describe, local_env_runner=False)
    for _ in range(iterations):
        counted = algorithm.train()["env_runners"]
    ((pid, episodes, restarts),) = group.foreach_env_runner(describe, local_env_runner=False)
    found = {
        "same_runner": first_pid == pid and group.num_remote_worker_restarts() == 0,
        "steps": counted["num_env_steps_sampled_lifetime"],
        "episodes": counted["num_episodes_lifetime"],
        "finished": counted.get("finished", 0),
        "failed": counted.get("failed", 0),
        "finished_in_the_vector": sum(episodes),
        "restarts": restarts,
        "failed_steps_of_the_runner": counted.get("num_env_step_failures_lifetime", 0),
        "untrained_return": untrained,
        "trained_return": evaluate(algorithm.get_module()),
    }
    algorithm.stop()
    ray.shutdown()
    return {name: float(value) for name, value in found.items()}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(train(*map(float, sys.argv[1:3]), *map(int, sys.argv[3:]))))
