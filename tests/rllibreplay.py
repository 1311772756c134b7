"""A program that trains PPO of RLlib with one local env runner, and prints checksums of what it sampled and learned.

``python rllibreplay.py single 4 512 FOLDER``: the kind of env, iterations, steps of each, and, for faults, a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import gymnasium
import numpy as np
from rllibenvs import FOREVER, configure

import envactors as ea


class FailsOnce(gymnasium.Wrapper):
    """CartPole in which a tenth of the steps and resets crash and a tenth raise, each of them once.

    Args:
        config: ``folder``: where those that have failed are noted; without one, none fails.
    """

    def __init__(self, config):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.folder = config.get("folder")

    def reset(self, *, seed=None, options=None):
        self.seed, self.steps = seed, 0
        self.random = np.random.default_rng(seed)
        self.fail_once()
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        self.fail_once()
        return self.env.step(action)

    def fail_once(self):
        drawn = self.random.random()
        if self.folder and drawn < 0.2 and self.is_first_time():
            if drawn < 0.1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("fails once")

    def is_first_time(self):
        """Note the step or reset, and return whether no process has begun it before."""
        try:
            (Path(self.folder) / f"{self.seed}-{self.steps}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


# A checksum per call of ``sample``; RLlib would copy what it belongs to.
SAMPLED = []


def note_episodes(samples, **kwargs):
    """Called in the env runner with the episodes that it has sampled."""
    found = hashlib.sha256()
    for episode in samples:
        for agent, one in getattr(episode, "agent_episodes", {"": episode}).items():
            found.update(repr((agent, one.is_terminated, one.is_truncated)).encode())
            for values in (one.get_observations(), one.get_actions(), one.get_rewards()):
                found.update(np.ascontiguousarray(values).tobytes())
    SAMPLED.append(found.hexdigest())


def checksum_of(state):
    found = hashlib.sha256()
    for name, weights in sorted(state.items()):
        found.update(name.encode() + np.ascontiguousarray(weights).tobytes())
    return found.hexdigest()


def train(kind, iterations, batch_size, folder=None):
    """Train, and return what happened."""
    import ray
    import torch

    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    # Each failure takes a new process, which should not have to import Gymnasium.
    backend = ea.ProcessBackend(preload=("gymnasium", "rllibenvs"))
    options = {"on_failure": "replay", "seed_episodes": True, "restart": FOREVER, "backend": backend}
    algorithm = (
        configure(kind, FailsOnce, **options)
        .environment(env_config={} if folder is None else {"folder": folder})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=4)
        .callbacks(on_sample_end=note_episodes)
        .training(train_batch_size_per_learner=batch_size, minibatch_size=128, num_epochs=4, lr=0.003)
        .debugging(seed=1)
        .build_algo()
    )
    for _ in range(iterations):
        counted = algorithm.train()["env_runners"]
    vector = algorithm.env_runner.env.unwrapped.vector
    found = {
        "steps": counted["num_env_steps_sampled_lifetime"],
        "episodes": counted["num_episodes_lifetime"],
        "sampled": SAMPLED,
        "weights": checksum_of(algorithm.get_module("default_policy" if kind == "single" else "pole").get_state()),
        "restarts": sum(actor.restarts for actor in vector.stats().actors),
    }
    algorithm.stop()
    ray.shutdown()
    return found


if __name__ == "__main__":
    trained = train(sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:])
    sys.stdout.write("\n" + json.dumps(trained))
