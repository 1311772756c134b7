"""`ActorEnv`: an ``EnvBase`` of TorchRL on actors, which replaces ``ParallelEnv`` and ``SerialEnv``.

    _step ──▶ steps all envs, or those selected by ``"_step"``      ──▶ a TensorDict of shape [num_envs]
    _reset ─▶ resets all envs, or those selected by ``"_reset"``    ──▶ likewise

`envactors.vector_env.VectorEnv` runs the envs, with ``autoreset="disabled"``: TorchRL requests every reset. The
facade returns copies of the shared memory, since TorchRL keeps the TensorDicts of a rollout, and tensors use these
copies directly. Specs and conversions live in `envactors.integrations.torchrl.values`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs import EnvBase

from envactors.actor.future import BoundToProcess
from envactors.actor.handle import ActorHandle
from envactors.errors import SpaceMismatchError
from envactors.integrations.access import VectorAccess
from envactors.integrations.failures import or_first_failure
from envactors.integrations.options import check_seed, make_vector
from envactors.integrations.torchrl.values import Infos, Values, make_specs, spread
from envactors.mailbox.factory import Factory, as_factories
from envactors.vector.options import VectorOptions
from envactors.vector_env import VectorEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REFUSED = {
    "autoreset": "TorchRL requests every reset itself, which is autoreset='disabled'",
    "copy": "TorchRL keeps the TensorDicts of a rollout, and views of the shared memory would change in them",
}


class ActorEnv(BoundToProcess, EnvBase):  # type: ignore[misc] # mypy skips its module
    """An env of TorchRL with the batch size ``[num_envs]`` that steps many Gymnasium envs in actors.

    Specs and keys are those of a ``ParallelEnv`` of ``GymEnv``. Observations have the key ``"observation"``, or
    ``"pixels"`` if the space is ``Box(0, 255, ..., uint8)``, or the keys of a Dict space. ``"reward"`` is float32, and
    ``"done"``, ``"terminated"``, and ``"truncated"`` are bool, all of shape ``[num_envs, 1]``. A Tuple space becomes a
    composite with the keys ``"0"``, ``"1"``, and so on.

    Args:
        env_fns: One callable per env that creates a Gymnasium env, or a string ``"module:callable"``; called only in
            the workers.
        categorical_action_encoding: True to encode discrete values as categories; False to encode them as one-hot
            vectors, as ``GymEnv`` does.
        device: Device of the TensorDicts; with None they have no device, and their tensors are on the CPU.
        info_spec: Specs, for one env, of the info entries to add to TensorDicts; missing entries are zero.
        **options: See `envactors.VectorOptions`. With ``on_failure="renew"`` the episode of a failed env is truncated,
            ``infos[i]["failure"]`` is the exception, and the next reset runs in a new process. With ``seed_episodes``,
            ``reset_infos`` contain the seeds.

    Attributes:
        actors: The handle of each process.
        vector: The vector behind this class, with handles of the envs (``vector[i]``) and ``stats()``.
        infos: The info of each env's last step; empty if it was not stepped.
        reset_infos: The info of each env's last reset.

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
            self._access = VectorAccess(envs)
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
        self._observations = Values(observation_space, envs.observation_spec, specs.observation)
        self._actions = Values(action_space, envs.action_spec, specs.action)
        self.observation_spec: Any = specs.observation
        self.full_action_spec: Any = specs.action
        self.done_spec: Any = specs.done
        self._reward_shape = (envs.num_envs, *(getattr(envs.reward_spec, "shape", ()) or (1,)))
        self.reward_spec: Any = Unbounded(self._reward_shape)
        self._info_reader = None
        if info_spec:
            if taken := info_spec.keys() & {*specs.observation.keys(), *specs.done.keys(), "reward"}:
                raise SpaceMismatchError(
                    f"info_spec contains {sorted(taken)}, which already are keys of the TensorDict: rename them"
                )
            self._info_reader = Infos(info_spec)
            self.observation_spec.update(self._info_reader.specs_of(envs.num_envs))

    # Stepping --------------------------------------------------------------------------------------------

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step all envs as the base class does, and put the results into the TensorDict as ``"next"``.

        Args:
            tensordict: Contains the actions. ``"_step"``, a mask of shape ``[num_envs]``, selects envs. Entries of
                ``"next"`` that the results lack are kept.

        Returns:
            The same TensorDict.

        Raises:
            Exception: The exception from the first env that failed, once all envs have answered.
        """
        # Most steps need none of the look-ups and checks of the base class, which take as long as the rest of `_step`.
        keys, alike = tensordict.keys(), (tensordict.batch_size, tensordict.device) == (self.batch_size, self.device)
        is_plain = type(tensordict) is TensorDict and alike and not any(tensordict.names)
        if not is_plain or "_step" in keys or "next" in keys or self.run_type_checks:
            return super().step(tensordict)
        # As in TorchRL: `set` would check the result again.
        return tensordict._set_str("next", self._step(tensordict), inplace=False, validated=True)  # noqa: SLF001

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step all envs, or those selected by ``"_step"``; the others keep their values from the TensorDict.

        Raises:
            Exception: The exception from the first env that failed, once all envs have answered.
        """
        num_envs = self.vector.num_envs
        stepped, env_ids = _selected(tensordict._get_str("_step", default=None), num_envs)  # noqa: SLF001 # as in TorchRL
        actions = self._actions.decode(tensordict, env_ids)
        obs, rewards, terminated, truncated, infos = or_first_failure(lambda: self._access.step(actions, env_ids))
        if env_ids is not None:
            rewards = spread(rewards, env_ids, num_envs)
            terminated, truncated = spread(terminated, env_ids, num_envs), spread(truncated, env_ids, num_envs)
            infos = _spread_infos([{} for _ in range(num_envs)], infos, env_ids)
        self.__dict__["infos"] = infos  # assigning an attribute of an `nn.Module` takes several microseconds
        entries = self._entries(obs, env_ids, infos)
        entries["reward"] = torch.from_numpy(rewards.reshape(self._reward_shape).astype(np.float32))
        entries["terminated"] = torch.from_numpy(terminated[:, None])
        entries["truncated"] = torch.from_numpy(truncated[:, None])
        entries["done"] = torch.from_numpy((terminated | truncated)[:, None])
        if stepped is not None:
            for key, fresh in entries.items():
                if (before := tensordict.get(key, None)) is not None:
                    fresh[~stepped] = before[~stepped].to(fresh.device)
        return self._as_tensordict(entries)

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
    ) -> TensorDictBase:
        """Reset all envs, or those selected by ``"_reset"``; only their rows are valid. See `VectorEnv.reset`.

        Raises:
            Exception: The exception from the first env that failed, once all envs have answered.
        """
        envs, num_envs = self.vector, self.vector.num_envs
        _, env_ids = _selected(None if tensordict is None else tensordict.get("_reset", None), num_envs)
        obs, infos = or_first_failure(lambda: envs.reset(seed, options, env_ids))
        self.reset_infos = infos if env_ids is None else _spread_infos(self.reset_infos, infos, env_ids)
        return self._as_tensordict(self._entries(obs, env_ids, self.reset_infos))

    def _entries(self, obs: Any, env_ids: list[int] | None, infos: list[dict[str, Any]]) -> dict[Any, torch.Tensor]:
        """Return the entries for observations and infos, with one row per env."""
        entries = self._observations.encode(obs, env_ids)
        if self._info_reader is not None:
            entries.update(self._info_reader.encode(infos))
        return entries

    def _as_tensordict(self, entries: dict[Any, torch.Tensor]) -> TensorDictBase:
        """Return a TensorDict without the checks of its constructor, which take ten times as long."""
        nested: dict[str, Any] = {} if self._observations.are_nested else entries
        for key, tensor in entries.items() if self._observations.are_nested else ():
            *path, last = (key,) if isinstance(key, str) else key
            inner = nested
            for name in path:
                inner = inner.setdefault(name, {})
            inner[last] = tensor
        made: TensorDictBase = TensorDict._new_unsafe(nested, batch_size=self.batch_size)  # noqa: SLF001 # as in TorchRL
        return made if self.device is None else made.to(self.device)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Reset all envs with seeds that derive from one another, as ``ParallelEnv`` does.

        Args:
            seed: Seed of the first env; with None, each env chooses its seed.
            static_seed: True to give all envs the same seed.

        Returns:
            The seed that derives from that of the last env.

        Raises:
            VectorInputError: The seed is neither an int >= 0 nor None.
        """
        seed = check_seed(seed)
        seeds: list[int | None] = []
        for _ in range(self.vector.num_envs):
            seeds.append(seed)
            seed = super().set_seed(seed, static_seed)
        self._reset(seed=seeds)
        return seed

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: `set_seed` seeds all envs."""

    def close(self, *, raise_if_closed: bool = True) -> None:  # noqa: ARG002 # TorchRL's name
        """Close the envs and end their processes, within the close deadline; calling it again does nothing."""
        self.vector.close()
        self.is_closed = True


def _selected(mask: torch.Tensor | None, num_envs: int) -> tuple[torch.Tensor | None, list[int] | None]:
    """Return which envs a mask of shape ``[num_envs]`` or ``[num_envs, 1]`` selects, as a mask on the CPU and as ids.

    If the mask selects all envs, the function returns ``(None, None)``.
    """
    if mask is None or mask.all():
        return None, None
    mask = mask.reshape(num_envs).cpu()
    return mask, mask.nonzero().flatten().tolist()


def _spread_infos(
    before: list[dict[str, Any]], infos: list[dict[str, Any]], env_ids: list[int]
) -> list[dict[str, Any]]:
    """Return one info per env: the new ones for the given envs, and the previous ones for the others."""
    fresh = dict(zip(env_ids, infos, strict=True))
    return [fresh.get(env_id, info) for env_id, info in enumerate(before)]
