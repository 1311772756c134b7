"""Results as users get them: read out of the rows of shared memory, or batched; and the last result of each env."""

from __future__ import annotations

import copy
import functools
import marshal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from envactors.actor.slots import Slots
from envactors.envs.selection import Selection
from envactors.errors import SpaceMismatchError
from envactors.mailbox.slab import Slab
from envactors.mailbox.specs import ArraySpec, Spec, conform, spec_of_value, stack, unflatten


class EnvStep(NamedTuple):
    """One env's step, the result of the futures of `VectorEnv.submit`.

    Attributes:
        env_id: Id of the env.
        obs: Observation with the shapes and dtypes of the observation spec.
        reward: Reward as a float, or as a float64 array if the env's rewards are vectors.
        terminated: Whether the episode ended.
        truncated: Whether the episode was cut off.
        info: The env's own info.
        incarnation: Incarnation of the process that returned the result.
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
        env_ids: Ids of the envs; int64, shape (n,).
        obs: Observations; an array of shape (n, ...) per leaf of the observation spec, a list for values that cannot be
            batched.
        rewards: Rewards; float64, shape (n, ...).
        terminated: Whether each episode ended; bool, shape (n,).
        truncated: Whether each episode was cut off; bool, shape (n,).
        infos: Each env's own info.
        incarnations: Incarnations of the processes that returned the results; int64, shape (n,).
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

# The variable-size content of a result: its info, and the object leaves of its observation.
Content = tuple[Any, list[Any]]
NO_CONTENT: Content = ({}, [])


def as_dict(info: Any) -> dict[str, Any]:
    """Return a new dict of an info, to add to it; if it is not a mapping, a dict that contains it."""
    return dict(info) if isinstance(info, Mapping) else {"info": info}


def is_empty(info: Any) -> bool:
    """Return whether an info has nothing in it; the truth value of an array raises."""
    return not isinstance(info, np.ndarray) and not info


def failure_in(info: Any) -> BaseException | None:
    """Return the failure that the vector has put into an info; envs may use its key for something else."""
    failure = info.get("failure") if isinstance(info, Mapping) else None
    return failure if isinstance(failure, BaseException) else None


class RowReader:
    """Reads results of envs out of their rows, one by one or batched.

    Args:
        slots: All envs.
        reward_spec: Spec of one env's reward.
        copy: Whether batches of all envs are copied out of the rows.

    Attributes:
        contents: Content of each env's last result.
        copies: The argument ``copy``.
        copies_objects: Whether object leaves of last results are kept as copies: such a result may be returned again
            after a failure, and users may have changed the original.
    """

    def __init__(self, slots: Slots, reward_spec: Spec, *, copy: bool) -> None:
        self._slots = slots
        self._reward_spec = reward_spec
        rows = slots.slab
        self.rows: Slab = rows
        self._no_contents = [NO_CONTENT] * rows.layout.envs
        self.contents: list[Content] = self._no_contents.copy()
        # Makes empty infos in C code, in half of the time that copying them takes.
        self._make_infos = functools.partial(marshal.loads, marshal.dumps([{} for _ in self._no_contents]))
        self.copies = copy
        # The array of observations, if it is the only one.
        is_array = isinstance(rows.layout.observation, ArraySpec)
        self._only = rows.observations[0] if is_array and rows.layout.reward is not None else None
        # Last results that are kept apart from the rows: copies, and those of restored envs and of rollouts.
        self._kept: dict[int, EnvStep] = {}
        self.copies_objects: bool = slots.on_failure != "raise" and any(array is None for array in rows.observations)

    def decode_all(self, env_ids: Sequence[int]) -> list[Content] | None:
        """Return the content of each env's result; None if one cannot be unpickled. None has failed or overflowed."""
        infos = self._slots.infos
        try:
            return [infos.decode(env_id, None) for env_id in env_ids]
        except BaseException:  # unpickling runs user code; `Outcomes` reports the error
            return None

    def batch(self, index: npt.NDArray[np.int64] | None, contents: Sequence[Content] | None) -> StepResults:
        """Return the results of some envs, batched per leaf.

        Args:
            index: Ids of the envs; None for all envs in order, whose observations are in the same half. With
                ``copy=False`` these are views.
            contents: Content of their results; None if all are empty.
        """
        rows = self.rows
        half = self._slots.halves[0] if index is None else None
        if half is not None and self._only is not None:
            obs: Any = self._only[half].copy() if self.copies else self._only[half]
        else:
            obs = unflatten(rows.layout.observation, self._observations(half, index, contents or ()))
        if rows.layout.reward is None:
            rewards = stack(self._reward_spec, [content[1][-1] for content in contents or ()])
        else:
            rewards = rows.rewards.copy() if index is None else rows.rewards[index]
        infos = self._make_infos()[: len(rewards)] if contents is None else [content[0] for content in contents]
        if index is None:
            return obs, rewards, rows.terminated.copy(), rows.truncated.copy(), infos
        return obs, rewards, rows.terminated[index], rows.truncated[index], infos

    def batch_of(self, env_ids: list[int]) -> Batch:
        """Return the results of some envs, whose contents were accepted, as a batch."""
        index = np.array(env_ids, np.int64)
        results = self.batch(index, [self.contents[env_id] for env_id in env_ids])
        return Batch(index, *results, np.array([self._slots.of[env_id].incarnation for env_id in env_ids], np.int64))

    def _observations(
        self, half: int | None, index: npt.NDArray[np.int64] | None, contents: Sequence[Content]
    ) -> Iterator[npt.NDArray[Any] | list[Any]]:
        """Yield the leaves of observations; ``half`` is the half that those of all envs are in, None for some envs."""
        halves = np.frombuffer(self._slots.halves, np.uint8)[index]
        number = 0
        for array in self.rows.observations:
            if array is None:
                yield [content[1][number] for content in contents]
                number += 1
            elif half is not None:
                yield array[half].copy() if self.copies else array[half]
            else:
                yield array[halves, index]

    def step(self, env_id: int, *, before: bool = False, objects: list[Any] | None = None) -> EnvStep:
        """Return an env's last complete result.

        Args:
            env_id: Id of the env.
            before: Whether to return the result before it; ``contents`` must still be those of that result.
            objects: Object leaves; None for those in ``contents``.
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
        info = self.contents[env_id][0]
        return EnvStep(
            env_id,
            unflatten(rows.layout.observation, leaves),
            reward,
            bool(rows.terminated[env_id]),
            bool(rows.truncated[env_id]),
            {} if is_empty(info) else info,  # a new dict: results without infos share an empty one
            self._slots.of[env_id].incarnation,
        )

    def keep(self, step: EnvStep) -> None:
        """Store a result that is not in its row as the env's last one, until the env has another."""
        self._kept[step.env_id] = step
        self._slots.has_last[step.env_id] = True

    def last(self, env_id: int, *, before: bool = False) -> EnvStep | None:
        """Return the last complete result of an env with an info that the user may change.

        Args:
            env_id: Id of the env.
            before: Whether to return the result before the one in the row, which was not read yet.

        Returns:
            None if it has none, or under ``on_failure="raise"``, since users may have changed its info then.
        """
        if not self._slots.has_last[env_id] or self._slots.on_failure == "raise":
            return None
        step = self.last_kept(env_id, before=before)
        return step._replace(info=as_dict(step.info))

    def last_kept(self, env_id: int, *, before: bool = False) -> EnvStep:
        """Return `last` of an env that has one, with the info that the user has got."""
        return self._kept.get(env_id) or self.step(env_id, before=before)

    def keep_all(self, envs: Selection, contents: list[Content] | None) -> None:
        """Record that envs have new results with this content; None if all are empty."""
        if contents is None:
            for each in envs.ranges:
                self.contents[each] = self._no_contents[each]
        else:
            for env_id, content in zip(envs.env_ids, contents, strict=True):
                self.contents[env_id] = content
        if self._kept:
            for env_id in envs.env_ids:
                self._kept.pop(env_id, None)

    def accept(self, env_id: int, content: Content) -> None:
        """Record that an env has a new result with this content.

        Raises:
            BaseException: An object leaf cannot be copied.
        """
        copies = copy.deepcopy(content[1]) if self.copies_objects else None
        self.contents[env_id] = content
        self._kept.pop(env_id, None)
        if copies is not None:
            self._kept[env_id] = self.step(env_id, objects=copies)


class Batcher:
    """Makes batches of single results.

    Args:
        observation: Spec of one env's observation; None to learn it from the first observation.
        reward: Spec of one env's reward.

    Attributes:
        observation_spec: Spec of one env's observation; None until it is known.
        learns: Whether that spec is learned.
        reward_spec: Spec of one env's reward.
    """

    def __init__(self, observation: Spec | None, reward: Spec) -> None:
        self.observation_spec = observation
        self.learns: bool = observation is None
        self.reward_spec = reward

    def conform_all(self, steps: Sequence[EnvStep]) -> tuple[list[EnvStep], dict[int, BaseException]]:
        """Check observations against the learned spec, which workers do not know.

        Returns:
            The conforming results, and the errors of the others by env.
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
        """Return results as a batch in the same order."""
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
