"""How fast rollouts are, beside the same policy in loops; see `measure.py`.

Eight envs, a policy of two layers of 64 units in NumPy, 128 steps a turn; all sides take turns. "Two apart" are two
processes that share nothing, with four of the envs and the policy each; "one loop" has all eight; "step" is a vector
env of two processes, with the policy in the caller.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import workloads

import envactors as ea

ENVS = 8
STEPS = 128
# The envs, and the package that makes each.
NAMES = {
    "does nothing, 4 float32": ("nothing", "gymnasium"),
    "CartPole-v1": ("CartPole-v1", "gymnasium"),
    "100 us of fixed work": ("work", "gymnasium"),
    "MuJoCo Hopper-v5": ("Hopper-v5", "mujoco"),
    "MuJoCo Humanoid-v5": ("Humanoid-v5", "mujoco"),
    "ALE/Pong-v5, 4 frames": ("pong", "ale_py"),
}


class Nothing(gymnasium.Env[Any, Any]):
    """Does nothing, or works for some time.

    Args:
        seconds: How long a step takes.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode that never ends."""
        del seed, options
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Work."""
        del action
        until = time.perf_counter() + self.seconds
        while self.seconds and time.perf_counter() < until:
            pass
        return self.obs, 1.0, False, False, {}


def make_env(name: str) -> Any:
    """Return an env."""
    if name in ("nothing", "work"):
        return Nothing(1e-4 if name == "work" else 0.0)
    return workloads.pong() if name == "pong" else gymnasium.make(name)


class Policy:
    """Two layers of 64 units; the actions are the largest outputs, or their hyperbolic tangents.

    Args:
        space: The action space.
        size: The number of inputs.
    """

    def __init__(self, space: Any, size: int) -> None:
        rng = np.random.default_rng(0)
        self.is_discrete = hasattr(space, "n")
        outputs = int(space.n) if self.is_discrete else int(np.prod(space.shape))
        sizes = [size, 64, 64, outputs]
        pairs = itertools.pairwise(sizes)
        self.weights = [rng.normal(size=pair).astype(np.float32) / np.sqrt(pair[0]) for pair in pairs]
        self.dtype = None if self.is_discrete else space.dtype
        self.size = size

    def __call__(self, obs: npt.NDArray[Any], context: Any) -> npt.NDArray[Any]:
        del context
        values = obs.reshape(len(obs), -1)[:, : self.size].astype(np.float32)
        for weights in self.weights[:-1]:
            values = np.maximum(values @ weights, 0)
        values = values @ self.weights[-1]
        return values.argmax(1) if self.is_discrete else np.tanh(values).astype(self.dtype)


def make_policy(name: str) -> Policy:
    """Return the policy for an env."""
    env = make_env(name)
    size = min(128, int(np.prod(env.observation_space.shape)))
    policy = Policy(env.action_space, size)
    env.close()
    return policy


class Loop:
    """The envs in a loop."""

    def __init__(self, name: str, first: int, count: int) -> None:
        self.envs = [make_env(name) for _ in range(count)]
        self.policy = make_policy(name)
        self.obs = np.stack([env.reset(seed=first + number)[0] for number, env in enumerate(self.envs)])

    def run(self) -> None:
        """Make some steps of each env."""
        for _ in range(STEPS):
            actions = self.policy(self.obs, None)
            for number, env in enumerate(self.envs):
                obs, _, terminated, truncated, _ = env.step(actions[number])
                self.obs[number] = env.reset()[0] if terminated or truncated else obs


def serve(pipe: Any, name: str, first: int, count: int) -> None:
    """Run a loop whenever asked, and tell how long it took."""
    loop = Loop(name, first, count)
    while pipe.recv():
        loop.run()
        pipe.send(None)


@contextlib.contextmanager
def two_apart(name: str) -> Iterator[Callable[[], None]]:
    """Two processes that share nothing, with half of the envs and the policy each."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for first in (0, ENVS // 2):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, name, first, ENVS // 2), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)

    def run() -> None:
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()

    yield run
    for pipe in pipes:
        pipe.send(False)
    for process in processes:
        process.join()


def measure_env(name: str, rounds: int) -> dict[str, list[float]]:
    """Return how many seconds each side has taken, round by round."""
    loop = Loop(name, 0, ENVS)
    factories = [lambda: make_env(name)] * ENVS
    with (
        two_apart(name) as apart,
        ea.VectorEnv(factories, envs_per_actor=ENVS // 2) as rolling,
        ea.VectorEnv(factories, envs_per_actor=ENVS // 2) as stepping,
    ):
        rolling.reset(seed=0)
        rolling.set_policy(lambda: make_policy(name))
        policy, obs = make_policy(name), stepping.reset(seed=0)[0]

        def step() -> None:
            nonlocal obs
            for _ in range(STEPS):
                obs = stepping.step(policy(obs, None))[0]

        sides: dict[str, Callable[[], Any]] = {
            "rollout": lambda: rolling.rollout(STEPS),
            "two apart": apart,
            "one loop": loop.run,
            "step": step,
        }
        found: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds + 2):
            for side, run in sides.items():
                began = time.perf_counter()
                run()
                if number > 1:
                    found[side].append(time.perf_counter() - began)
    return found


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each side, by env; without envs whose packages are missing."""
    found = {title: name for title, (name, package) in NAMES.items() if importlib.util.find_spec(package) is not None}
    return {title: measure_env(name, rounds) for title, name in found.items()}


def show(measured: Any) -> list[list[str]]:
    """Return the rows of the table: rollouts as a multiple of two apart and of steps. The README has the loop."""
    return [
        [title, *(ratio(found[side], found["rollout"]) for side in ("two apart", "step"))]
        for title, found in measured.items()
    ]


def ratio(seconds: list[float], others: list[float]) -> str:
    """Return how many times as fast the others are: the median over the rounds."""
    return f"{statistics.median(one / other for one, other in zip(seconds, others, strict=True)):.2f}"
