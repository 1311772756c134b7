"""Prints how fast rollouts are beside TorchRL's ``MultiSyncCollector``: ``python docs/figures/collector.py``.

Both have two workers of four CartPoles each, the same network of two layers of 64 units in PyTorch, and 128 steps a
turn. They take turns in one run; the ratio is the median of the turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv, SerialEnv

import envactors as ea

ROUNDS = 15
STEPS = 128
FRAMES = 8 * STEPS


class Network(torch.nn.Module):
    """Chooses one of two actions, as TorchRL encodes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(4, 64), (64, 64)]
        hidden = [module for pair in sizes for module in (torch.nn.Linear(*pair), torch.nn.ReLU())]
        self.layers = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the actions, one-hot."""
        return torch.nn.functional.one_hot(self.layers(observation).argmax(-1), 2)


def make_env() -> Any:
    """Return one of TorchRL's envs."""
    return GymEnv("CartPole-v1")


def make_envs() -> Any:
    """Return the envs of one of TorchRL's workers."""
    return SerialEnv(4, make_env)


def make_policy() -> Any:
    """Return the policy of one of our workers."""
    torch.set_num_threads(1)
    layers = Network().layers

    def policy(obs: Any, context: ea.PolicyContext) -> Any:
        del context
        with torch.no_grad():
            return layers(torch.tensor(obs)).argmax(1).numpy()

    return policy


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> None:
    """Measure, and print."""
    policy = TensorDictModule(Network(), in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncCollector([make_envs, make_envs], policy, frames_per_batch=FRAMES, total_frames=-1)
    batches = iter(collector)
    theirs, ours = [], []
    try:
        with ea.VectorEnv([lambda: gymnasium.make("CartPole-v1")] * 8, envs_per_actor=4) as envs:
            envs.reset(seed=0)
            envs.set_policy(make_policy)
            for number in range(ROUNDS + 3):
                took = seconds(lambda: next(batches)), seconds(lambda: envs.rollout(STEPS))
                if number >= 3:
                    theirs.append(took[0])
                    ours.append(took[1])
    finally:
        collector.shutdown()
    ratio = statistics.median(one / two for one, two in zip(theirs, ours, strict=True))
    rates = [FRAMES / statistics.median(each) for each in (theirs, ours)]
    print(f"MultiSyncCollector {rates[0]:,.0f} steps/s, rollout {rates[1]:,.0f}: {ratio:.1f} times")


if __name__ == "__main__":
    main()
