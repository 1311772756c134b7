"""The sides of the drop-ins for JAX, LeRobot, and RLlib; `dropins` measures them.

They step envs that do nothing, except for RLlib's, whose peer has no processes: its envs take a millisecond per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

NUM_ENVS = 8
AGENTS = [f"agent_{number}" for number in range(4)]
STEPS_PER_PROGRAM = 100


class Nothing(gymnasium.Env):
    """Does nothing, with four float32."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata: dict[str, Any] = {"render_fps": 1}  # noqa: RUF012 # as Gymnasium has it
    render_mode = None
    _max_episode_steps = 1 << 30  # which LeRobot's wrapper reads

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: ARG002
        """Return zeros."""
        return self._observation, {}

    def step(self, action: Any) -> Any:  # noqa: ARG002
        """Return zeros."""
        return self._observation, 0.0, False, False, {}


class Program:
    """Steps a vector env in a compiled program of JAX, many times per call."""

    steps_per_call = STEPS_PER_PROGRAM

    def __init__(self, envs: Any, callbacks: Callable[[Any], Any]) -> None:
        import jax

        reset, step = callbacks(envs)
        self.close = envs.close
        self._reset = jax.jit(reset)
        self._run = jax.jit(lambda actions: self._steps(step, actions))

    @staticmethod
    def _steps(step: Callable[[Any], Any], actions: Any) -> Any:
        import jax

        return jax.lax.scan(lambda carry, _: (carry, step(actions)), 0, length=STEPS_PER_PROGRAM)

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


def jax_sides() -> dict[str, Callable[[], Any]]:
    """Return the vector envs in compiled code."""
    import envactors as ea
    from envactors.integrations.jax import callbacks

    factories = [Nothing] * NUM_ENVS

    def theirs() -> Program:
        return Program(gymnasium.vector.AsyncVectorEnv(factories, context="forkserver"), callbacks_by_hand)

    return {
        "`io_callback` of `AsyncVectorEnv`": theirs,
        "`callbacks`": lambda: Program(ea.VectorEnv(factories), callbacks),
        "`callbacks`, 4 envs per process": lambda: Program(ea.VectorEnv(factories, envs_per_actor=4), callbacks),
    }


def lerobot_sides() -> dict[str, Callable[[], Any]]:
    """Return the vector envs of one of LeRobot's tasks."""
    from lerobot.envs.utils import freeze_after_episode_end

    from envactors.integrations.lerobot import LazyActorVectorEnv

    factories = [Nothing] * NUM_ENVS
    frozen = [freeze_after_episode_end(Nothing)] * NUM_ENVS
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
        self.observation_spaces = dict.fromkeys(AGENTS, Nothing.observation_space)
        self.action_spaces = dict.fromkeys(AGENTS, Nothing.action_space)
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


def rllib_sides() -> dict[str, Callable[[], Any]]:
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


LIBRARIES = {
    "jax": ("jax", jax_sides),
    "lerobot": ("lerobot", lerobot_sides),
    "rllib": ("ray", rllib_sides),
}
# What the envs do, where it is not nothing.
WORK = {"rllib": "8 envs with 4 agents, 1 ms per step"}
