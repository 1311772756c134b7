"""The adapter around an env of tianshou in its worker. It imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envactors.errors import VectorInputError
from envactors.integrations.adapter import EnvAdapter
from envactors.worker.context import current_actor


class TianshouEnvAdapter(EnvAdapter):
    """An env with the semantics of tianshou.

    Args:
        factory: Creates the env.
        reports_seeds: True to add the seed of each reset to its info.
    """

    def __init__(self, factory: Callable[[], Any], reports_seeds: bool = False) -> None:
        super().__init__(factory)
        self._reports_seeds = reports_seeds
        context = current_actor()
        self._needs_reset = context is not None and context.incarnation > 0

    def reset(self, **kwargs: Any) -> Any:
        self._needs_reset = False
        result = self._env.reset(**kwargs)
        if self._reports_seeds:
            obs, info = result
            result = obs, {**info, "episode_seed": kwargs["seed"]}
        return result

    def step(self, action: Any) -> Any:
        if self._needs_reset:
            raise VectorInputError(
                "cannot step the env: its process was replaced, so its episode is lost. Call reset() first"
            )
        return self._env.step(action)

    def envactors_set(self, name: str, value: Any) -> None:
        """Set an attribute on the innermost env, as tianshou does."""
        setattr(self._env.unwrapped, name, value)

    def render(self, **kwargs: Any) -> Any:
        return self._env.render(**kwargs) if hasattr(self._env, "render") else None

    def envactors_seed(self, seed: int | None) -> Any:
        """Call the env's own ``seed``; if it has none, seed the action space and reset the env with the seed."""
        if hasattr(self._env, "seed"):
            return self._env.seed(seed)
        self._env.action_space.seed(seed=seed)
        self.reset(seed=seed)
        return None
