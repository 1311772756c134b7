"""Capture and restore the state of MuJoCo's models and data. Only envs import MuJoCo itself."""

from __future__ import annotations

import sys
import weakref
import zlib
from typing import Any

import numpy as np

# The names of the arrays of fixed size in models and data. All other arrays are in the arena, which each step refills.
_FIELDS: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
# The public names of MuJoCo's classes.
_NAMES: dict[Any, list[str]] = {}
# Prefixes of large arrays of models that affect at most what is rendered.
_CONSTANT = ("mesh_", "skin_", "tex_data")
# Memory addresses.
_POINTERS = "plugin_data"


def capture_data(data: Any) -> tuple[str, dict[str, Any], bytes]:
    """Return all arrays of fixed size of MuJoCo's data, and the scalars that belong to its state.

    The state for integration is not enough, since envs read derived arrays, such as ``xpos``, before the next step
    computes them. Contacts and constraints are left out, since the next step computes them before it uses them.
    """
    return _version(), _scalars(data), b"".join([getattr(data, name).tobytes() for name in _data_fields(data)])


def restore_data(data: Any, state: tuple[str, dict[str, Any], bytes]) -> None:
    """Restore the state of MuJoCo's data.

    Raises:
        ValueError: The state belongs to another model, or to another version of MuJoCo.
    """
    version, scalars, content = state
    _write(data, _data_fields(data), version, content)
    for name, value in scalars.items():
        setattr(data, name, value)


def capture_model(model: Any) -> tuple[str, dict[str, Any], bytes]:
    """Return the parameters of a MuJoCo model, without textures and meshes. Some envs vary them between episodes."""
    content = b"".join([getattr(model, name).tobytes() for name in _model_fields(model)])
    options = {name: getattr(model.opt, name) for name in _names(type(model.opt))}
    # Most of the content is zeros: compressing it to a tenth of its size takes a tenth of a millisecond.
    return _version(), options, zlib.compress(content, 1)


def restore_model(model: Any, state: tuple[str, dict[str, Any], bytes]) -> None:
    """Set the parameters of a MuJoCo model.

    Raises:
        ValueError: The parameters belong to another model, or to another version of MuJoCo.
    """
    version, options, content = state
    _write(model, _model_fields(model), version, zlib.decompress(content))
    for name, value in options.items():
        if isinstance(value, np.ndarray):
            getattr(model.opt, name)[...] = value
        else:
            setattr(model.opt, name, value)


def is_engine_memory(array: np.ndarray[Any, Any], engine: Any) -> bool:
    """Return whether an array uses the memory of a MuJoCo model or its data."""
    names = _data_fields(engine) if type(engine).__name__ == "MjData" else _model_fields(engine)
    return any(np.may_share_memory(array, getattr(engine, name)) for name in names)


def _version() -> str:
    return str(sys.modules["mujoco"].__version__)


def _data_fields(data: Any) -> list[str]:
    if data not in _FIELDS:
        # The arena of new data is empty, so only the arrays of fixed size have elements.
        _FIELDS[data] = _arrays(sys.modules["mujoco"].MjData(data.model))
    return _FIELDS[data]


def _model_fields(model: Any) -> list[str]:
    if model not in _FIELDS:
        _FIELDS[model] = [name for name in _arrays(model) if not name.startswith(_CONSTANT)]
    return _FIELDS[model]


def _arrays(struct: Any) -> list[str]:
    names = [name for name in _names(type(struct)) if name != _POINTERS]
    return [name for name in names if isinstance(value := getattr(struct, name), np.ndarray) and value.size]


def _names(struct: Any) -> list[str]:
    if struct not in _NAMES:
        _NAMES[struct] = [name for name in dir(struct) if not name.startswith("_")]
    return _NAMES[struct]


def _scalars(data: Any) -> dict[str, Any]:
    """Return the time, and the flags for valid derived arrays and for bodies that are awake."""
    names = [
        name for name in _names(type(data)) if name == "time" or name.startswith("flg_") or name.endswith("_awake")
    ]
    return {name: value for name in names if isinstance(value := getattr(data, name), (bool, int, float))}


def _write(struct: Any, names: list[str], version: str, content: bytes) -> None:
    if version != _version():
        raise ValueError(
            f"the snapshot was taken with MuJoCo {version}: expected {_version()}. Install that version to restore it, "
            "or take a new snapshot"
        )
    arrays = [getattr(struct, name) for name in names]
    size = sum(array.nbytes for array in arrays)
    if len(content) != size:
        raise ValueError(
            f"the snapshot of the {type(struct).__name__} has {len(content)} bytes: expected {size}. Restore it into "
            "an env with the same model"
        )
    offset = 0
    for array in arrays:
        array[...] = np.frombuffer(content, array.dtype, array.size, offset).reshape(array.shape)
        offset += array.nbytes
