"""An unreliable CartPole, and a program that trains PPO of RLlib on it or on pairs of it, and prints its counts."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

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


class FailsToReset(gymnasium.Env):
    """Observes the steps of its episode, which has five; its first process fails in its second reset.

    Args:
        config: ``is_killed``: whether the process is killed; otherwise the reset raises.
    """

    observation_space = gymnasium.spaces.Box(0, 5, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config):
        self.is_killed = config.get("is_killed", False)
        self.left = 2 if ea.current_actor().incarnation == 0 else 0

    def reset(self, *, seed=None, options=None):
        self.left -= 1
        if self.left == 0 and self.is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0:
            raise RuntimeError("reset")
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), 1.0, self.steps == 5, False, {}

    def observe(self):
        return np.array([self.steps], np.float32)


def count_end(episode, metrics_logger, **kwargs):
    """Called in the env runner at the end of each episode."""
    infos = episode.get_infos(-1)
    failed = "failure" in infos or any("failure" in info for info in infos.values() if isinstance(info, dict))
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


def configure(kind, pole, **options):
    """Return the part of the configuration that depends on the kind of env, and register the env.

    Args:
        kind: ``"single"``, or ``"pairs"`` for a multi-agent env.
        pole: The env, of which a pair has two.
        **options: Options of `on_actors`.
    """
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune.registry import register_env

    if kind == "single":
        register_env("poles", on_actors(pole, **options))
        return PPOConfig().environment("poles").env_runners(gym_env_vectorize_mode="vector_entry_point")
    from rllibagents import Pair

    from envactors.integrations.rllib import ActorMultiAgentEnvRunner

    register_env("poles", on_actors(functools.partial(Pair, pole), **options))
    shared = {"policies": {"pole"}, "policy_mapping_fn": lambda agent, episode, **kwargs: "pole"}
    config = PPOConfig().environment("poles").env_runners(env_runner_cls=ActorMultiAgentEnvRunner)
    return config.multi_agent(**shared)


def trained_module(algorithm, kind):
    return algorithm.get_module("pole" if kind == "pairs" else "default_policy")


def train(kind, crashes, errors, iterations, batch_size):
    """Train, and return what happened."""
    import ray
    import torch

    torch.set_num_threads(1)  # more only spin on so small a network
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = (
        configure(kind, Unreliable, restart=FOREVER)
        .environment(env_config={"crashes": crashes, "errors": errors})
        .env_runners(num_env_runners=1, num_envs_per_env_runner=4, sample_timeout_s=600)
        .callbacks(on_episode_end=count_end)
        .training(train_batch_size_per_learner=batch_size, minibatch_size=128, num_epochs=20, lr=0.003)
        .debugging(seed=1)
    )
    algorithm = config.build_algo()
    group = algorithm.env_runner_group
    untrained = evaluate(trained_module(algorithm, kind))
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
        "trained_return": evaluate(trained_module(algorithm, kind)),
    }
    algorithm.stop()
    ray.shutdown()
    return {name: float(value) for name, value in found.items()}


def run_program(path, *args):
    """Run a program that prints JSON, whose processes Ray ends with it, and return what it printed."""
    folders = os.pathsep.join(entry for entry in sys.path if entry)
    run = [sys.executable, str(path), *map(str, args)]
    # RLlib keeps the names of agents in sets, whose order depends on this seed, and draws their actions in that order.
    variables = {**os.environ, "PYTHONPATH": folders, "PYTHONHASHSEED": "0"}
    done = subprocess.run(run, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def train_in_a_program(*args):
    """Train in a program of its own, and return what it counted."""
    return run_program(__file__, *args)


def assert_same_training(kind, iterations, batch_size, folder):
    """Assert that failures that are replayed change neither the sampled episodes nor the weights."""
    program = Path(__file__).with_name("rllibreplay.py")
    found, expected = (run_program(program, kind, iterations, batch_size, *faults) for faults in ([folder], []))
    assert found.pop("restarts") > 0.15 * found["steps"]
    assert expected.pop("restarts") == 0
    assert found == expected, f"{found} instead of {expected}"


def assert_accounted_for(found):
    """Assert that the runner has counted each episode once, and has not noticed any failure."""
    assert found["same_runner"]
    assert found["failed_steps_of_the_runner"] == 0
    assert found["episodes"] == found["finished"] + found["failed"]
    assert found["failed"] == found["restarts"]
    assert found["finished"] == found["finished_in_the_vector"]


if __name__ == "__main__":
    counted = train(sys.argv[1], *map(float, sys.argv[2:4]), *map(int, sys.argv[4:]))
    sys.stdout.write("\n" + json.dumps(counted))
