"""The vector env of RLlib's single-agent env runner. Nothing here imports Ray."""

from __future__ import annotations

from typing import Any

import numpy as np

from envactors.integrations.failures import or_first_failure
from envactors.integrations.gymnasium.vector_env import ActorVectorEnv


class SingleAgentVectorEnv(ActorVectorEnv):
    """``ActorVectorEnv`` whose resets do not fail, unless failures raise.

    The env runner takes the result of the step after an episode as the first observation of the next one, whatever its
    flags say. If that reset fails, its result is the last observation, so the env is reset again at once.
    """

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all envs, and reset those whose episode is over, until they are reset."""
        resets = self._access.resets_next()
        observations, rewards, terminations, truncations, infos = super().step(actions)
        failed = np.flatnonzero(resets & truncations).tolist()
        if failed:
            observations = self._reset_again(failed, infos)
            truncations[failed] = False
        return observations, rewards, terminations, truncations, infos

    def _reset_again(self, env_ids: list[int], infos: dict[str, Any]) -> Any:
        """Reset some envs, add their infos to those of the step, and return the observations of all envs."""
        batch = or_first_failure(lambda: self._access.reset_again(env_ids))
        self._observations.replace_some(env_ids, batch.obs)
        for env_id, info in zip(env_ids, batch.infos, strict=True):
            self._add_info(infos, info, env_id)
        return self._observations.current(self.copy)
