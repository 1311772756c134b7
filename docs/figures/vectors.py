"""Compares ways to step the same envs: loops, vector envs of other libraries, and envactors.

Answers the questions ``readme`` (with a policy), ``steps`` and ``counts`` (with random actions) of `measure.py`.
Libraries and envs that are not installed are left out: ``pip install torch==2.13.0 -e '.[docs]' mujoco imageio ale-py
opencv-python-headless`` installs all of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import workloads
from turns import Side, Turn, compare, rate, ratio, side_by_side, table, times

import envactors as ea

NUM_ENVS = 8
# Number of steps of a rollout, and of processes that share the envs.
STEPS, PROCESSES = 128, 2
# Number of results of a step in stable-baselines3, which resets envs within the step that ends an episode.
SB3_RESULTS = 4

Factory = Callable[[], Any]
Choose = Callable[[Any], Any]

ENVS: dict[str, Factory] = {
    "does nothing, 4 float32": workloads.nothing,
    "does nothing, 4x84x84 uint8": workloads.image,
    "CartPole-v1": functools.partial(gymnasium.make, "CartPole-v1"),
    "100 us of fixed work": workloads.busy_100us,
    "MuJoCo Hopper-v5": functools.partial(gymnasium.make, "Hopper-v5"),
    "ALE/Pong-v5, 4 frames": workloads.pong,
    "MuJoCo Humanoid-v5": workloads.humanoid,
    "1 ms of fixed work": workloads.busy_1ms,
    "sleeps 2 ms on average": workloads.sleeping,
}
# The module that an env needs besides Gymnasium.
NEEDED = {"MuJoCo Hopper-v5": "mujoco", "MuJoCo Humanoid-v5": "mujoco", "ALE/Pong-v5, 4 frames": "ale_py"}
README_ROWS = {
    "ALE/Pong-v5, 4 frames": "Pong, four stacked frames",
    "MuJoCo Humanoid-v5": "Humanoid-v5",
    "MuJoCo Hopper-v5": "Hopper-v5",
    "CartPole-v1": "CartPole-v1",
    "does nothing, 4 float32": "an env that does nothing",
}
README_COLUMNS = {
    "gymnasium": "Gymnasium `AsyncVectorEnv`",
    "sb3": "SB3 `SubprocVecEnv`",
    "torchrl": "TorchRL `ParallelEnv`",
    "packed": "envactors `step`",
    "rollout": "envactors `rollout`",
    "apart": "independent loops",
}
ROLLOUT_ROWS = (
    "does nothing, 4 float32",
    "CartPole-v1",
    "100 us of fixed work",
    "MuJoCo Hopper-v5",
    "MuJoCo Humanoid-v5",
    "ALE/Pong-v5, 4 frames",
)


def is_installed(module: str | None) -> bool:
    """Return whether a module can be imported; None always can."""
    return module is None or importlib.util.find_spec(module) is not None


def installed_envs() -> dict[str, Factory]:
    """Return the envs that can be made here."""
    missing = [title for title in ENVS if not is_installed(NEEDED.get(title))]
    for title in missing:
        print(f"{title}: left out, {NEEDED[title]} is not installed", file=sys.stderr)
    return {title: make for title, make in ENVS.items() if title not in missing}


# What acts -------------------------------------------------------------------------------------------------------


class Policy:
    """Two layers of 64 units; the actions are the largest outputs, or their hyperbolic tangents.

    Args:
        make: Makes an env to act in.
    """

    def __init__(self, make: Factory) -> None:
        env = make()
        space = env.action_space
        self.size = min(128, int(np.prod(env.observation_space.shape)))
        env.close()
        rng = np.random.default_rng(0)
        self.dtype = None if hasattr(space, "n") else space.dtype
        outputs = int(space.n) if self.dtype is None else int(np.prod(space.shape))
        pairs = itertools.pairwise([self.size, 64, 64, outputs])
        self.weights = [rng.normal(size=pair).astype(np.float32) / np.sqrt(pair[0]) for pair in pairs]

    def __call__(self, obs: npt.NDArray[Any], context: Any = None) -> npt.NDArray[Any]:
        del context
        values = obs.reshape(len(obs), -1)[:, : self.size].astype(np.float32)
        for weights in self.weights[:-1]:
            values = np.maximum(values @ weights, 0)
        values = values @ self.weights[-1]
        return values.argmax(1) if self.dtype is None else np.tanh(values).astype(self.dtype)


class RandomActions:
    """Batches of random actions, which are repeated in turn.

    Args:
        make: Makes an env to act in.
        count: The number of envs.
    """

    def __init__(self, make: Factory, count: int) -> None:
        env = make()
        env.action_space.seed(0)
        batches = [np.stack([env.action_space.sample() for _ in range(count)]) for _ in range(256)]
        env.close()
        self._batches = itertools.cycle(batches)

    def __call__(self, obs: Any) -> npt.NDArray[Any]:
        return next(self._batches)[: len(obs)]


def chooser(make: Factory, count: int, policy: bool) -> Choose:
    """Return what chooses the actions of some envs."""
    return Policy(make) if policy else RandomActions(make, count)


# The sides -------------------------------------------------------------------------------------------------------


def reset_gymnasium(envs: Any) -> Any:
    """Reset a vector env with Gymnasium's interface, and return the observations."""
    return envs.reset(seed=0)[0]


def reset_sb3(envs: Any) -> Any:
    """Reset a vector env of stable-baselines3, and return the observations."""
    envs.seed(0)
    return envs.reset()


@contextlib.contextmanager
def stepping(
    make: Factory,
    count: int,
    policy: bool,
    vectorize: Callable[[Sequence[Factory]], Any],
    reset: Callable[[Any], Any] = reset_gymnasium,
) -> Iterator[Turn]:
    """Step a vector env, with the policy in the caller.

    Args:
        make: Makes an env.
        count: The number of envs.
        policy: Whether a policy acts; if not, the actions are random.
        vectorize: Makes the vector env.
        reset: Resets it.
    """
    envs = vectorize([make] * count)
    choose, obs = chooser(make, count, policy), reset(envs)

    def step() -> int:
        nonlocal obs
        results = envs.step(choose(obs))
        obs = results[0]
        return count if len(results) == SB3_RESULTS else count_steps(*results[2:4])

    yield functools.partial(rate, step)
    envs.close()


def count_steps(terminated: npt.NDArray[np.bool_], truncated: npt.NDArray[np.bool_]) -> int:
    """Return the number of results whose next step does not only reset the env, as it does after an episode."""
    return len(terminated) - int(np.count_nonzero(terminated | truncated))


@contextlib.contextmanager
def loop(make: Factory, count: int, policy: bool, first: int = 0) -> Iterator[Turn]:
    """Step the envs in a plain loop; env ``i`` is reset with the seed ``first + i``."""
    envs = [make() for _ in range(count)]
    choose = chooser(make, count, policy)
    obs = np.stack([env.reset(seed=first + index)[0] for index, env in enumerate(envs)])

    def step() -> int:
        for index, (env, action) in enumerate(zip(envs, choose(obs), strict=True)):
            following, _, terminated, truncated, _ = env.step(action)
            obs[index] = env.reset()[0] if terminated or truncated else following
        return count

    yield functools.partial(rate, step)
    for env in envs:
        env.close()


def apart(make: Factory, count: int, policy: bool) -> AbstractContextManager[Turn]:
    """Step the envs in loops in processes that share nothing, each with its part of the envs and the policy."""
    parts = np.array_split(np.arange(count), min(PROCESSES, count))
    return side_by_side(*(functools.partial(loop, make, len(part), policy, int(part[0])) for part in parts))


def sync_vector(factories: Sequence[Factory]) -> Any:
    """Return Gymnasium's loop."""
    return gymnasium.vector.SyncVectorEnv(factories)


def async_vector(factories: Sequence[Factory]) -> Any:
    """Return Gymnasium's processes, which use shared memory."""
    return gymnasium.vector.AsyncVectorEnv(factories)


def sb3_vector(factories: Sequence[Factory]) -> Any:
    """Return the processes of stable-baselines3."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return SubprocVecEnv(list(factories))


def our_vector(factories: Sequence[Factory], envs_per_actor: int = 1, **options: Any) -> ea.VectorEnv:
    """Return ours."""
    return ea.VectorEnv(factories, envs_per_actor=envs_per_actor, **options)


def packed_vector(factories: Sequence[Factory], **options: Any) -> ea.VectorEnv:
    """Return ours in two processes."""
    return our_vector(factories, -(-len(factories) // PROCESSES), **options)


@contextlib.contextmanager
def torchrl(make: Factory, count: int, policy: bool) -> Iterator[Turn]:
    """Step the processes of TorchRL."""
    import torch
    from torchrl.envs import ParallelEnv

    envs = ParallelEnv(count, functools.partial(wrapped, make))
    choose, current = chooser(make, count, policy), envs.reset()

    def step() -> int:
        nonlocal current
        current["action"] = torch.as_tensor(choose(current["observation"].numpy()))
        _, current = envs.step_and_maybe_reset(current)
        return count

    yield functools.partial(rate, step)
    envs.close()


def wrapped(make: Factory) -> Any:
    """Return an env as one of TorchRL's."""
    from torchrl.envs import GymWrapper

    return GymWrapper(make(), categorical_action_encoding=True)


@contextlib.contextmanager
def receiving(make: Factory, count: int, policy: bool) -> Iterator[Turn]:
    """Receive half of the results at a time, and send these envs their next actions."""
    choose = chooser(make, count, policy)
    with our_vector([make] * count) as envs:
        envs.send(choose(reset_gymnasium(envs)))

        def exchange() -> int:
            batch = envs.recv(min_envs=max(1, count // 2))
            envs.send(choose(batch.obs), env_ids=batch.env_ids)
            return count_steps(batch.terminated, batch.truncated)

        yield functools.partial(rate, exchange)
        envs.recv()


@contextlib.contextmanager
def rolling(make: Factory, count: int, policy: bool) -> Iterator[Turn]:
    """Run rollouts in two processes, with the policy in each."""
    assert policy, "there are no rollouts without one"
    with packed_vector([make] * count) as envs:
        envs.reset(seed=0)
        envs.set_policy(functools.partial(Policy, make))

        def roll() -> int:
            return int(np.count_nonzero(envs.rollout(STEPS).valid))

        yield functools.partial(rate, roll)


# The sides by name, and the module that each needs.
SIDES: dict[str, tuple[Callable[..., AbstractContextManager[Turn]], str | None]] = {
    "loop": (loop, None),
    "sync": (functools.partial(stepping, vectorize=sync_vector), None),
    "gymnasium": (functools.partial(stepping, vectorize=async_vector), None),
    "sb3": (functools.partial(stepping, vectorize=sb3_vector, reset=reset_sb3), "stable_baselines3"),
    "torchrl": (torchrl, "torchrl"),
    "step": (functools.partial(stepping, vectorize=our_vector), None),
    "packed": (functools.partial(stepping, vectorize=packed_vector), None),
    "recv": (receiving, None),
    "rollout": (rolling, None),
    "apart": (apart, None),
}


def sides(names: Sequence[str], make: Factory, count: int = NUM_ENVS, *, policy: bool) -> dict[str, Side]:
    """Return those of the named sides that are installed, for some envs."""
    found = {name: SIDES[name] for name in names}
    return {
        name: functools.partial(start, make, count, policy)
        for name, (start, module) in found.items()
        if is_installed(module)
    }


# The questions ---------------------------------------------------------------------------------------------------


def measure_readme(rounds: int) -> Any:
    """Compare loops, vector envs, and rollouts with the same policy."""
    envs = installed_envs()
    return {
        title: compare(sides(["loop", *README_COLUMNS], envs[title], policy=True), rounds)
        for title in ROLLOUT_ROWS
        if title in envs
    }


def show_readme(measured: Any) -> str:
    """Return the README's table: each side as a multiple of the plain loop, the best in bold; and who is slower."""
    rows = []
    for title in filter(measured.__contains__, README_ROWS):
        found = measured[title]
        ratios = {side: ratio(found[side], found["loop"]) for side in README_COLUMNS if side in found}
        best = max((value for side, value in ratios.items() if side != "apart"), default=0.0)
        cells = {side: "< 0.01" if value < 0.005 else f"{value:.2f}" for side, value in ratios.items()}
        cells = {side: f"**{cell}**" if ratios[side] == best and best > 1 else cell for side, cell in cells.items()}
        rows.append([README_ROWS[title], *(cells.get(side, "") for side in README_COLUMNS)])
    head = ["speed, as a multiple of a plain loop", *README_COLUMNS.values()]
    return f"{table(head, rows)}\n{summarize(measured)}\n"


def summarize(measured: Any) -> str:
    """Return sentences that name the envs for which the plain loop is faster than each ``step``, and than rollouts."""
    slow = slower_than_loop(measured, ("gymnasium", "sb3", "torchrl", "packed"))
    if not slow:
        return "The plain loop is not faster than every `step` for any of them."
    sentence = f"The plain loop is faster than every `step` for {' and '.join(slow)}"
    if slow := slower_than_loop(measured, ("rollout",)):
        sentence += f",\nand faster than `rollout` for {' and '.join(slow)}"
    return f"{sentence}."


def slower_than_loop(measured: Any, names: Sequence[str]) -> list[str]:
    """Return the envs for which the plain loop is faster than each of these sides."""
    medians = {
        said: {side: statistics.median(rates) for side, rates in measured[title].items()}
        for title, said in README_ROWS.items()
        if title in measured
    }
    return [
        said for said, found in medians.items() if found["loop"] > max(found[side] for side in names if side in found)
    ]


def show_rollouts(measured: Any) -> str:
    """Return the table of rollouts."""
    rows = [
        [title, *(times(found["rollout"], found[side]) for side in ("apart", "packed"))]
        for title, found in measured.items()
    ]
    return table(["8 envs, 2 processes", "rollout / independent loops", "rollout / step"], rows)


def measure_steps(rounds: int) -> Any:
    """Step 8 envs of each kind with random actions."""
    names = ["step", "packed", "recv", "sync", "gymnasium"]
    return {title: compare(sides(names, make, policy=False), rounds) for title, make in installed_envs().items()}


def show_steps(measured: Any) -> str:
    """Return the table of steps."""
    head = ["8 envs", "default / `AsyncVectorEnv`", "4 per process / `AsyncVectorEnv`", "4 per process / loop"]
    head += ["`recv` of half / `step`"]
    pairs = [("step", "gymnasium"), ("packed", "gymnasium"), ("packed", "sync"), ("recv", "step")]
    rows = [[title, *(times(found[one], found[other]) for one, other in pairs)] for title, found in measured.items()]
    return table(head, rows)


def measure_counts(rounds: int) -> Any:
    """Step 1 to 64 CartPoles."""
    names = ["step", "packed", "sync", "gymnasium"]
    make = ENVS["CartPole-v1"]
    return {str(count): compare(sides(names, make, count, policy=False), rounds) for count in (1, 4, 16, 64)}


def show_counts(measured: Any) -> str:
    """Return the table of 1 to 64 envs."""
    head = ["CartPole-v1 envs", "default / `AsyncVectorEnv`", "two processes / `AsyncVectorEnv`"]
    head += ["two processes / loop"]
    pairs = [("step", "gymnasium"), ("packed", "gymnasium"), ("packed", "sync")]
    rows = [[count, *(times(found[one], found[other]) for one, other in pairs)] for count, found in measured.items()]
    return table(head, rows)
