"""The last results of in-process envs, which are copied when the envs return them, and again when users get them.

Envs may change the values that they have returned, and users those that they were given, while a last result may be
needed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.errors import SerializationError
from envactors.mailbox.messages import Description
from envactors.mailbox.pickling import copy_value, safe_repr
from envactors.mailbox.slab import slice_of
from envactors.mailbox.specs import OBJECT, ArraySpec, Spec, stack, zeros
from envactors.vector.results import Delivered, EnvStep
from envactors.vector.selection import Selection


class InlineLastResults:
    """The last result of each env.

    Args:
        described: The specs of one env.
        count: How many envs there are.
        keeps_infos: Whether infos may have to be returned again.

    Attributes:
        are_first: Whether each observation is the first of its episode.
    """

    def __init__(self, described: Description, count: int, *, keeps_infos: bool) -> None:
        self.are_first: list[bool] = [False] * count
        self._observation_spec = OBJECT if described.observation is None else described.observation
        self._reward_spec = described.reward
        self._observations = _column_of(self._observation_spec, count)
        self._rewards = _column_of(self._reward_spec, count)
        self._has_lists = not all(isinstance(column, np.ndarray) for column in (self._observations, self._rewards))
        self._terminated, self._truncated = np.zeros((2, count), np.bool_)
        self._incarnations: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self._terminated_memory, self._truncated_memory = self._terminated.data, self._truncated.data
        self._infos: list[Any] = [{}] * count if keeps_infos else []

    def take(self, index: int, fields: tuple[Any, ...], is_first: bool) -> Any:
        """Make a result of an env the last one, by copying it; return a copy of its info to deliver.

        Args:
            index: The env.
            fields: The observation, the reward, whether the episode has ended and was cut off, and the info.
            is_first: Whether the observation is the first of its episode.

        Raises:
            SerializationError: A value cannot be copied. Then nothing has changed.
        """
        obs, reward, terminated, truncated, info = fields
        try:
            info = {} if type(info) is dict and not info else copy_value(info)
            if self._has_lists:  # a single array needs no other copy, and it conforms, so assigning it cannot fail
                obs, reward = copy_value((obs, reward))
            if self._infos:
                self._infos[index] = copy_value(info)
        except Exception as error:
            raise SerializationError(f"the result of env {index} cannot be copied: {safe_repr(error)}") from error
        self._terminated_memory[index], self._truncated_memory[index] = terminated, truncated
        self.are_first[index] = is_first
        self._rewards[index] = reward
        self._observations[index] = obs
        return info

    def set_incarnation(self, index: int, incarnation: int) -> None:
        """Record the incarnation that has returned the last result of an env, and returns the next ones."""
        self._incarnations[index] = incarnation

    def truncate(self, index: int, incarnation: int, *, is_first: bool) -> None:
        """Make the last result, which is that of a reset if ``is_first``, the answer to a failed step.

        The env continues in the process with that incarnation.
        """
        self._terminated[index], self._truncated[index] = False, True
        self._rewards[index] = zeros(self._reward_spec)
        self.are_first[index] = is_first
        self.set_incarnation(index, incarnation)

    def info(self, index: int) -> Any:
        """Return a copy of the info of an env; an empty one if infos are not kept."""
        return copy_value(self._infos[index]) if self._infos else {}

    def read(self, index: int, info: Any) -> EnvStep:
        """Return the result of an env as users get it, with an info."""
        obs, reward = copy_value((self._observations[index], self._rewards[index]))
        reward = float(reward) if isinstance(reward, float) else reward
        terminated, truncated = bool(self._terminated[index]), bool(self._truncated[index])
        return EnvStep(index, obs, reward, terminated, truncated, info, int(self._incarnations[index]))

    def read_results(self, envs: Selection, infos: list[Any]) -> Delivered:
        """Return the results of envs as users get them, with their infos."""
        at = envs.array_index
        obs = _read_column(self._observations, at, envs.ids, self._observation_spec)
        rewards = _read_column(self._rewards, at, envs.ids, self._reward_spec)
        flags = self._terminated[at].copy(), self._truncated[at].copy()
        return obs, rewards, *flags, infos, self._incarnations[at].copy()

    def read_observations(self, envs: range, spec: Spec) -> Any:
        """Return the observations of consecutive envs as a batch, given their spec, which may be known by now."""
        return _read_column(self._observations, slice_of(envs), envs, spec)


def _column_of(spec: Spec, count: int) -> Any:
    """Return memory for one value of a spec per env: an array, or a list of values that are not single arrays."""
    if isinstance(spec, ArraySpec) and spec.batchable:
        return np.zeros((count, *spec.shape), spec.dtype)
    return [zeros(spec)] * count


def _read_column(column: Any, at: Any, ids: Sequence[int], spec: Spec) -> Any:
    """Return copies of the values of envs as a batch; ``at`` is an index into arrays for these ids."""
    if isinstance(column, np.ndarray):
        return column[at].copy()
    return stack(spec, [copy_value(column[index]) for index in ids])
