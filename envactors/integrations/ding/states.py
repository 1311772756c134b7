"""The states of DI-engine's envs and their transitions. The managers step and reset the envs."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from typing import Any

from envactors.integrations.ding.adapter import is_abnormal
from envactors.integrations.ding.values import EnvState

# A global variable, since looking up the member in the enum class, once per env and step, would be many times slower.
_RUN = EnvState.RUN


class States:
    """States and last observations of all envs.

    Args:
        env_num: Number of envs.
        episode_num: Number of episodes per env.
        auto_reset: True to reset an env at the end of an episode.
        reset_inplace: True if the step that ends an episode has already reset the env in the worker.

    Attributes:
        by_id: The state of each env.
        ready_obs: The last observation of each env; empty before the launch.
        episodes: How many episodes each env has finished since the launch.
        waiting: Ids of the envs with a pending step.
    """

    def __init__(self, env_num: int, episode_num: float, auto_reset: bool, reset_inplace: bool) -> None:
        self._episode_num = episode_num
        self._auto_reset = auto_reset
        self._reset_inplace = reset_inplace
        self.by_id: dict[int, Any] = dict.fromkeys(range(env_num), EnvState.VOID)
        self.ready_obs: dict[int, Any] = {}
        self.episodes: dict[int, int] = {}
        self.waiting: set[int] = set()

    @property
    def active(self) -> list[int]:
        """Ids of the envs in state RUN."""
        return [env_id for env_id, state in self.by_id.items() if state is _RUN]

    @property
    def ready(self) -> list[int]:
        """Ids of the envs in state RUN without a pending step."""
        return [env_id for env_id in self.active if env_id not in self.waiting] if self.waiting else self.active

    @property
    def are_all_ready(self) -> bool:
        """Whether all envs are in state RUN, and none has a pending step."""
        return not self.waiting and list(self.by_id.values()).count(_RUN) == len(self.by_id)

    @property
    def shown(self) -> dict[int, Any]:
        """The last observations of the ready envs, by env id."""
        if self.are_all_ready:
            return self.ready_obs.copy()
        return {env_id: self.ready_obs[env_id] for env_id in self.ready}

    def launch(self) -> None:
        """Record that all envs have started and need a reset."""
        self.by_id = dict.fromkeys(self.by_id, EnvState.INIT)
        self.ready_obs = dict.fromkeys(self.by_id)
        self.episodes = dict.fromkeys(self.by_id, 0)

    def close(self) -> None:
        """Record that all envs are closed."""
        self.by_id = dict.fromkeys(self.by_id, EnvState.VOID)
        self.ready_obs.clear()
        self.waiting.clear()

    def run(self, env_id: int, obs: Any) -> None:
        """Record that an episode has begun."""
        self.ready_obs[env_id] = obs
        self.by_id[env_id] = _RUN

    def record_rows(self, env_ids: Iterable[int], rows: Iterable[Any]) -> None:
        """Record the observations of steps that ended no episode."""
        self.waiting.difference_update(env_ids)
        self.ready_obs.update(zip(env_ids, rows, strict=False))

    def record_timestep(self, env_id: int, timestep: Any) -> bool:
        """Record a timestep.

        Returns:
            True if the env must be reset now.
        """
        self.waiting.discard(env_id)
        if timestep.info and is_abnormal(timestep.info):
            self.by_id[env_id] = EnvState.ERROR
            return False
        if not timestep.done:
            self.ready_obs[env_id] = timestep.obs
            return False
        self.episodes[env_id] += 1
        if self.episodes[env_id] >= self._episode_num:
            self.by_id[env_id] = EnvState.DONE
        elif not self._auto_reset:
            self.by_id[env_id] = EnvState.NEED_RESET
        elif self._reset_inplace:
            self.ready_obs[env_id] = timestep.obs
        else:
            return True
        return False

    def check(self, env_ids: KeysView[int]) -> None:
        """Raise if one of these envs cannot step now.

        Raises:
            AssertionError: An env is not in state RUN or has a pending step.
        """
        states, waiting = self.by_id, self.waiting
        if env_ids <= states.keys() and self.are_all_ready:
            return
        self.check_ids(env_ids)
        if all(states[env_id] is _RUN and env_id not in waiting for env_id in env_ids):
            return
        named = {env_id: states[env_id].name for env_id in env_ids}
        pending = sorted(waiting.intersection(env_ids))
        raise AssertionError(
            f"cannot step envs in the states {named}, of which {pending} have a pending step: expected envs in the "
            "state RUN without a pending step"
        )

    def check_ids(self, env_ids: Iterable[int]) -> None:
        """Raise if an env id is unknown.

        Raises:
            AssertionError: An id is unknown.
        """
        unknown = [env_id for env_id in env_ids if env_id not in self.by_id]
        require(not unknown, f"unknown env ids {unknown}: expected ids from 0 to {len(self.by_id) - 1}")


def require(condition: bool, otherwise: str) -> None:
    """Raise AssertionError unless ``condition`` is true, as DI-engine does, even under ``python -O``."""
    if not condition:
        raise AssertionError(otherwise)
