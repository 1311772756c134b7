"""Where each of DI-engine's envs stands, and what it goes on to from there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from envactors.integrations.ding_values import EnvState
from envactors.integrations.inside_ding import is_abnormal

# A name of its own: to look a member up in its class takes many times as long, once an env and step.
_RUN = EnvState.RUN


class States:
    """The states of the envs, and what they have shown last.

    Args:
        env_num: How many envs there are.
        episode_num: How many episodes each is to have.
        auto_reset: Whether an env whose episode ends is reset for the next one.
        reset_inplace: Whether its worker has done so already.

    Attributes:
        by_id: Each env's state.
        ready_obs: Each env's last observation; empty where the envs are not launched.
        episodes: How many episodes of each env have ended since the launch.
        waiting: The envs that owe the result of a step.
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
        """The envs in RUN."""
        return [env_id for env_id, state in self.by_id.items() if state is _RUN]

    @property
    def ready(self) -> list[int]:
        """The envs in RUN with nothing under way."""
        return [env_id for env_id in self.active if env_id not in self.waiting] if self.waiting else self.active

    @property
    def shown(self) -> dict[int, Any]:
        """What the envs in RUN with nothing under way have shown last."""
        if not self.waiting and list(self.by_id.values()).count(_RUN) == len(self.by_id):
            return self.ready_obs.copy()
        return {env_id: self.ready_obs[env_id] for env_id in self.ready}

    def launch(self) -> None:
        """The envs are there, and were not reset yet."""
        self.by_id = dict.fromkeys(self.by_id, EnvState.INIT)
        self.ready_obs = dict.fromkeys(self.by_id)
        self.episodes = dict.fromkeys(self.by_id, 0)

    def close(self) -> None:
        """The envs are there no more."""
        self.by_id = dict.fromkeys(self.by_id, EnvState.VOID)
        self.ready_obs.clear()
        self.waiting.clear()

    def run(self, env_id: int, obs: Any) -> None:
        """An episode has begun."""
        self.ready_obs[env_id] = obs
        self.by_id[env_id] = _RUN

    def go_on(self, env_ids: Iterable[int], rows: Iterable[Any]) -> None:
        """Envs have stepped, and there is nothing to say of them but what they show."""
        self.waiting.difference_update(env_ids)
        self.ready_obs.update(zip(env_ids, rows, strict=True))

    def take(self, env_id: int, timestep: Any) -> bool:
        """An env has stepped.

        Returns:
            Whether it is to be reset now.
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

    def check(self, env_ids: Collection[int]) -> None:
        """Refuses envs that cannot step now.

        Raises:
            AssertionError: One is not in RUN, or has a step under way.
        """
        states, waiting = self.by_id, self.waiting
        for env_id in env_ids:  # a generator takes twice as long
            if states.get(env_id) is not _RUN or env_id in waiting:
                break
        else:
            return
        self.check_ids(env_ids)
        named = {env_id: states[env_id].name for env_id in env_ids}
        under_way = sorted(waiting.intersection(env_ids))
        raise AssertionError(
            f"step of envs whose states are {named}, and those under way {under_way}: expected all in RUN, and none "
            "under way"
        )

    def check_ids(self, env_ids: Iterable[int]) -> None:
        """Refuses envs that there are not.

        Raises:
            AssertionError: One of them is not there.
        """
        unknown = [env_id for env_id in env_ids if env_id not in self.by_id]
        require(not unknown, f"there are no envs {unknown}: expected ids from 0 to {len(self.by_id) - 1}")


def require(condition: bool, otherwise: str) -> None:
    """Refuses as DI-engine does, whatever Python's options are."""
    if not condition:
        raise AssertionError(otherwise)
