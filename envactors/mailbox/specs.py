"""Specs, which describe values as `ArraySpec`, nested in dicts and tuples, and the functions that use them.

Values are flattened, checked, batched and split by spec. The spec of a space follows from the space's shape and the
name of its class, so neither Gymnasium nor any other framework is imported. Where arrays are placed in shared memory is
decided in `envactors.mailbox.slab`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from envactors.errors import SpaceMismatchError

# Of dtypes that can be batched: bool, int, uint, float, complex (`numpy.dtype.kind`).
_ARRAY_KINDS = "biufc"


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySpec:
    """The shape and dtype of an array.

    Attributes:
        shape: The shape of one env's value, without the axis of the envs.
        dtype: The dtype; ``object`` for values that cannot be batched and so form lists.
        low: The smallest value, or None.
        high: The largest value, or None.
        batchable: Whether values of this spec can be put into one array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: npt.NDArray[Any] | None = None
    high: npt.NDArray[Any] | None = None
    batchable: bool = dataclasses.field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        dtype = np.dtype(self.dtype)
        # An unpickled dtype is not NumPy's own object. With NumPy's own, a comparison by `is` suffices.
        canonical = np.dtype(dtype.type) if dtype.kind in _ARRAY_KINDS and dtype.isnative else dtype
        object.__setattr__(self, "dtype", canonical)
        object.__setattr__(self, "batchable", dtype.kind in _ARRAY_KINDS)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArraySpec):
            return NotImplemented
        bounds: list[tuple[Any, Any]] = [(self.low, other.low), (self.high, other.high)]
        alike = (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in bounds)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


Spec: TypeAlias = "ArraySpec | dict[str, Any] | tuple[Any, ...]"

OBJECT = ArraySpec((), np.dtype(object))


def spec_of_space(space: Any) -> Spec:
    """Return the spec of a space, or the argument itself if it is a spec.

    Dict and Tuple spaces become dicts and tuples; a space with a shape and a numeric dtype becomes an `ArraySpec`.
    """
    if isinstance(space, (ArraySpec, dict, tuple)):
        return space
    names = {base.__name__ for base in type(space).__mro__}
    if "Dict" in names:
        return {key: spec_of_space(inner) for key, inner in space.spaces.items()}
    if "Tuple" in names:
        return tuple(spec_of_space(inner) for inner in space.spaces)
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in _ARRAY_KINDS:
        return OBJECT
    low, high = _bounds(space)
    return ArraySpec(tuple(shape), np.dtype(dtype), low, high)


def _bounds(space: Any) -> tuple[Any, Any]:
    if hasattr(space, "low") and hasattr(space, "high"):
        return np.asarray(space.low), np.asarray(space.high)
    if hasattr(space, "nvec"):
        starts = np.asarray(getattr(space, "start", 0))
        return np.broadcast_to(starts, np.shape(space.nvec)), starts + np.asarray(space.nvec) - 1
    if hasattr(space, "n") and space.shape == ():
        start = int(getattr(space, "start", 0))
        return np.asarray(start), np.asarray(start + int(space.n) - 1)
    return None, None


def leaves(spec: Spec) -> list[ArraySpec]:
    """Return the leaves of a spec in the order of `flatten`."""
    return flatten(spec, spec)


def flatten(spec: Spec, value: Any) -> list[Any]:
    """Return the leaves of a conforming value."""
    if isinstance(spec, ArraySpec):
        return [value]
    return [leaf for key in _keys(spec) for leaf in flatten(spec[key], value[key])]


def flattener(spec: Spec) -> Callable[[Any], Sequence[Any]]:
    """Return a function that does the same as `flatten` for a spec, in a tenth of the time for most specs."""
    if isinstance(spec, ArraySpec):
        return lambda value: (value,)
    if len(spec) > 1 and all(isinstance(spec[key], ArraySpec) for key in _keys(spec)):
        return operator.itemgetter(*_keys(spec))
    return functools.partial(flatten, spec)


def unflatten(spec: Spec, flat: Iterator[Any]) -> Any:
    """Build a value from its leaves."""
    if isinstance(spec, ArraySpec):
        return next(flat)
    parts: Any = spec.values() if isinstance(spec, dict) else spec
    return _like(spec, [next(flat) if isinstance(part, ArraySpec) else unflatten(part, flat) for part in parts])


def reader(spec: Spec, arrays: Sequence[npt.NDArray[Any]], index: int) -> Callable[[], Any]:
    """Return a function that reads a row of batched leaves; later writes do not change the values it returns."""
    # These are C code, since the function is called in every step.
    readers = [
        array[index].copy if array.ndim > 1 else functools.partial(operator.getitem, array, index) for array in arrays
    ]
    if isinstance(spec, ArraySpec):
        return readers[0]
    return lambda: unflatten(spec, (read() for read in readers))


def row_splitter(spec: Spec) -> Callable[[Any, int], list[Any]]:
    """Return a function that splits a conforming batch of n envs into n values, without the checks of `split_batch`."""
    if isinstance(spec, ArraySpec):
        return lambda batch, count: list(itertools.islice(batch, count))
    # `islice` stops before the end of an array. Reaching it would take as long as 8 rows: NumPy raises an error there.
    is_leaf = {key: isinstance(spec[key], ArraySpec) for key in _keys(spec)}
    splitters = [(key, itertools.islice if is_leaf[key] else row_splitter(spec[key])) for key in is_leaf]

    def split(batch: Any, count: int) -> list[Any]:
        columns = [split_column(batch[key], count) for key, split_column in splitters]
        return list(zip(*columns, strict=True)) if columns else [()] * count

    if isinstance(spec, tuple):
        return split
    return lambda batch, count: [dict(zip(spec, row, strict=False)) for row in split(batch, count)]


def spec_of_value(value: Any) -> Spec:
    """Return the spec of a value whose space is not known."""
    if isinstance(value, Mapping):
        return {key: spec_of_value(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(spec_of_value(inner) for inner in value)
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        array = np.asarray(value)
        if array.dtype.kind in _ARRAY_KINDS:
            return ArraySpec(array.shape, array.dtype)
    return OBJECT


def as_float64(spec: Spec) -> Spec:
    """Return the spec of the same values with float64 in place of other numbers. It has no bounds."""
    dtype = np.dtype(np.float64)
    converted = (ArraySpec(leaf.shape, dtype) if leaf.batchable else leaf for leaf in leaves(spec))
    return unflatten(spec, converted)  # type: ignore[no-any-return] # a spec, since its leaves are


def conform(spec: Spec, value: Any, what: str, *, is_exact: bool = False) -> Any:
    """Convert a value to the dtype of its spec.

    Args:
        spec: The spec.
        value: The value; it is not copied if it already conforms.
        what: What the value is, for the error message.
        is_exact: Whether to refuse dicts with more keys than the spec; otherwise these are dropped, as in Gymnasium.

    Raises:
        SpaceMismatchError: The structure or the shape differs, or the dtype does not cast to the spec's within its kind
            (floats never become integers).
    """
    if isinstance(spec, ArraySpec):
        if not spec.batchable:
            return value
        return value if _conforms(value, spec.dtype, spec.shape) else _as_array(spec, value, spec.shape, what)
    _check_structure(spec, value, what, is_exact=is_exact)
    parts = []
    for key in _keys(spec):
        inner, part = spec[key], value[key]
        if not (isinstance(inner, ArraySpec) and _conforms(part, inner.dtype, inner.shape)):
            part = conform(inner, part, f"{what}[{key!r}]", is_exact=is_exact)
        parts.append(part)
    return _like(spec, parts)


def conform_to_first(spec: Spec, value: Any, what: str, first_env: int) -> Any:
    """Convert an observation to the spec of an earlier one; see `conform`.

    Args:
        spec: The spec of the first observation.
        value: The observation.
        what: What the value is, for the error message.
        first_env: The env whose first reset returned the first observation.

    Raises:
        SpaceMismatchError: As for `conform`. The message says where the spec comes from.
    """
    try:
        return conform(spec, value, what)
    except SpaceMismatchError as error:
        raise SpaceMismatchError(
            f"{error}. Shape and dtype were fixed by the first reset of env {first_env}, since no observation_space is "
            "declared: declare one that fits all observations"
        ) from error.__cause__


def split_batch(spec: Spec | None, values: Any, count: int, what: str) -> Sequence[Any] | npt.NDArray[Any]:
    """Split a batch into one value per env, and check each against the spec.

    A batch is an array with the envs along axis 0 in each leaf (a dict of arrays for a dict spec, a tuple of
    arrays for a tuple spec), or a list with one value per env.

    Args:
        spec: The spec of one env's value; None if it is not known, and then any sequence is accepted.
        values: The batch.
        count: The number of envs.
        what: What the values are, for the error message.

    Raises:
        SpaceMismatchError: The length, structure, shape, or dtype does not fit.
    """
    if isinstance(spec, ArraySpec) and spec.batchable and _conforms(values, spec.dtype, (count, *spec.shape)):
        return values  # the checks below would find the same, in five times the time
    if isinstance(spec, (dict, tuple)) and isinstance(values, Mapping if isinstance(spec, dict) else tuple):
        _check_structure(spec, values, what, is_exact=True)
        columns = [split_batch(spec[key], values[key], count, f"{what}[{key!r}]") for key in _keys(spec)]
        return [_like(spec, [column[i] for column in columns]) for i in range(count)]
    if not isinstance(spec, ArraySpec) or not spec.batchable:
        _check_length(values, count, what)
        if spec is None:
            return list(values)
        return [conform(spec, values[i], f"{what}[{i}]", is_exact=True) for i in range(count)]
    _check_length(values, count, what, spec.shape)
    shape = (count, *spec.shape)
    return _as_array(spec, values, shape, what) if count else np.empty(shape, spec.dtype)


def _conforms(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> TypeGuard[npt.NDArray[Any]]:
    return type(value) is np.ndarray and value.dtype == dtype and value.shape == shape


def _keys(spec: Any) -> Iterable[Any]:
    """Return what a dict or tuple spec is indexed with."""
    return spec if isinstance(spec, dict) else range(len(spec))


def _like(spec: Any, contents: Iterable[Any]) -> Any:
    """Return contents as a value of a dict or tuple spec."""
    return dict(zip(spec, contents, strict=True)) if isinstance(spec, dict) else tuple(contents)


def _check_structure(spec: Any, value: Any, what: str, *, is_exact: bool) -> None:
    """Raise unless a value has the keys of a dict spec, or the length of a tuple spec."""
    if isinstance(spec, dict):
        fits = isinstance(value, (dict, Mapping)) and value.keys() >= spec.keys()  # `dict` is checked much faster
        fits = fits and not (is_exact and len(value) > len(spec))
    else:
        fits = isinstance(value, (tuple, list)) and len(value) == len(spec)
    if not fits:
        raise SpaceMismatchError(f"the structure of {what} is {_structure(value)}: expected {_structure(spec)}")


def _structure(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (tuple, list)) else kind


def _check_length(values: Any, count: int, what: str, shape: tuple[int, ...] | None = None) -> None:
    try:
        length = len(values)
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__getitem__"):
            raise TypeError
    except TypeError:
        given = type(values).__name__ if shape is None else repr(values)
        expected = f"a sequence of {count}" if shape is None else f"{count} of shape {shape}"
        raise SpaceMismatchError(f"{what} are {given}: expected {expected}, one per env") from None
    if length != count:
        raise SpaceMismatchError(f"{length} {what} for {count} envs: expected one per env")


def _as_array(spec: ArraySpec, value: Any, shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged
        text = f"{what} cannot be converted to an array: expected shape {shape}, dtype {spec.dtype}"
        raise SpaceMismatchError(text) from error
    if array.shape != shape:
        raise SpaceMismatchError(f"{what} has shape {array.shape}: expected {shape}, dtype {spec.dtype}")
    if array.dtype != spec.dtype:
        integers = array.dtype.kind in "biu" and spec.dtype.kind in "iu"
        if not integers and not np.can_cast(array.dtype, spec.dtype, "same_kind"):
            raise SpaceMismatchError(f"{what} has dtype {array.dtype}: expected {spec.dtype}, shape {shape}")
        given = array
        with np.errstate(over="ignore"):
            array = given.astype(spec.dtype)
        if integers and not np.array_equal(array, given):
            raise SpaceMismatchError(f"{what} has values that {spec.dtype} does not hold: {given}")
    scalar_or_array: npt.NDArray[Any] = array[()]  # envs expect NumPy's scalars rather than arrays without axes
    return scalar_or_array


def stack(spec: Spec, values: Sequence[Any]) -> Any:
    """Batch conforming values leaf by leaf, along a new axis 0; values that cannot be batched become a list."""
    if not isinstance(spec, ArraySpec):
        return _like(spec, [stack(spec[key], [value[key] for value in values]) for key in _keys(spec)])
    if not spec.batchable:
        return list(values)
    return np.array(values, spec.dtype) if values else np.empty((0, *spec.shape), spec.dtype)


def zeros(spec: Spec) -> Any:
    """Return a value of a spec that consists of zeros."""
    return unflatten(spec, (np.zeros(leaf.shape, leaf.dtype)[()] for leaf in leaves(spec)))


def batches_alike(one: Spec | None, other: Spec | None) -> bool:
    """Return whether values of two specs fit into one batch: structure, shapes and dtypes count, bounds do not."""
    return one is other or bool(_outline(one) == _outline(other))


def _outline(spec: Spec | None) -> Any:
    return spec and unflatten(spec, iter([(leaf.shape, leaf.dtype.str) for leaf in leaves(spec)]))
