"""`ActorEnv`: an ``EnvBase`` of TorchRL over actors, in the place of ``ParallelEnv`` and ``SerialEnv``.

    _step ──▶ a step of the facade, of all envs or of those under ``"_step"``      ──▶ a TensorDict of shape [num_envs]
    _reset ─▶ a reset of the facade, of all envs or of those under ``"_reset"``    ──▶ likewise

The mechanisms are those of `envactors.vector.facade.VectorEnv` with ``autoreset="disabled"``: TorchRL asks for every
reset itself. Arrays that the facade returns are copies of the shared memory already, since TorchRL keeps the
TensorDicts of a rollout; tensors are made of them without another copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs import EnvBase

from envactors.actor.handle import ActorHandle
from envactors.errors import SpaceMismatchError
from envactors.integrations.failures import or_first_failure
from envactors.integrations.options import make_vector
from envactors.integrations.torchrl.values import Infos, Values, make_specs, spread
from envactors.mailbox.factory import Factory, as_factories
from envactors.vector.facade import VectorEnv
from envactors.vector.options import VectorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFUSED = {
    "autoreset": "TorchRL asks for every reset itself, which is autoreset='disabled'",
    "copy": "the TensorDicts of a rollout are kept, and views of the shared memory would change in them",
}


class ActorEnv(EnvBase):  # type: ignore[misc] # its module is checked nowhere
    """Steps many Gymnasium envs as one env of TorchRL with the batch size ``[num_envs]``, in actors.

    Specs and keys are those of a ``ParallelEnv`` of ``GymEnv``: observations are ``"observation"``, or have the keys
    of a Dict space; ``"reward"`` is float32, ``"done"``, ``"terminated"`` and ``"truncated"`` are bool, all of shape
    ``[num_envs, 1]``. A Tuple space becomes a composite with the keys ``"0"``, ``"1"`` and so on.

    Args:
        env_fns: One callable per env, which makes an env of Gymnasium, or ``"module:callable"``; called only in the
            workers.
        categorical_action_encoding: True to encode discrete values as categories; False, as in ``GymEnv``: as one-hot
            vectors.
        device: Device of the TensorDicts; None: they have none, and their tensors are on the CPU.
        info_spec: Specs, for one env, of entries of the infos that TensorDicts shall have; zero where an env's info
            has none.
        **options: See `envactors.VectorOptions`. With ``on_failure="renew"`` a failed env's episode is truncated, with
            the exception as ``infos[i]["failure"]``, and its next reset is on a new process; with ``seed_episodes``,
            ``reset_infos`` have the seeds.

    Attributes:
        actors: Handle of each process.
        vector: The vector behind this class, with handles of the envs (``vector[i]``) and ``stats()``.
        infos: Each env's info of the last step; empty if it was not stepped.
        reset_infos: Each env's info of its last reset.

    Raises:
        ActorStartError: An env could not be created.
        SpaceMismatchError: The envs' spaces differ, or TorchRL has no specs for them.
    """

    def __init__(
        self,
        env_fns: Iterable[Factory],
        *,
        categorical_action_encoding: bool = False,
        device: torch.device | str | None = None,
        info_spec: Mapping[str, TensorSpec] | None = None,
        **options: Unpack[VectorOptions],
    ) -> None:
        factories = as_factories(env_fns, "env_fns")
        envs = make_vector(VectorEnv, "ActorEnv", factories, options, _REFUSED, autoreset="disabled")
        try:
            super().__init__(device=device, batch_size=(envs.num_envs,))
            self.vector: VectorEnv = envs
            self._make_specs(categorical_action_encoding, info_spec)
        except BaseException:
            envs.close(0)
            raise
        self.actors: list[ActorHandle[Any]] = envs.actors
        self.infos: list[dict[str, Any]] = [{} for _ in range(envs.num_envs)]
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(envs.num_envs)]
        self.is_closed: bool = False

    def _make_specs(self, categorical: bool, info_spec: Mapping[str, TensorSpec] | None) -> None:
        envs, first = self.vector, self.vector[0]
        observation_space = first.get("observation_space").result()
        action_space = first.get("action_space").result()
        specs = make_specs(observation_space, action_space, envs.num_envs, categorical=categorical)
        assert envs.observation_spec is not None, "there is a space"
        assert envs.action_spec is not None, "there is a space"
        self._observations = Values("observation", observation_space, envs.observation_spec, specs.observation)
        self._actions = Values("action", action_space, envs.action_spec, specs.action)
        self.observation_spec: Any = specs.observation
        self.full_action_spec: Any = specs.action
        self.done_spec: Any = specs.done
        self._reward_shape = (envs.num_envs, *(getattr(envs.reward_spec, "shape", ()) or (1,)))
        self.reward_spec: Any = Unbounded(self._reward_shape)
        self._info_reader = None
        if info_spec:
            if taken := info_spec.keys() & {*specs.observation.keys(), *specs.done.keys(), "reward"}:
                raise SpaceMismatchError(f"info_spec has {sorted(taken)}, which are entries already: expected others")
            self._info_reader = Infos(info_spec)
            self.observation_spec.update(self._info_reader.specs_of(envs.num_envs))

    # Stepping --------------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step all envs, or those under ``"_step"``; the others keep the values that they have in the TensorDict.

        Raises:
            Exception: The exception of the first env that failed, once all have answered.
        """
        envs, num_envs = self.vector, self.vector.num_envs
        stepped, env_ids = _selected(tensordict.get("_step", None), num_envs)
        actions = self._actions.decode(tensordict, env_ids)
        obs, rewards, terminated, truncated, infos = or_first_failure(lambda: envs.step(actions, env_ids))
        if env_ids is not None:
            rewards = spread(rewards, env_ids, num_envs)
            terminated, truncated = spread(terminated, env_ids, num_envs), spread(truncated, env_ids, num_envs)
            infos = _spread_infos([{} for _ in range(num_envs)], infos, env_ids)
        self.infos = infos
        entries = self._entries(obs, env_ids, infos)
        entries["reward"] = torch.from_numpy(rewards.reshape(self._reward_shape).astype(np.float32))
        entries["terminated"] = torch.from_numpy(terminated[:, None])
        entries["truncated"] = torch.from_numpy(truncated[:, None])
        entries["done"] = torch.from_numpy((terminated | truncated)[:, None])
        if stepped is not None:
            for key, fresh in entries.items():
                before = tensordict.get(key, None)
                if before is not None:
                    fresh[~stepped] = before[~stepped].to(fresh.device)
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
    ) -> TensorDictBase:
        """Reset all envs, or those under ``"_reset"``, whose rows alone are valid then; see `VectorEnv.reset`.

        Raises:
            Exception: The exception of the first env that failed, once all have answered.
        """
        envs, num_envs = self.vector, self.vector.num_envs
        _, env_ids = _selected(None if tensordict is None else tensordict.get("_reset", None), num_envs)
        obs, infos = or_first_failure(lambda: envs.reset(seed, options, env_ids))
        if env_ids is not None:
            infos = _spread_infos(self.reset_infos, infos, env_ids)
        self.reset_infos = infos
        entries = self._entries(obs, env_ids, infos)
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _entries(self, obs: Any, env_ids: list[int] | None, infos: list[dict[str, Any]]) -> dict[Any, torch.Tensor]:
        """Return the observations and what is read from infos, with one row per env."""
        entries = self._observations.encode(obs, env_ids)
        if self._info_reader is not None:
            entries.update(self._info_reader.encode(infos))
        return entries

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Reset all envs with seeds, of which each follows from the one before, as ``ParallelEnv`` does.

        Args:
            seed: Seed of the first env; None: each env chooses.
            static_seed: True to give all envs the same seed.

        Returns:
            The seed that follows from the last env's.
        """
        seeds: list[int | None] = []
        for _ in range(self.vector.num_envs):
            seeds.append(seed)
            seed = super().set_seed(seed, static_seed)
        self._reset(seed=seeds)
        return seed

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: `set_seed` seeds all envs at once."""

    def close(self, *, raise_if_closed: bool = True) -> None:  # noqa: ARG002 # TorchRL's name
        """Close the envs and end their processes, within the close deadline; may be called again."""
        self.vector.close()
        self.is_closed = True


def _selected(mask: torch.Tensor | None, num_envs: int) -> tuple[torch.Tensor | None, list[int] | None]:
    """Return which envs a mask of shape ``[num_envs]`` or ``[num_envs, 1]`` selects: as a mask on the CPU, and as ids.

    Both are None if it selects all envs.
    """
    if mask is None or mask.all():
        return None, None
    mask = mask.reshape(num_envs).cpu()
    return mask, mask.nonzero().flatten().tolist()


def _spread_infos(
    before: list[dict[str, Any]], infos: list[dict[str, Any]], env_ids: list[int]
) -> list[dict[str, Any]]:
    """Return one info per env: those of some envs, and what the others had before."""
    fresh = dict(zip(env_ids, infos, strict=True))
    return [fresh.get(env_id, info) for env_id, info in enumerate(before)]
