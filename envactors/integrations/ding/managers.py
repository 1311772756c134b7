"""`SyncActorEnvManager` and `ActorEnvManagerV2`: managers that wait for all envs of a step.

Everything else is inherited from `envactors.integrations.ding.async_manager`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envactors.errors import VectorStepError
from envactors.integrations.ding.async_manager import AsyncActorEnvManager
from envactors.integrations.ding.values import first_rows, register, rows_of, stack_trees, timestep_tree


@register("actor")
class SyncActorEnvManager(AsyncActorEnvManager):
    """Steps envs and waits for all of them, with the interface of ``SyncSubprocessEnvManager``.

    Arguments and errors are those of `AsyncActorEnvManager`; ``wait_num`` and ``step_wait_timeout`` have no effect.
    """

    config: dict[str, Any] = {  # noqa: RUF012 # as in DI-engine
        **AsyncActorEnvManager.config,
        "wait_num": float("inf"),
        "step_wait_timeout": None,
    }

    def _step_ready(self, actions: Mapping[int, Any]) -> dict[int, Any]:
        if not actions:
            return {}
        env_ids = None if (ids := list(actions)) == self._all_ids else ids
        try:
            obs, rewards, done, _, infos = self._access.step_as_given(list(actions.values()), env_ids)
        except VectorStepError as error:
            failed = error
        else:
            return self._make_timesteps(self._all_ids if env_ids is None else ids, obs, rewards, done, infos)
        timesteps = self._timesteps_of_failures(failed)
        return {env_id: timesteps[env_id] for env_id in actions}


@register("actor_v2")
class ActorEnvManagerV2(SyncActorEnvManager):
    """Takes and returns nested arrays, with the interface of ``SubprocessEnvManagerV2``.

    The arrays are those of treetensor if it is installed, else dicts of arrays with attribute access.
    """

    @property
    def ready_obs(self) -> Any:
        """The observations of the ready envs, stacked per leaf in the order of `ready_obs_id`.

        Waits and raises like `AsyncActorEnvManager.ready_obs`.
        """
        ready = list(super().ready_obs.values())
        return stack_trees(ready) if ready else first_rows(stack_trees([self._states.ready_obs[0]]), 0)

    def step(self, actions: Any) -> list[Any]:
        """Step the ready envs.

        Args:
            actions: One action per env, in the order of `ready_obs_id`: a list, or arrays with the envs along axis 0.

        Returns:
            For each env, ``obs``, ``reward``, ``done``, ``info``, and ``env_id``. Keys of an info become identifiers,
            and strings in it are omitted.

        Raises:
            Exception: As in `AsyncActorEnvManager.step`.
        """
        self._check_closed()
        chosen = dict(zip(self.ready_obs_id, rows_of(actions), strict=False))
        return [timestep_tree(env_id, timestep) for env_id, timestep in super().step(chosen).items()]
