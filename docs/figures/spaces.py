"""Compares the steps of drop-ins with those of `VectorEnv`, for several kinds of spaces; `measure.py spaces` uses it.

Libraries that are not installed keep the figures that they have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from dropins import ACTIONS, AGENTS, NUM_ENVS, Timestep
from gymnasium import spaces
from turns import Turn, compare, rate, table, times
from vectors import is_installed

import envactors as ea

_FOUR = spaces.Box(-1, 1, (4,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {
    "4 float32": _FOUR,
    "Dict of 6 x 4 float32": spaces.Dict({f"part_{number}": _FOUR for number in range(6)}),
    "Tuple of 4 float32 and a Discrete": spaces.Tuple((_FOUR, spaces.Discrete(3))),
    "84x84x4 uint8": spaces.Box(0, 255, (84, 84, 4), np.uint8),
}
PACKINGS = (1, 4)
ACTION_SPACE = spaces.Discrete(2)
VECTOR, OF_AGENTS = "`VectorEnv`", "`VectorEnv` of all agents' observations"


class Still(gymnasium.Env[Any, Any]):
    """An env that returns the same observation after each step."""

    def __init__(self, space: spaces.Space[Any], action_space: spaces.Space[Any] = ACTION_SPACE) -> None:
        self.observation_space, self.action_space = space, action_space
        self._observation = space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Return the observation."""
        return self._observation, {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        """Return the observation."""
        return self._observation, 0.0, False, False, {}


class DingStill:
    """The same as an env of DI-engine."""

    action_space = ACTION_SPACE
    reward_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space
        self._observation, self._reward = space.sample(), np.zeros(1, np.float32)

    def reset(self) -> Any:
        """Return the observation."""
        return self._observation

    def step(self, action: Any) -> Any:  # noqa: ARG002
        """Return the observation."""
        return Timestep(self._observation, self._reward, False, {})

    def close(self) -> None:
        """Do nothing."""


class ManyStill:
    """The same as a ``ParallelEnv`` with four agents."""

    metadata: dict[str, Any] = {"name": "still_v0"}  # noqa: RUF012 # as PettingZoo has it
    possible_agents = AGENTS
    render_mode = None

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.agents = list(AGENTS)
        self._space = space
        self._observations = {agent: space.sample() for agent in AGENTS}
        self._rewards, self._flags = dict.fromkeys(AGENTS, 0.0), dict.fromkeys(AGENTS, False)

    def observation_space(self, agent: str) -> Any:  # noqa: ARG002
        """Return the space."""
        return self._space

    def action_space(self, agent: str) -> Any:  # noqa: ARG002
        """Return that of two actions."""
        return ACTION_SPACE

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Return the observation."""
        return self._observations, {agent: {} for agent in AGENTS}

    def step(self, actions: Any) -> Any:  # noqa: ARG002
        """Return the observation."""
        return self._observations, self._rewards, self._flags, self._flags, {agent: {} for agent in AGENTS}


def step_vector(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:
    """Start a `VectorEnv`; return it, and a function that steps all envs."""
    envs = ea.VectorEnv([functools.partial(Still, space)] * NUM_ENVS, envs_per_actor=packed)
    envs.reset()
    return envs, lambda: envs.step(ACTIONS)


def step_vector_of_agents(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:
    """Do the same for an env whose observation has a part for each of four agents."""
    factory = functools.partial(Still, spaces.Dict(dict.fromkeys(AGENTS, space)), spaces.MultiDiscrete([2] * 4))
    envs = ea.VectorEnv([factory] * NUM_ENVS, envs_per_actor=packed)
    envs.reset()
    actions = np.zeros((NUM_ENVS, len(AGENTS)), np.int64)
    return envs, lambda: envs.step(actions)


def step_gymnasium(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:
    """Do the same for Gymnasium."""
    from envactors.integrations.gymnasium import ActorVectorEnv

    envs = ActorVectorEnv([functools.partial(Still, space)] * NUM_ENVS, envs_per_actor=packed)
    envs.reset()
    return envs, lambda: envs.step(ACTIONS)


def step_sb3(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:
    """Do the same for stable-baselines3."""
    from envactors.integrations.sb3 import ActorVecEnv

    envs = ActorVecEnv([functools.partial(Still, space)] * NUM_ENVS, envs_per_actor=packed)
    envs.reset()
    return envs, lambda: envs.step(ACTIONS)


def step_tianshou(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:  # noqa: ARG001
    """Do the same for tianshou, whose drop-in has one env per process."""
    from envactors.integrations.tianshou import ActorVectorEnv

    envs = ActorVectorEnv([functools.partial(Still, space)] * NUM_ENVS)
    envs.reset()
    return envs, lambda: envs.step(ACTIONS)


def step_torchrl(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:
    """Do the same for TorchRL."""
    from envactors.integrations.torchrl import ActorEnv

    envs = ActorEnv([functools.partial(Still, space)] * NUM_ENVS, envs_per_actor=packed)
    first = envs.rand_action(envs.reset())
    return envs, lambda: envs.step(first).del_("next")


def step_constants(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:  # noqa: ARG001
    """Do the same for an env of TorchRL that returns constants: the cost of TorchRL itself."""
    from tensordict import TensorDict
    from torchrl.envs import EnvBase

    envs, _ = step_torchrl(space, NUM_ENVS)

    class Constants(EnvBase):  # type: ignore[misc] # mypy skips its module
        """Returns the same entries after each step."""

        def __init__(self) -> None:
            super().__init__(batch_size=envs.batch_size)
            self.observation_spec, self.full_action_spec = envs.observation_spec.clone(), envs.full_action_spec.clone()
            self.done_spec, self.reward_spec = envs.done_spec.clone(), envs.reward_spec.clone()
            first = envs.rand_step(envs.reset())
            self._entries = {key: first["next"][key] for key in first["next"].keys(True, True)}

        def _reset(self, tensordict: Any, **_: Any) -> Any:  # noqa: ARG002
            return envs.reset()

        def _step(self, tensordict: Any) -> Any:  # noqa: ARG002
            return TensorDict(dict(self._entries), batch_size=self.batch_size)

        def _set_seed(self, seed: int | None) -> None:
            pass

        def close(self, **_: Any) -> None:
            envs.close()

    constants = Constants()
    first = constants.rand_action(constants.reset())
    return constants, lambda: constants.step(first).del_("next")


def step_ding(name: str, space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:  # noqa: ARG001
    """Do the same for a manager of DI-engine, which has one env per process."""
    from envactors.integrations import ding

    manager = getattr(ding, name)([functools.partial(DingStill, space)] * NUM_ENVS)
    manager.launch()

    def step() -> None:
        left = NUM_ENVS
        while left > 0:  # the asynchronous one steps the envs that are ready
            left -= len(manager.step(dict.fromkeys(manager.ready_obs, 0)))

    return manager, step


def step_pettingzoo(space: spaces.Space[Any], packed: int) -> tuple[Any, Callable[[], Any]]:
    """Do the same for PettingZoo."""
    from envactors.integrations.pettingzoo import ActorParallelEnv

    envs = ActorParallelEnv([functools.partial(ManyStill, space)] * NUM_ENVS, envs_per_actor=packed)
    envs.reset()
    by_agent = dict.fromkeys(AGENTS, ACTIONS)
    return envs, lambda: envs.step(by_agent)


Start = Callable[[spaces.Space[Any], int], tuple[Any, Callable[[], Any]]]
# By side: the package that it needs, the side that it is compared with, and the function that starts it.
SIDES: dict[str, tuple[str | None, str, Start]] = {
    VECTOR: (None, VECTOR, step_vector),
    OF_AGENTS: (None, OF_AGENTS, step_vector_of_agents),
    "Gymnasium": (None, VECTOR, step_gymnasium),
    "stable-baselines3": ("stable_baselines3", VECTOR, step_sb3),
    "DI-engine, `SyncActorEnvManager`": (None, VECTOR, functools.partial(step_ding, "SyncActorEnvManager")),
    "DI-engine, `AsyncActorEnvManager`": (None, VECTOR, functools.partial(step_ding, "AsyncActorEnvManager")),
    "tianshou": ("tianshou", VECTOR, step_tianshou),
    "PettingZoo": ("pettingzoo", OF_AGENTS, step_pettingzoo),
    "TorchRL": ("torchrl", VECTOR, step_torchrl),
    "TorchRL with constants, without envs": ("torchrl", VECTOR, step_constants),
}
# Drop-ins that have one env per process.
UNPACKED = ("DI-engine, `SyncActorEnvManager`", "DI-engine, `AsyncActorEnvManager`", "tianshou")


def takes(side: str, space: str, packed: int) -> bool:
    """Return whether a side takes a space and a number of envs per process; tianshou takes no tuples."""
    package, is_tuple = SIDES[side][0], isinstance(SPACES[space], spaces.Tuple)
    return is_installed(package) and not (packed > 1 and side in UNPACKED) and not (is_tuple and side == "tianshou")


@contextlib.contextmanager
def stepping(side: str, space: str, packed: int) -> Iterator[Turn]:
    """Step all envs of one side."""
    envs, step = SIDES[side][2](SPACES[space], packed)

    def run() -> int:
        step()
        return 1

    yield functools.partial(rate, run)
    envs.close()


def measure(rounds: int, known: dict[str, Any]) -> dict[str, Any]:
    """Measure the drop-ins whose libraries are installed; the figures of the others stay."""
    measured: dict[str, Any] = {}
    for space in SPACES:
        for packed in PACKINGS:
            name = f"{space}, {packed} per process"
            sides = {
                side: functools.partial(stepping, side, space, packed) for side in SIDES if takes(side, space, packed)
            }
            rates = compare(sides, rounds)
            # With the rates of the other side in the same run, since not all libraries are installed at once.
            measured[name] = known.get(name, {}) | {side: [rates[SIDES[side][1]], rates[side]] for side in rates}
    return measured


def show(measured: dict[str, Any]) -> str:
    """Return the table of the page."""
    if not measured:
        return "Not measured yet.\n"
    rows = []
    for side, (_, base, _) in SIDES.items():
        if side != base:
            cells = []
            for space in SPACES:
                rates = [measured[f"{space}, {packed} per process"] for packed in PACKINGS]
                cells.append(", ".join(times(*each[side]) for each in rates if side in each) or "-")
            rows.append([side, *cells])
    return table(["8 envs that do nothing; 1 and 4 per process", *SPACES], rows)
