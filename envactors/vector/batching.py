"""How the results of single envs become a batch, and how the spec of their observations is learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.errors import SpaceMismatchError
from envactors.mailbox.messages import Description
from envactors.mailbox.pickling import copy_value
from envactors.mailbox.specs import ArraySpec, Spec, conform_to_first, spec_of_value, stack
from envactors.vector.results import Batch, EnvStep


class Batcher:
    """Batches results of single envs.

    Args:
        described: The specs of one env.

    Attributes:
        observation_spec: Spec of one env's observation; None until the first observation, if envs have no space.
        infers_spec: Whether that spec follows from the first observation.
    """

    def __init__(self, described: Description) -> None:
        self.observation_spec: Spec | None = described.observation
        self.infers_spec: bool = described.observation is None
        self._reward_spec = described.reward
        # The env whose first reset fixed the spec, if it is not declared.
        self._first_env: int = 0

    def batch_steps(self, steps: Sequence[EnvStep]) -> tuple[Batch, dict[int, BaseException]]:
        """Batch results, and return the errors of those that do not conform to the others."""
        conforming: list[EnvStep] = []
        errors: dict[int, BaseException] = {}
        for step in steps:
            if self.observation_spec is None:
                self.observation_spec = spec_of_value(step.obs)
                self._first_env = step.env_id
            try:
                what = f"the observation of env {step.env_id}"
                obs = step.obs
                if self.infers_spec:
                    obs = conform_to_first(self.observation_spec, obs, what, self._first_env)
                conforming.append(step._replace(obs=obs))
            except SpaceMismatchError as error:
                errors[step.env_id] = error
        columns = zip(*conforming, strict=True) if conforming else ((),) * len(EnvStep._fields)
        ids, observations, rewards, terminated, truncated, infos, incarnations = columns
        obs = [] if self.observation_spec is None else stack(self.observation_spec, observations)
        flags = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        env_ids, processes = np.array(ids, np.int64), np.array(incarnations, np.int64)
        return Batch(env_ids, obs, stack(self._reward_spec, rewards), *flags, list(infos), processes), errors


class _Objects:
    """Column of values that are no arrays."""

    def __init__(self, count: int) -> None:
        self._values = np.empty(count, object)

    def prepare(self, value: Any) -> Any:
        return copy_value(value)

    def __setitem__(self, index: int, prepared: Any) -> None:
        self._values[index] = prepared

    def read(self, at: Any) -> Any:
        values = self._values[at]
        return copy_value(values if isinstance(at, int) else values.tolist())


class _Nest:
    """Column of dicts or tuples, in one column for each key or position."""

    def __init__(self, spec: Any, count: int) -> None:
        self._is_dict = isinstance(spec, dict)
        self._parts = [(key, column_of(spec[key], count)) for key in (spec if self._is_dict else range(len(spec)))]

    def prepare(self, value: Any) -> list[Any]:
        return [prepare_value(part, value[key]) for key, part in self._parts]

    def __setitem__(self, index: int, prepared: list[Any]) -> None:
        for (_, part), content in zip(self._parts, prepared, strict=True):
            part[index] = content

    def read(self, at: Any) -> Any:
        values = [(key, read_column(part, at)) for key, part in self._parts]
        return dict(values) if self._is_dict else tuple(value for _, value in values)


def column_of(spec: Spec, count: int) -> Any:
    """Return memory for one value of a spec per env. Assign the result of `prepare_value` to ``column[index]``."""
    if not isinstance(spec, ArraySpec):
        return _Nest(spec, count)
    return np.zeros((count, *spec.shape), spec.dtype) if spec.batchable else _Objects(count)


def prepare_value(column: Any, value: Any) -> Any:
    """Return what to assign to an index of a column: objects are copied here, and arrays by the assignment.

    The assignment cannot fail, so a row of several columns is written after all its values were prepared.

    Raises:
        Exception: An object cannot be copied.
    """
    return value if isinstance(column, np.ndarray) else column.prepare(value)


def read_column(column: Any, at: Any) -> Any:
    """Return a copy of the value of an env, or, for a slice or an array of envs, a batch of copies."""
    return column[at].copy() if isinstance(column, np.ndarray) else column.read(at)
