"""The adapter around an ALF env in its worker, and what both sides share: time steps, nests, and records.

The worker sends a time step as one record: a row of bytes with one field per array. The facade therefore checks and
copies a single array, whatever the structure of the observations. The caller's conversions live in
`envactors.integrations.alf.values`.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError
from envactors.integrations.adapter import EnvAdapter
from envactors.mailbox.specs import ArraySpec, Spec, conform

LAST: Final = 2

# Type codes that mean the same to `struct` and NumPy, with the same size and alignment.
_NUMBERS: Final = "?bBhHiIlLqQfd"


class StepType:
    """The position of a time step in its episode (ALF's ``StepType``)."""

    FIRST: Final = np.int32(0)
    MID: Final = np.int32(1)
    LAST: Final = np.int32(LAST)


class TimeStep(NamedTuple):
    """One time step, with the fields of ALF's ``TimeStep`` in its order.

    Attributes:
        step_type: int32, one of `StepType`.
        reward: float32, the reward for the previous action.
        discount: float32, 0 if the episode has terminated.
        observation: Nest of arrays.
        prev_action: Nest of arrays: the previous action.
        env_id: int32, the row in results of `ActorParallelEnvironment`.
        untransformed: Used by ALF's own transformations.
        env_info: Nest of arrays.
    """

    step_type: Any = ()
    reward: Any = ()
    discount: Any = ()
    observation: Any = ()
    prev_action: Any = ()
    env_id: Any = ()
    untransformed: Any = ()
    env_info: Any = ()

    def is_first(self) -> Any:
        """Return True at the first step of an episode."""
        return self.step_type == StepType.FIRST

    def is_mid(self) -> Any:
        """Return True between the first and the last step of an episode."""
        return self.step_type == StepType.MID

    def is_last(self) -> Any:
        """Return True at the last step of an episode."""
        return self.step_type == StepType.LAST


class Leaf(NamedTuple):
    """One array of a nest: its name in errors, a function that reads it from a nest, and its spec."""

    name: str
    read: Callable[[Any], Any]
    spec: ArraySpec

    def of(self, nest: Any) -> Any:
        """Return the array of a nest.

        Raises:
            SpaceMismatchError: The nest lacks this part.
        """
        try:
            return self.read(nest)
        except (AttributeError, IndexError, KeyError, TypeError):
            raise SpaceMismatchError(
                f"the value has no {self.name}: expected the structure of the spec, with an array of shape "
                f"{self.spec.shape} and dtype {self.spec.dtype} there"
            ) from None


def leaves(nest: Any, name: str, outer: tuple[int, ...], read: Callable[[Any], Any] = lambda nest: nest) -> list[Leaf]:
    """Return the leaves of a nest of ALF's ``TensorSpec``, or of anything with a shape and a dtype.

    Args:
        nest: Specs in dicts, lists, tuples, and named tuples.
        name: Name of the nest in errors.
        outer: Dimensions before each spec's shape.
        read: Returns the nest of its parent.

    Raises:
        TypeError: The nest contains an object that is not a spec.
    """
    parts: list[tuple[str, Any, Callable[[Any], Any]]]
    if hasattr(nest, "shape") and hasattr(nest, "dtype"):
        # The name of a dtype of torch is "torch.float32".
        dtype = np.dtype(str(nest.dtype).rpartition(".")[2] if "torch" in str(nest.dtype) else nest.dtype)
        spec = ArraySpec((*outer, *nest.shape), dtype)
        if not spec.batchable:
            raise TypeError(f"{name} has dtype {dtype}: expected a dtype of numbers or bools")
        return [Leaf(name, read, spec)]
    if isinstance(nest, Mapping):
        parts = [(f"{name}[{key!r}]", inner, operator.itemgetter(key)) for key, inner in nest.items()]
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        named = zip(nest._fields, nest, strict=True)
        parts = [(f"{name}.{key}", inner, operator.attrgetter(key)) for key, inner in named]
    elif isinstance(nest, (list, tuple)):
        parts = [(f"{name}[{i}]", inner, operator.itemgetter(i)) for i, inner in enumerate(nest)]
    else:
        raise TypeError(f"{name} is {nest!r}: expected specs, nested in dicts, lists, and tuples")
    return [leaf for part, inner, get in parts for leaf in leaves(inner, part, outer, _after(read, get))]


def _after(first: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: then(first(value))


def packer(nest: Any) -> Callable[[Iterator[Any]], Any]:
    """Return a function that builds a nest with the structure of the specs from arrays in the order of `leaves`."""
    if isinstance(nest, Mapping):
        named = [(key, packer(inner)) for key, inner in nest.items()]
        return lambda arrays: {key: make(arrays) for key, make in named}
    if not isinstance(nest, (list, tuple)):
        return next
    makers, kind = [packer(inner) for inner in nest], type(nest)
    if hasattr(nest, "_fields"):
        return lambda arrays: kind(*[make(arrays) for make in makers])
    return lambda arrays: kind([make(arrays) for make in makers])


class Described(NamedTuple):
    """Specs and properties of an env, with ALF's names."""

    is_tensor_based: bool
    action_spec: Any
    reward_spec: Any
    env_info_spec: Any
    batch_size: int
    batched: bool
    time_step_spec: Any
    observation_spec: Any
    num_tasks: int
    task_names: Any

    @property
    def outer(self) -> tuple[int, ...]:
        """Dimensions that the env's values have before those of the specs."""
        return (self.batch_size,) if self.batched else ()

    @property
    def resets_itself(self) -> bool:
        """True if the env resets its episodes itself."""
        return self.batch_size > 1

    @property
    def nests_actions(self) -> bool:
        """True if an action is a nest of arrays, False if it is a single array."""
        return isinstance(self.action_spec, (Mapping, list, tuple))

    def fields(self) -> dict[str, Any]:
        """Return the nests of specs of a time step by field; the first three and ``env_id`` are single arrays."""
        spec = self.time_step_spec
        others = {name: getattr(spec, name, ()) for name in TimeStep._fields}
        return {**others, "env_id": ArraySpec((), np.dtype(np.int32)), "env_info": self.env_info_spec}

    def leaves(self) -> list[Leaf]:
        """Return the leaves of a time step without ``env_id``, which is the row."""
        return [
            leaf
            for name, nest in self.fields().items()
            if name != "env_id"
            for leaf in leaves(nest, name, self.outer, operator.attrgetter(name))
        ]

    def action_leaves(self) -> list[Leaf]:
        """Return the leaves of an action."""
        return leaves(self.action_spec, "action", self.outer)


def record_of(arrays: list[Leaf]) -> np.dtype[Any]:
    """Return the dtype of a time step's record: field ``"0"`` is leaf 0, and so on. Single numbers come first."""
    fields: list[Any] = [(str(index), leaf.spec.dtype, leaf.spec.shape) for index, leaf in enumerate(arrays)]
    return np.dtype(sorted(fields, key=lambda field: not _is_number(*field[1:])), align=True)


def _is_number(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    return shape == () and dtype.char in _NUMBERS


def _reader(arrays: list[Leaf]) -> Callable[[Any], Sequence[Any]]:
    """Return a function that reads several leaves of a nest, in one call of C code if all leaves are attributes."""
    if len(arrays) > 1 and not any("[" in leaf.name for leaf in arrays):
        return operator.attrgetter(*(leaf.name for leaf in arrays))
    reads = [leaf.read for leaf in arrays]
    return lambda nest: [read(nest) for read in reads]


class AlfEnvAdapter(EnvAdapter):
    """An ALF env with the ``reset`` and ``step`` that the facade expects.

    The record includes the reward, which keeps its dtype.

    Args:
        constructor: Creates the env, given its ``env_id``.
        env_id: Index of the env.
    """

    def __init__(self, constructor: Callable[..., Any], env_id: int) -> None:
        super().__init__(functools.partial(constructor, env_id=env_id))
        described = self.envactors_describe()
        self._leaves = described.leaves()
        record = np.zeros(1, record_of(self._leaves))
        self._row: npt.NDArray[np.uint8] = record.view(np.uint8)
        self._bytes = self._row.data
        self._fields = [record[str(index)][0, ...] for index in range(len(self._leaves))]
        # `struct` writes all single numbers in one call, which is faster than one assignment in NumPy.
        numbers = [leaf for leaf in self._leaves if _is_number(leaf.spec.dtype, leaf.spec.shape)]
        self._write_numbers = struct.Struct("@" + "".join(leaf.spec.dtype.char for leaf in numbers)).pack_into
        self._read_numbers = _reader(numbers)
        arrays = [leaf for leaf in self._leaves if leaf not in numbers]
        # Writing to a one-dimensional memoryview takes a third of the time, and rejects other shapes and dtypes. For
        # uint8 it would also accept `bytes`, so that dtype is excluded.
        lines = [leaf for leaf in arrays if len(leaf.spec.shape) == 1 and leaf.spec.dtype != np.uint8]
        others = [leaf for leaf in arrays if leaf not in lines]
        self._read_lines, self._read_others = _reader(lines), _reader(others)
        fields = dict(zip(self._leaves, self._fields, strict=True))
        self._lines = [fields[leaf].data for leaf in lines]
        self._others = [(fields[leaf], leaf.spec.dtype, leaf.spec.shape) for leaf in others]
        self._step_type = self._fields[0].reshape(-1).data
        self._ends = not described.resets_itself
        actions = described.action_leaves()
        self._make_action = packer(described.action_spec) if described.nests_actions else None
        self.observation_space: Spec = ArraySpec(self._row.shape, self._row.dtype)
        self.action_space: Spec = tuple(leaf.spec for leaf in actions) if described.nests_actions else actions[0].spec

    def envactors_describe(self) -> Described:
        """Return the specs and properties that all envs must share."""
        env = self._env
        specs = {name: getattr(env, name) for name in Described._fields}
        return Described(**{name: spec() if name.endswith("_spec") else spec for name, spec in specs.items()})

    def reset(self, seed: int | None = None) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        if seed is not None:
            self._env.seed(seed)
        return self._write(self._env.reset()), {}

    def step(self, action: Any) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        if self._make_action is not None:
            action = self._make_action(iter(action))
        row = self._write(self._env.step(action))
        return row, 0.0, self._ends and self._step_type[0] == LAST, False, {}

    def envactors_step(self, action: Any) -> Any:
        """Call the env's own ``step``."""
        return self._env.step(action)

    def envactors_reset(self) -> Any:
        """Call the env's own ``reset``."""
        return self._env.reset()

    def envactors_sync_progress(self, progress: Any) -> None:
        """Set the progress of ALF's schedulers, and call the env's own ``sync_progress``."""
        if progress is not None:
            from alf.utils.schedulers import update_all_progresses

            update_all_progresses(progress)
        self._env.sync_progress()

    def _write(self, time_step: Any) -> npt.NDArray[np.uint8]:
        """Write a time step into the row and return the row, which the facade copies before the next call."""
        try:
            self._write_numbers(self._bytes, 0, *self._read_numbers(time_step))
            for line, value in zip(self._lines, self._read_lines(time_step)):  # noqa: B905 # faster than with `strict`
                line[:] = value
            if self._others:
                for (field, dtype, shape), value in zip(self._others, self._read_others(time_step)):  # noqa: B905
                    if value.dtype != dtype or value.shape != shape:
                        raise TypeError
                    field[...] = value
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError, struct.error):
            # A value does not have the exact type, shape, or dtype: convert it if possible, else raise.
            for leaf, field in zip(self._leaves, self._fields, strict=True):
                field[...] = conform(leaf.spec, leaf.of(time_step), leaf.name)
        return self._row
