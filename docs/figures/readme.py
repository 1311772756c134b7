"""Compares vector envs for the README's table; see `measure.py`.

Eight envs, and the policy of `rollouts.py`. All sides take turns in one program, 128 steps of all envs each: a loop,
the vector envs of other libraries with the policy in the caller, envactors with the policy in the caller (``step``) and
in the workers (``rollout``), with four envs per process, and two loops in processes that share nothing. Libraries that
are not installed are left out: ``pip install torch==2.13.0 -e '.[docs]' mujoco imageio ale-py opencv-python-headless``
installs all of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import rollouts
from rollouts import ENVS, NAMES, STEPS, Loop, make_env, make_policy

import envactors as ea

ROWS = {
    "ALE/Pong-v5, 4 frames": "Pong, four stacked frames",
    "MuJoCo Humanoid-v5": "Humanoid-v5",
    "MuJoCo Hopper-v5": "Hopper-v5",
    "CartPole-v1": "CartPole-v1",
    "does nothing, 4 float32": "an env that does nothing",
}
COLUMNS = {
    "gymnasium": "Gymnasium `AsyncVectorEnv`",
    "sb3": "SB3 `SubprocVecEnv`",
    "torchrl": "TorchRL `ParallelEnv`",
    "step": "envactors `step`",
    "rollout": "envactors `rollout`",
    "apart": "independent loops",
}

Side = contextlib.AbstractContextManager[Callable[[], object]]


@contextlib.contextmanager
def loop(name: str) -> Iterator[Callable[[], object]]:
    """All envs in this process."""
    yield Loop(name, 0, ENVS).run


@contextlib.contextmanager
def gymnasium_side(name: str) -> Iterator[Callable[[], object]]:
    """Gymnasium's processes, with shared memory."""
    envs = gymnasium.vector.AsyncVectorEnv([lambda: make_env(name)] * ENVS)
    policy, obs = make_policy(name), envs.reset(seed=0)[0]

    def run() -> None:
        nonlocal obs
        for _ in range(STEPS):
            obs = envs.step(policy(obs, None))[0]

    yield run
    envs.close()


@contextlib.contextmanager
def sb3_side(name: str) -> Iterator[Callable[[], object]]:
    """The processes of stable-baselines3."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv([lambda: make_env(name)] * ENVS)
    policy, obs = make_policy(name), envs.reset()

    def run() -> None:
        nonlocal obs
        for _ in range(STEPS):
            obs = envs.step(policy(obs, None))[0]

    yield run
    envs.close()


@contextlib.contextmanager
def torchrl_side(name: str) -> Iterator[Callable[[], object]]:
    """The processes of TorchRL."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv

    envs = ParallelEnv(ENVS, lambda: GymWrapper(make_env(name), categorical_action_encoding=True))
    policy, current = make_policy(name), envs.reset()

    def run() -> None:
        nonlocal current
        for _ in range(STEPS):
            current["action"] = torch.as_tensor(policy(current["observation"].numpy(), None))
            _, current = envs.step_and_maybe_reset(current)

    yield run
    envs.close()


@contextlib.contextmanager
def step_side(name: str) -> Iterator[Callable[[], object]]:
    """Two of our processes, with the policy in the caller."""
    with ea.VectorEnv([lambda: make_env(name)] * ENVS, envs_per_actor=ENVS // 2) as envs:
        policy, obs = make_policy(name), envs.reset(seed=0)[0]

        def run() -> None:
            nonlocal obs
            for _ in range(STEPS):
                obs = envs.step(policy(obs, None))[0]

        yield run


@contextlib.contextmanager
def rollout_side(name: str) -> Iterator[Callable[[], object]]:
    """Two of our processes, with the policy in each."""
    with ea.VectorEnv([lambda: make_env(name)] * ENVS, envs_per_actor=ENVS // 2) as envs:
        envs.reset(seed=0)
        envs.set_policy(lambda: make_policy(name))
        yield lambda: envs.rollout(STEPS)


SIDES: dict[str, tuple[Callable[[str], Side], str]] = {
    "loop": (loop, "gymnasium"),
    "gymnasium": (gymnasium_side, "gymnasium"),
    "sb3": (sb3_side, "stable_baselines3"),
    "torchrl": (torchrl_side, "torchrl"),
    "step": (step_side, "envactors"),
    "rollout": (rollout_side, "envactors"),
    "apart": (rollouts.two_apart, "gymnasium"),
}


def installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def measure_env(name: str, rounds: int) -> dict[str, list[float]]:
    """Return how many seconds each side took, round by round; the first two rounds do not count."""
    with contextlib.ExitStack() as stack:
        sides = {
            side: stack.enter_context(start(name)) for side, (start, package) in SIDES.items() if installed(package)
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
    return {title: measure_env(NAMES[title][0], rounds) for title in ROWS if installed(NAMES[title][1])}


def show(measured: Any) -> list[list[str]]:
    """Return the rows of the table: each side as a multiple of the plain loop, the best in bold."""
    rows = []
    for title, found in measured.items():
        ratios = {side: float(rollouts.ratio(found["loop"], found[side])) for side in COLUMNS if side in found}
        best = max((ratio for side, ratio in ratios.items() if side != "apart"), default=0.0)
        cells = {side: "< 0.01" if ratio < 0.01 else f"{ratio:.2f}" for side, ratio in ratios.items()}
        cells = {side: f"**{cell}**" if ratios[side] == best > 1 else cell for side, cell in cells.items()}
        rows.append([ROWS[title], *(cells.get(side, "") for side in COLUMNS)])
    return rows


def summarize(measured: Any) -> str:
    """Return sentences that name the envs for which the plain loop is faster than each ``step``, and than rollouts."""
    slow = slower_than_loop(measured, ("gymnasium", "sb3", "torchrl", "step"))
    if not slow:
        return "The plain loop is not faster than every `step` for any of them."
    sentence = f"The plain loop is faster than every `step` for {' and '.join(slow)}"
    if slow := slower_than_loop(measured, ("rollout",)):
        sentence += f",\nand faster than `rollout` for {' and '.join(slow)}"
    return f"{sentence}."


def slower_than_loop(measured: Any, sides: tuple[str, ...]) -> list[str]:
    """Return the envs for which the plain loop is faster than each of these sides."""
    return [
        ROWS[title]
        for title, found in measured.items()
        if statistics.median(found["loop"]) < min(statistics.median(found[side]) for side in sides if side in found)
    ]
