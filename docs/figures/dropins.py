"""Steps per second of each drop-in beside the class that it replaces, in turns; ``measure.py dropins`` uses it.

What is not installed keeps the figures that it has.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import doors
import gymnasium
import numpy as np

NUM_ENVS = 8
ROUNDS, SECONDS = 9, 0.7
ACTIONS = np.zeros(NUM_ENVS, np.int64)
AGENTS = [f"agent_{number}" for number in range(4)]
# The name of sides that show how much of the time the parts of a drop-in take; the pages leave them out.
PARTS = "an `EnvBase` that does nothing and `VectorEnv.step`"


class Timestep(NamedTuple):
    """What DI-engine's envs return."""

    obs: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class Nothing(gymnasium.Env):
    """Does nothing, with four float32."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    render_mode = None

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Return zeros."""
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        """Return zeros."""
        return self._observation, 0.0, False, False, {}


class DingNothing:
    """The same for DI-engine."""

    observation_space = Nothing.observation_space
    action_space = Nothing.action_space
    reward_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self._observation, self._reward = np.zeros(4, np.float32), np.zeros(1, np.float32)

    def reset(self) -> Any:
        """Return zeros."""
        return self._observation

    def step(self, action: Any) -> Any:  # noqa: ARG002
        """Return zeros."""
        return Timestep(self._observation, self._reward, False, {})

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclasses.dataclass
class Spec:
    """What is needed of ALF's."""

    shape: tuple[int, ...]
    dtype: str


class AlfNothing:
    """The same for ALF."""

    is_tensor_based, batched, batch_size, num_tasks, task_names = False, False, 1, 1, ("0",)
    metadata: dict[str, Any] = {}  # noqa: RUF012 # as ALF has it

    def __init__(self, env_id: int) -> None:
        from envactors.integrations.alf import StepType, TimeStep

        self._result = TimeStep(
            StepType.MID, np.float32(0), np.float32(1), np.zeros(4, np.float32), np.int64(0), np.int32(env_id)
        )

    def observation_spec(self) -> Spec:
        """Return that of four float32."""
        return Spec((4,), "float32")

    def action_spec(self) -> Spec:
        """Return that of an int64."""
        return Spec((), "int64")

    def reward_spec(self) -> Spec:
        """Return that of a float32."""
        return Spec((), "float32")

    def env_info_spec(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def time_step_spec(self) -> Any:
        """Return that of a time step."""
        from envactors.integrations.alf import TimeStep

        number, whole = Spec((), "float32"), Spec((), "int32")
        return TimeStep(whole, number, number, self.observation_spec(), self.action_spec(), whole)

    def reset(self) -> Any:
        """Return zeros."""
        return self._result

    def step(self, action: Any) -> Any:  # noqa: ARG002
        """Return zeros."""
        return self._result

    def seed(self, seed: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def agents_that_do_nothing() -> Callable[[], Any]:
    """Return a factory of the same for PettingZoo, with four agents."""
    from pettingzoo import ParallelEnv

    class ManyNothing(ParallelEnv):  # type: ignore[misc]
        """Does nothing, with four float32 per agent."""

        metadata: dict[str, Any] = {"name": "nothing_v0"}  # noqa: RUF012 # as PettingZoo has it
        possible_agents = AGENTS
        render_mode = None

        def __init__(self) -> None:
            self.agents = list(AGENTS)
            self._observations = dict.fromkeys(AGENTS, np.zeros(4, np.float32))
            self._rewards, self._flags = dict.fromkeys(AGENTS, 0.0), dict.fromkeys(AGENTS, False)

        def observation_space(self, agent: str) -> Any:  # noqa: ARG002
            """Return that of four float32."""
            return Nothing.observation_space

        def action_space(self, agent: str) -> Any:  # noqa: ARG002
            """Return that of two actions."""
            return Nothing.action_space

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
            """Return zeros."""
            return self._observations, {agent: {} for agent in AGENTS}

        def step(self, actions: Any) -> Any:  # noqa: ARG002
            """Return zeros."""
            return self._observations, self._rewards, self._flags, self._flags, {agent: {} for agent in AGENTS}

    return ManyNothing


class OneBatch:
    """SuperSuit's flat batch of all agents, stepped with the actions of a vector env by agent."""

    def __init__(self, make: Callable[[], Any], processes: int) -> None:
        import supersuit

        single = supersuit.pettingzoo_env_to_vec_env_v1(make())
        self._envs = supersuit.concat_vec_envs_v1(single, NUM_ENVS, num_cpus=processes)
        self.agents = AGENTS
        self.reset, self.close = self._envs.reset, self._envs.close

    def step(self, actions: Any) -> Any:
        """Step all agents."""
        return self._envs.step(np.stack([actions[agent] for agent in AGENTS], 1).reshape(-1))


def pettingzoo_sides() -> dict[str, Callable[[], Any]]:
    """Return the vector envs for PettingZoo."""
    import supersuit  # noqa: F401 # what is measured against

    from envactors.integrations.pettingzoo import ActorParallelEnv

    make = agents_that_do_nothing()
    return {
        "SuperSuit `concat_vec_envs_v1`, 8 processes": lambda: OneBatch(make, NUM_ENVS),
        "SuperSuit `concat_vec_envs_v1`, 2 processes": lambda: OneBatch(make, 2),
        "`ActorParallelEnv`": lambda: ActorParallelEnv([make] * NUM_ENVS),
        "`ActorParallelEnv`, 4 copies per process": lambda: ActorParallelEnv([make] * NUM_ENVS, envs_per_actor=4),
    }


def gymnasium_sides() -> dict[str, Callable[[], Any]]:
    """Return the vector envs of Gymnasium."""
    from envactors.integrations.gymnasium import ActorVectorEnv

    factories = [Nothing] * NUM_ENVS
    return {
        "`AsyncVectorEnv`": lambda: gymnasium.vector.AsyncVectorEnv(factories, context="forkserver"),
        "`ActorVectorEnv`": lambda: ActorVectorEnv(factories),
        "`ActorVectorEnv`, 4 envs per process": lambda: ActorVectorEnv(factories, envs_per_actor=4),
    }


def sb3_sides() -> dict[str, Callable[[], Any]]:
    """Return the vector envs of stable-baselines3."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from envactors.integrations.sb3 import ActorVecEnv

    factories = [Nothing] * NUM_ENVS
    return {
        "`SubprocVecEnv`": lambda: SubprocVecEnv(factories, start_method="forkserver"),
        "`ActorVecEnv`": lambda: ActorVecEnv(factories),
        "`ActorVecEnv`, 4 envs per process": lambda: ActorVecEnv(factories, envs_per_actor=4),
    }


def tianshou_sides() -> dict[str, Callable[[], Any]]:
    """Return the vector envs of tianshou."""
    from tianshou.env import SubprocVectorEnv

    from envactors.integrations.tianshou import ActorVectorEnv

    factories = [Nothing] * NUM_ENVS
    return {
        "`SubprocVectorEnv`": lambda: SubprocVectorEnv(factories),
        "`ActorVectorEnv`": lambda: ActorVectorEnv(factories),
    }


class TorchNothing:
    """An EnvBase of TorchRL that does nothing, and after each of its steps one of the facade."""

    def __init__(self, envs_per_actor: int) -> None:
        import torch
        from tensordict import TensorDict
        from torchrl.envs import EnvBase

        import envactors as ea
        from envactors.integrations.torchrl import ActorEnv

        class Bare(EnvBase):  # type: ignore[misc]
            def _step(self, _: Any) -> Any:
                return TensorDict(result, batch_size=self.batch_size)

            def _reset(self, _: Any = None) -> Any:
                return TensorDict({"observation": result["observation"]}, batch_size=self.batch_size)

            def _set_seed(self, seed: int | None) -> None:
                pass

        ended = torch.zeros(NUM_ENVS, 1, dtype=torch.bool)
        result = {"observation": torch.zeros(NUM_ENVS, 4), "reward": torch.zeros(NUM_ENVS, 1)}
        result.update(done=ended, terminated=ended.clone(), truncated=ended.clone())
        self._bare, like = Bare(batch_size=(NUM_ENVS,)), ActorEnv([Nothing] * NUM_ENVS, backend="inline")
        for name in ("observation_spec", "action_spec", "reward_spec", "done_spec"):
            setattr(self._bare, name, getattr(like, name).clone())
        like.close()
        self._envs = ea.VectorEnv([Nothing] * NUM_ENVS, envs_per_actor=envs_per_actor, autoreset="disabled")
        self.rand_action, self.close = self._bare.rand_action, self._envs.close

    def reset(self) -> Any:
        """Reset both."""
        self._envs.reset()
        return self._bare.reset()

    def step_and_maybe_reset(self, tensordict: Any) -> Any:
        """Step both."""
        self._envs.step(ACTIONS)
        return self._bare.step_and_maybe_reset(tensordict)


def torchrl_sides() -> dict[str, Callable[[], Any]]:
    """Return TorchRL's parallel env, the drop-in, and what the drop-in is made of."""
    from torchrl.envs import GymWrapper, ParallelEnv

    from envactors.integrations.torchrl import ActorEnv

    factories = [Nothing] * NUM_ENVS
    return {
        "`ParallelEnv`": lambda: ParallelEnv(NUM_ENVS, functools.partial(GymWrapper, Nothing())),
        "`ActorEnv`": lambda: ActorEnv(factories),
        "`ActorEnv`, 4 envs per process": lambda: ActorEnv(factories, envs_per_actor=4),
        PARTS: lambda: TorchNothing(1),
        f"{PARTS}, 4 envs per process": lambda: TorchNothing(4),
    }


def ding_sides() -> dict[str, Callable[[], Any]]:
    """Return the env managers of DI-engine."""
    from ding.envs import SyncSubprocessEnvManager

    from envactors.integrations.ding import SyncActorEnvManager

    factories = [DingNothing] * NUM_ENVS
    theirs = SyncSubprocessEnvManager.default_config()
    theirs.update(context="fork", shared_memory=True)
    return {
        "`SyncSubprocessEnvManager`": lambda: SyncSubprocessEnvManager(factories, theirs),
        "`SyncActorEnvManager`": lambda: SyncActorEnvManager(factories, SyncActorEnvManager.default_config()),
    }


def alf_sides() -> dict[str, Callable[[], Any]]:
    """Return the facade and the drop-in for ALF, which cannot be installed from PyPI."""
    import envactors as ea
    from envactors.integrations.alf import ActorParallelEnvironment

    return {
        "`envactors.VectorEnv`": lambda: ea.VectorEnv([Nothing] * NUM_ENVS),
        "`ActorParallelEnvironment`": lambda: ActorParallelEnvironment([AlfNothing] * NUM_ENVS),
    }


LIBRARIES = {
    "alf": ("torch", alf_sides),
    "gymnasium": ("gymnasium", gymnasium_sides),
    "sb3": ("stable_baselines3", sb3_sides),
    "tianshou": ("tianshou", tianshou_sides),
    "torchrl": ("torchrl", torchrl_sides),
    "ding": ("ding", ding_sides),
    "pettingzoo": ("pettingzoo", pettingzoo_sides),
    **doors.LIBRARIES,
}


def stepper(envs: Any) -> Callable[[], Any]:
    """Start a vector env or a manager; return a function that steps all envs once."""
    if hasattr(type(envs), "launch"):  # ParallelEnv refuses attributes before its first reset
        envs.launch()
        actions = dict(enumerate(ACTIONS))
        return lambda: (envs.ready_obs, envs.step(actions))
    first = envs.reset()
    if hasattr(type(envs), "step_and_maybe_reset"):
        actions, last = envs.rand_action(first.empty()), [first]

        def step() -> None:
            last[0] = envs.step_and_maybe_reset(last[0].update(actions))[1]

        return step
    if hasattr(envs, "agents"):
        by_agent = dict.fromkeys(envs.agents, ACTIONS)
        return lambda: envs.step(by_agent)
    return lambda: envs.step(ACTIONS)


def rate(step: Callable[[], Any], seconds: float) -> float:
    """Return env-steps per second."""
    batches, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        step()
        batches += 1
    return NUM_ENVS * batches / (time.perf_counter() - begun)


def measure(rounds: int, known: dict[str, Any]) -> dict[str, Any]:
    """Measure the libraries that are installed; what is known of the others stays."""
    measured = dict(known)
    for name, (package, sides) in LIBRARIES.items():
        if importlib.util.find_spec(package) is None:
            continue
        try:
            made = {side: make() for side, make in sides().items()}
        except ImportError:  # a version that the drop-in does not know
            continue
        steps = {side: stepper(envs) for side, envs in made.items()}
        rates: dict[str, list[float]] = {side: [] for side in steps}
        for each in steps.values():
            rate(each, 0.2)
        for _ in range(rounds):
            for side, each in steps.items():
                per_call = getattr(made[side], "steps_per_call", 1)
                rates[side].append(per_call * rate(each, SECONDS))
        for envs in made.values():
            envs.close()
        measured[name] = rates
    return measured


def show(name: str, measured: dict[str, Any]) -> str:
    """Return the table of one library's page, which says what users can choose from."""
    sides = measured.get(name)
    if not sides:
        return "Not measured yet.\n"
    peer = next(iter(sides))
    work = doors.WORK.get(name, "8 envs that do nothing")
    lines = [f"| {work} | steps/s | relative to {peer} |", "|---|---|---|"]
    for side, rates in sides.items():
        if side.startswith(PARTS):
            continue
        ratio = statistics.median(one / other for one, other in zip(rates, sides[peer], strict=True))
        lines.append(f"| {side} | {statistics.median(rates):,.0f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    json.dump(measure(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS, {}), sys.stdout, indent=1)
