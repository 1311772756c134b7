"""What the facade hands out: read out of the rows of shared memory, or batched; and the last result of each env."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.actor.slots import Slots
from envactors.errors import SpaceMismatchError
from envactors.mailbox.slab import Slab
from envactors.mailbox.specs import ArraySpec, Spec, conform, spec_of_value, stack, unflatten


class EnvStep(NamedTuple):
    """One env's step, as the futures of `VectorEnv.submit` give it.

    Attributes:
        env_id: Which env.
        obs: Its observation, arrays in the shape and dtype of the observation spec.
        reward: A float, or a float64 array where the env's rewards are vectors.
        terminated: Whether the episode reached its end.
        truncated: Whether the episode was cut.
        info: The env's own dict.
        incarnation: The process that the result comes from.
    """

    env_id: int
    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    incarnation: int


class Batch(NamedTuple):
    """Results of several envs; row ``k`` belongs to env ``env_ids[k]``.

    Attributes:
        env_ids: int64, shape (n,).
        obs: Per leaf of the observation spec an array of shape (n, ...); a list for what cannot be batched.
        rewards: float64, shape (n,) and the reward spec's.
        terminated: bool, shape (n,).
        truncated: bool, shape (n,).
        infos: Each env's own dict.
        incarnations: int64, shape (n,).
    """

    env_ids: npt.NDArray[np.int64]
    obs: Any
    rewards: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    incarnations: npt.NDArray[np.int64]


# What `VectorEnv.step` returns: observations, rewards, terminated, truncated, infos.
StepResults: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], list[dict[str, Any]]
]

# What came beside the rows of a result: its info, and the leaves of its observation that are no arrays.
Content = tuple[Any, list[Any]]
NO_CONTENT: Content = ({}, [])


class RowReader:
    """Reads results of envs out of their rows, one by one or batched.

    Args:
        slots: All envs.
        reward_spec: One env's reward.
        copy: Whether batches of all envs are copied out of the rows.

    Attributes:
        contents: What came beside the rows of each env's last result.
        copies: As ``copy``.
        copies_objects: Whether copies are kept of what passes as objects: a last result may stand in, and users may
            change what they got.
    """

    def __init__(self, slots: Slots, reward_spec: Spec, *, copy: bool) -> None:
        self._slots = slots
        self._reward_spec = reward_spec
        rows = slots.slab
        self.rows: Slab = rows
        self.contents: list[Content] = [NO_CONTENT] * rows.layout.envs
        self.copies = copy
        # The one array of observations, if there is only one.
        is_array = isinstance(rows.layout.observation, ArraySpec)
        self._only = rows.observations[0] if is_array and rows.layout.reward is not None else None
        # The last complete result of each env that stands in no row, for those that were brought to where they are.
        self._restored: dict[int, EnvStep] = {}
        self._copies: dict[int, list[Any]] = {}
        self.copies_objects: bool = slots.on_failure != "raise" and any(array is None for array in rows.observations)

    def observations(self, env_ids: Sequence[int], contents: Sequence[Content] | None, *, all_envs: bool) -> Any:
        """Return the observations of some envs, batched per leaf.

        Args:
            env_ids: The envs.
            contents: What came beside their rows; None if nothing did.
            all_envs: Whether these are all envs in order; then ``copy=False`` returns views.
        """
        all_halves = self._slots.halves
        half = all_halves[0]
        in_one_piece = all_envs and all_halves.count(half) == len(all_halves)
        if in_one_piece and self._only is not None:
            return self._only[half].copy() if self.copies else self._only[half]
        ids = np.array(env_ids, np.int64)
        halves = np.frombuffer(all_halves, np.uint8)[ids]

        def batches() -> Iterator[Any]:
            number = 0
            for array in self.rows.observations:
                if array is None:
                    yield [content[1][number] for content in contents or ()]
                    number += 1
                elif in_one_piece:
                    yield array[half].copy() if self.copies else array[half]
                else:
                    yield array[halves, ids]

        return unflatten(self.rows.layout.observation, batches())

    def rewards(self, index: Any, contents: Sequence[Content] | None) -> Any:
        """Return the rewards of some envs, batched per leaf.

        Args:
            index: What selects their rows.
            contents: What came beside them; None if nothing did.
        """
        if self.rows.layout.reward is None:
            return stack(self._reward_spec, [content[1][-1] for content in contents or ()])
        return self.rows.rewards[index].copy() if isinstance(index, slice) else self.rows.rewards[index]

    def step(self, env_id: int, incarnation: int, *, before: bool = False, objects: list[Any] | None = None) -> EnvStep:
        """Return an env's last complete result.

        Args:
            env_id: The env.
            incarnation: The process that the result comes from.
            before: Whether to return the observation before that, whose info was not read over yet.
            objects: What passes as objects; None for what came beside its row.
        """
        rows = self.rows
        objects = self.contents[env_id][1] if objects is None else objects
        others = iter(objects)
        half = self._slots.halves[env_id] ^ before
        reward: Any = objects[-1] if rows.layout.reward is None else rows.rewards[env_id]
        if isinstance(reward, np.ndarray):
            reward = reward.copy()
        elif rows.layout.reward is not None:
            reward = float(reward)
        leaves = (next(others) if array is None else array[half, env_id, ...].copy()[()] for array in rows.observations)
        return EnvStep(
            env_id,
            unflatten(rows.layout.observation, leaves),
            reward,
            bool(rows.terminated[env_id]),
            bool(rows.truncated[env_id]),
            self.contents[env_id][0] or {},  # not the one that many results share
            incarnation,
        )

    def keep(self, step: EnvStep) -> None:
        """Keep a result that stands in no row as an env's last one, until it has another."""
        self._restored[step.env_id] = step
        self._slots.has_last[step.env_id] = True

    def last(self, env_id: int, *, before: bool = False) -> EnvStep | None:
        """Return the last complete result of an env, None if it has none; its info may be changed.

        Args:
            env_id: The env.
            before: Whether to return the one before that, since it is not read yet.
        """
        if not self._slots.has_last[env_id]:
            return None
        step = self._restored.get(env_id) or self.step(env_id, 0, before=before, objects=self._copies.get(env_id))
        return step._replace(info=dict(step.info))

    def last_kept(self, env_id: int) -> EnvStep | None:
        """Return what `last` does, None if failures are raised: users may have changed its info then."""
        return None if self._slots.on_failure == "raise" else self.last(env_id)

    def keep_all(self, contents: list[Content] | None) -> None:
        """Note that all envs have results, and what came beside their rows."""
        self.contents = contents or [NO_CONTENT] * len(self.contents)
        if self._restored:
            self._restored.clear()
        if self._copies:
            self._copies.clear()

    def accept(self, env_id: int, content: Content) -> None:
        """Note that an env has another result, and what came beside its row.

        Raises:
            BaseException: What passes as an object cannot be copied.
        """
        copies = copy.deepcopy(content[1]) if self.copies_objects else None
        self.contents[env_id] = content
        self._restored.pop(env_id, None)
        if copies is not None:
            self._copies[env_id] = copies


class Batcher:
    """Makes batches of single results.

    Args:
        observation: The spec of one env's observation; None if it is learnt from the first one.
        reward: The spec of one env's reward.

    Attributes:
        observation_spec: The spec of one env's observation; None until one is known.
        learns: Whether it is learnt.
        reward_spec: The spec of one env's reward.
    """

    def __init__(self, observation: Spec | None, reward: Spec) -> None:
        self.observation_spec = observation
        self.learns: bool = observation is None
        self.reward_spec = reward

    def conform_all(self, steps: Sequence[EnvStep]) -> tuple[list[EnvStep], dict[int, BaseException]]:
        """Check observations against those of other envs; a worker knows no more than its own env.

        Returns:
            The results that conform, and the errors of the others by env.
        """
        if not self.learns:
            return list(steps), {}
        conforming: list[EnvStep] = []
        errors: dict[int, BaseException] = {}
        for step in steps:
            if self.observation_spec is None:
                self.observation_spec = spec_of_value(step.obs)
            try:
                obs = conform(self.observation_spec, step.obs, f"the observation of env {step.env_id}")
                conforming.append(step._replace(obs=obs))
            except SpaceMismatchError as error:
                errors[step.env_id] = error
        return conforming, errors

    def batch(self, steps: Sequence[EnvStep]) -> Batch:
        """Return results as a batch, in their order."""
        observations = [step.obs for step in steps]
        spec = self.observation_spec
        return Batch(
            np.array([step.env_id for step in steps], np.int64),
            observations if spec is None else stack(spec, observations),
            stack(self.reward_spec, [step.reward for step in steps]),
            np.array([step.terminated for step in steps], np.bool_),
            np.array([step.truncated for step in steps], np.bool_),
            [step.info for step in steps],
            np.array([step.incarnation for step in steps], np.int64),
        )
