"""Adapter around an env of PufferLib in its worker.

An env of PufferLib has several agents, and writes what it returns into its arrays. The adapter returns these
arrays as one nested observation, and ends an episode for the vector when the env is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envactors.integrations.adapter import EnvAdapter
from envactors.mailbox.specs import ArraySpec

# The arrays of an env, which `PufferEnvAdapter` returns as an observation.
ARRAYS = ("observations", "rewards", "terminals", "truncations", "masks")


class PufferEnvAdapter(EnvAdapter):
    """Env with Gymnasium's interface, around an emulated or native env of PufferLib, or a bare one of Gymnasium.

    Args:
        creator: Makes the env.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        seed: Passed to the creator, with ``buf=None``, if it has a parameter ``buf`` as PufferLib's own creators have.
    """

    def __init__(self, creator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> None:
        super().__init__(lambda: _create(creator, args, kwargs, seed))
        env = self._env
        self.observation_space: dict[str, ArraySpec] = {
            name: ArraySpec(array.shape, array.dtype) for name, array in self._arrays().items()
        }
        self.action_space: ArraySpec = ArraySpec(env.actions.shape, env.actions.dtype)

    def _arrays(self) -> dict[str, Any]:
        return {name: getattr(self._env, name) for name in ARRAYS}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        """Reset the env, which has no options."""
        _, info = self._env.reset() if seed is None else self._env.reset(seed=seed)
        return self._arrays(), {"infos": info if isinstance(info, list) else [info]}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step all agents of the env."""
        env = self._env
        *_, info = env.step(action)
        ended = bool(env.done)
        terminated = ended and bool(np.all(env.terminals))
        infos = info if isinstance(info, list) else [info]
        return self._arrays(), 0.0, terminated, ended and not terminated, {"infos": infos} if info else {}

    def envactors_description(self) -> dict[str, Any]:
        """Return what a vector env of PufferLib says of its envs."""
        env = self._env
        return {
            "single_observation_space": env.single_observation_space,
            "single_action_space": env.single_action_space,
            "emulated": env.emulated,
            "num_agents": env.num_agents,
        }


def _create(creator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> Any:
    try:
        parameters = inspect.signature(creator).parameters
    except (TypeError, ValueError):  # some built-in callables have none
        parameters = inspect.signature(lambda: None).parameters
    own: dict[str, Any] = {}
    if "buf" in parameters:
        own["buf"] = None
        if "seed" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            own["seed"] = seed
    env = creator(*args, **{**own, **kwargs})
    if hasattr(env, "single_observation_space"):
        return env
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env=env, seed=seed)
