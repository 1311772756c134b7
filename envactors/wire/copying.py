"""Copies of values that pass between caller and worker in one process, so that neither changes the other's value."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

# Values of exactly these types; their subclasses may have mutable state.
_IMMUTABLE = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, type, type(...), np.bool_),
        *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64),
    ]
)


def copy_value(value: Any) -> Any:
    """Return a copy of a value that shares nothing mutable with it.

    Raises:
        Exception: Whatever `copy.deepcopy` raises for a value that cannot be copied.
    """
    try:
        return _copy(value)
    except RecursionError:  # the value contains itself
        return copy.deepcopy(value)


def _copy(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy("K")
    if kind is dict:
        return {key: content if type(content) in _IMMUTABLE else _copy(content) for key, content in value.items()}
    if kind is list:
        return [_copy(content) for content in value]
    if kind is tuple:
        return tuple([_copy(content) for content in value])
    return copy.deepcopy(value)
