"""Compares each drop-in with the class that it replaces; `measure.py dropins` uses it.

Libraries that are not installed keep the figures that they have.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from turns import Turn, compare, rate, table, times
from vectors import is_installed
from workloads import nothing

NUM_ENVS = 8
# Number of steps of a compiled program.
STEPS_PER_CALL = 100
ACTIONS = np.zeros(NUM_ENVS, np.int64)
AGENTS = [f"agent_{number}" for number in range(4)]
OBSERVATIONS, ACTION_SPACE = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)
Sides = dict[str, Callable[[], Any]]


class Timestep(NamedTuple):
    """What DI-engine's envs return."""

    obs: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class DingNothing:
    """An env of DI-engine that does nothing."""

    observation_space = OBSERVATIONS
    action_space = ACTION_SPACE
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


def agents_that_do_nothing() -> Callable[[], Any]:
    """Return a factory of envs of PettingZoo with four agents that do nothing."""
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
            return OBSERVATIONS

        def action_space(self, agent: str) -> Any:  # noqa: ARG002
            """Return that of two actions."""
            return ACTION_SPACE

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


def pettingzoo_sides() -> Sides:
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


def gymnasium_sides() -> Sides:
    """Return the vector envs of Gymnasium."""
    from envactors.integrations.gymnasium import ActorVectorEnv

    factories = [nothing] * NUM_ENVS
    return {
        "`AsyncVectorEnv`": lambda: gymnasium.vector.AsyncVectorEnv(factories, context="forkserver"),
        "`ActorVectorEnv`": lambda: ActorVectorEnv(factories),
        "`ActorVectorEnv`, 4 envs per process": lambda: ActorVectorEnv(factories, envs_per_actor=4),
    }


def sb3_sides() -> Sides:
    """Return the vector envs of stable-baselines3."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from envactors.integrations.sb3 import ActorVecEnv

    factories = [nothing] * NUM_ENVS
    return {
        "`SubprocVecEnv`": lambda: SubprocVecEnv(factories, start_method="forkserver"),
        "`ActorVecEnv`": lambda: ActorVecEnv(factories),
        "`ActorVecEnv`, 4 envs per process": lambda: ActorVecEnv(factories, envs_per_actor=4),
    }


def tianshou_sides() -> Sides:
    """Return the vector envs of tianshou."""
    from tianshou.env import SubprocVectorEnv

    from envactors.integrations.tianshou import ActorVectorEnv

    factories = [nothing] * NUM_ENVS
    return {
        "`SubprocVectorEnv`": lambda: SubprocVectorEnv(factories),
        "`ActorVectorEnv`": lambda: ActorVectorEnv(factories),
    }


def torchrl_sides() -> Sides:
    """Return the parallel envs for TorchRL."""
    from torchrl.envs import GymWrapper, ParallelEnv

    from envactors.integrations.torchrl import ActorEnv

    factories = [nothing] * NUM_ENVS
    return {
        "`ParallelEnv`": lambda: ParallelEnv(NUM_ENVS, functools.partial(GymWrapper, nothing())),
        "`ActorEnv`": lambda: ActorEnv(factories),
        "`ActorEnv`, 4 envs per process": lambda: ActorEnv(factories, envs_per_actor=4),
    }


def ding_sides() -> Sides:
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


class Program:
    """Steps a vector env in a compiled program of JAX, many times per call."""

    steps_per_call = STEPS_PER_CALL

    def __init__(self, envs: Any, callbacks: Callable[[Any], Any]) -> None:
        import jax

        reset, step = callbacks(envs)
        self.close = envs.close
        self._reset = jax.jit(reset)
        self._run = jax.jit(lambda actions: self._steps(step, actions))

    @staticmethod
    def _steps(step: Callable[[Any], Any], actions: Any) -> Any:
        import jax

        return jax.lax.scan(lambda carry, _: (carry, step(actions)), 0, length=STEPS_PER_CALL)

    def reset(self) -> Any:
        """Reset all envs."""
        return self._reset(0)

    def step(self, actions: Any) -> Any:
        """Run the program, with the same actions in each of its steps."""
        import jax

        return jax.block_until_ready(self._run(actions))


def callbacks_by_hand(envs: Any) -> Any:
    """Return ``reset`` and ``step`` as one writes them for compiled code."""
    import jax
    from jax.experimental import io_callback

    obs = jax.ShapeDtypeStruct((NUM_ENVS, 4), np.float32)
    flags = jax.ShapeDtypeStruct((NUM_ENVS,), np.bool_)
    results = obs, jax.ShapeDtypeStruct((NUM_ENVS,), np.float32), flags, flags

    def step(actions: Any) -> Any:
        following, rewards, terminated, truncated, _ = envs.step(np.asarray(actions))
        return following, rewards.astype(np.float32), terminated, truncated

    return (
        lambda seed: io_callback(lambda seed: envs.reset(seed=int(seed))[0], obs, seed, ordered=True),
        lambda actions: io_callback(step, results, actions, ordered=True),
    )


def jax_sides() -> Sides:
    """Return the vector envs in compiled code."""
    import envactors as ea
    from envactors.integrations.jax import callbacks

    factories = [nothing] * NUM_ENVS

    def theirs() -> Program:
        return Program(gymnasium.vector.AsyncVectorEnv(factories, context="forkserver"), callbacks_by_hand)

    return {
        "`io_callback` of `AsyncVectorEnv`": theirs,
        "`callbacks`": lambda: Program(ea.VectorEnv(factories), callbacks),
        "`callbacks`, 4 envs per process": lambda: Program(ea.VectorEnv(factories, envs_per_actor=4), callbacks),
    }


def lerobot_nothing() -> Any:
    """Return an env that does nothing, with the attributes that LeRobot reads."""
    env: Any = nothing()
    env.metadata, env._max_episode_steps = {"render_fps": 1}, 1 << 30  # noqa: SLF001 # as Gymnasium's `TimeLimit` has it
    return env


def lerobot_sides() -> Sides:
    """Return the vector envs of one of LeRobot's tasks."""
    from lerobot.envs.utils import freeze_after_episode_end

    from envactors.integrations.lerobot import LazyActorVectorEnv

    factories = [lerobot_nothing] * NUM_ENVS
    frozen = [freeze_after_episode_end(lerobot_nothing)] * NUM_ENVS
    return {
        "`AsyncVectorEnv`": lambda: gymnasium.vector.AsyncVectorEnv(frozen, context="forkserver"),
        "`LazyActorVectorEnv`": lambda: LazyActorVectorEnv(factories),
        "`LazyActorVectorEnv`, 4 envs per process": lambda: LazyActorVectorEnv(factories, envs_per_actor=4),
    }


class BusyAgents:
    """A multi-agent env whose steps take a millisecond of a core."""

    possible_agents = agents = AGENTS
    metadata: dict[str, Any] = {}  # noqa: RUF012 # as Gymnasium has it
    render_mode = None

    def __init__(self) -> None:
        self.observation_spaces = dict.fromkeys(AGENTS, OBSERVATIONS)
        self.action_spaces = dict.fromkeys(AGENTS, ACTION_SPACE)
        self._observations = dict.fromkeys(AGENTS, np.zeros(4, np.float32))
        self._rewards = dict.fromkeys(AGENTS, 0.0)

    @property
    def unwrapped(self) -> BusyAgents:
        """The env itself."""
        return self

    def get_observation_space(self, agent: str) -> Any:
        """Return that of four float32."""
        return self.observation_spaces[agent]

    def get_action_space(self, agent: str) -> Any:
        """Return that of two actions."""
        return self.action_spaces[agent]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Return zeros."""
        return self._observations, {}

    def step(self, action_dict: Any) -> Any:  # noqa: ARG002
        """Return zeros after a millisecond."""
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass
        return self._observations, self._rewards, {"__all__": False}, {"__all__": False}, {}

    def close(self) -> None:
        """Do nothing."""


class EachAgent:
    """A multi-agent vector env of RLlib, stepped with the actions of a vector env."""

    def __init__(self, envs: Any) -> None:
        self._envs, self.reset, self.close = envs, envs.reset, envs.close

    def step(self, actions: Any) -> Any:
        """Step all envs; each agent of an env takes the same action."""
        return self._envs.step([dict.fromkeys(AGENTS, action) for action in actions])


def rllib_sides() -> Sides:
    """Return the multi-agent vector envs of RLlib."""
    from ray.rllib.env.vector.sync_vector_multi_agent_env import SyncVectorMultiAgentEnv

    from envactors.integrations.rllib.multi_agent import ActorVectorMultiAgentEnv

    factories = [BusyAgents] * NUM_ENVS
    return {
        "`MultiAgentEnvRunner`": lambda: EachAgent(SyncVectorMultiAgentEnv(factories)),
        "`ActorMultiAgentEnvRunner`": lambda: EachAgent(ActorVectorMultiAgentEnv(factories, {})),
        "`ActorMultiAgentEnvRunner`, 4 envs per process": lambda: EachAgent(
            ActorVectorMultiAgentEnv(factories, {"envs_per_actor": 4})
        ),
    }


LIBRARIES: dict[str, tuple[str, Callable[[], Sides]]] = {
    "gymnasium": ("gymnasium", gymnasium_sides),
    "sb3": ("stable_baselines3", sb3_sides),
    "tianshou": ("tianshou", tianshou_sides),
    "torchrl": ("torchrl", torchrl_sides),
    "ding": ("ding", ding_sides),
    "pettingzoo": ("pettingzoo", pettingzoo_sides),
    "jax": ("jax", jax_sides),
    "lerobot": ("lerobot", lerobot_sides),
    "rllib": ("ray", rllib_sides),
}
# The envs, where they are not eight that do nothing.
WORK = {"rllib": "8 envs with 4 agents, 1 ms per step"}


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


@contextlib.contextmanager
def stepping(library: str, name: str) -> Iterator[Turn]:
    """Step one of a library's vector envs or managers."""
    _, sides = LIBRARIES[library]
    envs = sides()[name]()
    step = stepper(envs)
    steps = NUM_ENVS * getattr(envs, "steps_per_call", 1)

    def run() -> int:
        step()
        return steps

    yield functools.partial(rate, run)
    envs.close()


def measure(rounds: int, known: dict[str, Any]) -> dict[str, Any]:
    """Measure the libraries that are installed; the figures of the others stay."""
    measured = dict(known)
    for library, (package, sides) in LIBRARIES.items():
        if is_installed(package):
            # A version that the drop-in does not know.
            with contextlib.suppress(ImportError):
                measured[library] = compare(
                    {name: functools.partial(stepping, library, name) for name in sides()}, rounds
                )
    return measured


def show(library: str, measured: dict[str, Any]) -> str:
    """Return the table of one library's page."""
    if library not in measured:
        return "Not measured yet.\n"
    found = measured[library]
    peer = next(iter(found))
    rows = [[name, times(rates, found[peer])] for name, rates in found.items()]
    return table([WORK.get(library, "8 envs that do nothing"), f"steps/s relative to {peer}"], rows)
