"""The adapter around an env of tianshou in its worker. It imports no framework.

`envactors.integrations.tianshou.vector_env` reads the results that it marks as `MISFIT`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from envactors.integrations.adapter import ANY, EnvAdapter, exact_check
from envactors.mailbox.specs import spec_of_space, zeros
from envactors.worker.host import find

# Key in the info of a result that would change in its row: ``(observation, reward, terminated, truncated)`` of a step,
# the observation of a reset in a tuple, or the value that the env's ``seed`` has returned in a tuple. A tuple without
# an observation means that the observation is in the row.
MISFIT: Final = "envactors_misfit"
_FLAGS = (bool, np.bool_)


class TianshouEnvAdapter(EnvAdapter):
    """An env with the semantics of tianshou, whose values may have any shape and type.

    Args:
        factory: Creates the env.
        shares: True to send values that are exactly as the env's spaces say through shared memory.
    """

    reward_space: None = None  # a vector of rewards is a misfit

    def __init__(self, factory: Callable[[], Any], shares: bool) -> None:
        super().__init__(factory)
        space = getattr(self._env, "observation_space", None)
        self.observation_space: Any = space if shares and space is not None else ANY
        self.action_space: Any = getattr(self._env, "action_space", None) if shares else None
        spec = spec_of_space(self.observation_space)
        self._fits, self._blank = exact_check(spec), zeros(spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the env with the arguments in ``options``, or only seed it if ``options`` is empty."""
        if options == {}:
            return self._blank, {MISFIT: (self._seed(seed),)}
        result = self._env.reset(**(options or {}) | ({} if seed is None else {"seed": seed}))
        if type(result) is not tuple or len(result) != 2 or self._fits(result[0]):
            return result
        return self._blank, {**result[1], MISFIT: (result[0],)}

    def step(self, action: Any) -> Any:
        result = self._env.step(action)
        if type(result) is not tuple or len(result) != 5:
            return result
        obs, reward, terminated, truncated, info = result
        fits = self._fits(obs)
        if fits and isinstance(reward, float) and type(terminated) in _FLAGS and type(truncated) in _FLAGS:
            return result
        others = reward, terminated, truncated
        return obs if fits else self._blank, 0.0, False, False, {**info, MISFIT: others if fits else (obs, *others)}

    def envactors_get(self, name: str) -> Any:
        """Return an attribute of the env, even one that wrappers hide."""
        return find(self._env, name)

    def envactors_set(self, name: str, value: Any) -> None:
        """Set an attribute on the innermost env, as tianshou does."""
        setattr(self._env.unwrapped, name, value)

    def render(self, **kwargs: Any) -> Any:
        return self._env.render(**kwargs) if hasattr(self._env, "render") else None

    def _seed(self, seed: int | None) -> Any:
        """Call the env's own ``seed``; if it has none, seed the action space and reset the env with the seed."""
        if hasattr(self._env, "seed"):
            return self._env.seed(seed)
        self._env.action_space.seed(seed=seed)
        self._env.reset(seed=seed)
        return None
