"""DI-engine's env managers over actors: `AsyncActorEnvManager`, `SyncActorEnvManager`, `ActorEnvManagerV2`.

The managers work with any object that has ``reset``, ``step``, ``seed`` and ``close``. Where DI-engine is installed,
they are of its `BaseEnvManager`, give its `BaseEnvTimestep`, and are registered as ``async_actor``, ``actor`` and
``actor_v2``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envactors.errors import VectorStepError
from envactors.integrations.ding_async import AsyncActorEnvManager
from envactors.integrations.ding_values import first_rows, register, rows_of, stack_trees, timestep_tree

__all__ = ["ActorEnvManagerV2", "AsyncActorEnvManager", "SyncActorEnvManager"]


@register("actor")
class SyncActorEnvManager(AsyncActorEnvManager):
    """Steps envs and waits for all of them, under the interface of ``SyncSubprocessEnvManager``.

    Arguments and errors as for `AsyncActorEnvManager`; ``wait_num`` and ``step_wait_timeout`` mean nothing here.
    """

    config: dict[str, Any] = {  # noqa: RUF012 # as there
        **AsyncActorEnvManager.config,
        "wait_num": float("inf"),
        "step_wait_timeout": None,
    }

    def _step_ready(self, actions: Mapping[int, Any]) -> dict[int, Any]:
        everyone = range(self._env_num)
        batch = None
        if len(actions) == self._env_num:
            batch = self._as_batch([actions[env_id] for env_id in everyone])
        timesteps: Any
        if batch is not None:
            timesteps = self._step_all(everyone, batch)
        else:
            self._send(actions)
            timesteps = {}
            while self._states.waiting:
                timesteps |= self._receive(None, None)
        return {env_id: timesteps[env_id] for env_id in actions}

    def _step_all(self, everyone: range, batch: Any) -> Sequence[Any] | dict[int, Any]:
        try:
            obs, rewards, done, _, infos = self._actors.step(batch)
        except VectorStepError as error:
            failed = error
        else:
            return self._take(everyone, obs, rewards, done, infos)
        return self._take_failed(failed)


@register("actor_v2")
class ActorEnvManagerV2(SyncActorEnvManager):
    """Takes and gives nested arrays, under the interface of ``SubprocessEnvManagerV2``.

    These are treetensor's where it is installed, else dicts of arrays whose keys are attributes too.
    """

    @property
    def ready_obs(self) -> Any:
        """The observations of the envs that are ready, stacked per leaf in the order of `ready_obs_id`.

        Waits and raises like that of `AsyncActorEnvManager`.
        """
        ready = list(self._ready_now().values())
        return stack_trees(ready) if ready else first_rows(stack_trees([self._states.ready_obs[0]]), 0)

    def step(self, actions: Any) -> list[Any]:
        """Steps the envs that are ready.

        Args:
            actions: One an env, in the order of `ready_obs_id`: a list, or arrays with the envs along axis 0.

        Returns:
            For each env ``obs``, ``reward``, ``done``, ``info`` and ``env_id``. The keys of an info are made
            identifiers, and its strings left out.

        Raises:
            Exception: As that of `AsyncActorEnvManager`.
        """
        self._check_closed()
        chosen = dict(zip(self.ready_obs_id, rows_of(actions), strict=False))
        return [timestep_tree(env_id, timestep) for env_id, timestep in self._step(chosen).items()]
