"""Read and write the state of ALE and MuJoCo in place. Only envs import the engines themselves."""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# MuJoCo: the prefixes of arrays that are left out: private names, memory addresses, and large arrays of models that
# affect at most what is rendered.
_LEFT_OUT = ("_", "plugin_data", "mesh_", "skin_", "tex_data")
# MuJoCo: the names of the other arrays of each model and data. Finding them takes as long as many steps.
_NAMES: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


class Engine(NamedTuple):
    """How to read and write the state of an engine's object."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


def engine_of(value: Any) -> Engine | None:
    """Return how to read and write the state of an object; None if it is not an engine."""
    return _ENGINES.get((_package(value), type(value).__name__))


def belongs_to_engine(value: Any) -> bool:
    """Return whether an object is an engine, or a view of one, such as ``data.body("torso")`` of MuJoCo."""
    is_struct = _package(value) == "mujoco" and type(value).__name__.startswith(("Mj", "_Mj"))
    return is_struct or engine_of(value) is not None


def _package(value: Any) -> str:
    return str(type(value).__module__).partition(".")[0]


# ALE --------------------------------------------------------------------------------------------------


def _read_ale(ale: Any) -> Any:
    """Return the state of ALE, except for its screen, which the next frame draws."""
    if ale.getFloat("repeat_action_probability"):
        # The next frame may repeat the previous action, which is not part of ALE's state.
        raise TypeError("with sticky actions (repeat_action_probability > 0), the previous action cannot be read")
    return ale.cloneState(include_rng=True)


def _write_ale(ale: Any, state: Any) -> None:
    ale.restoreState(state)


# MuJoCo -----------------------------------------------------------------------------------------------


def _read_data(data: Any) -> tuple[str, bytes, dict[str, Any]]:
    """Return the arrays of fixed size of MuJoCo's data, and the scalars that belong to its state.

    The state for integration is not enough, since envs read derived arrays, such as ``xpos``, before the next step
    computes them. Contacts and constraints are left out, since the next step computes them before it uses them.
    """
    scalars = [name for name in dir(data) if name == "time" or name.startswith("flg_") or name.endswith("_awake")]
    values = {name: getattr(data, name) for name in scalars}
    return *_read_arrays(data), {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}


def _write_data(data: Any, state: tuple[str, bytes, dict[str, Any]]) -> None:
    version, content, scalars = state
    _write_arrays(data, version, content)
    for name, value in scalars.items():
        setattr(data, name, value)


def _read_model(model: Any) -> tuple[str, bytes, dict[str, Any]]:
    """Return the parameters of a MuJoCo model. Some envs vary them between episodes."""
    version, content = _read_arrays(model)
    options = {name: getattr(model.opt, name) for name in dir(model.opt) if not name.startswith("_")}
    copies = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    # Most of the content is zeros: compressing it to a tenth of its size takes a tenth of a millisecond.
    return version, zlib.compress(content, 1), copies


def _write_model(model: Any, state: tuple[str, bytes, dict[str, Any]]) -> None:
    version, content, options = state
    _write_arrays(model, version, zlib.decompress(content))
    for name, value in options.items():
        setattr(model.opt, name, value)


def _names_of_arrays(struct: Any) -> list[str]:
    if struct not in _NAMES:
        # All arrays of new data have a fixed size: the others are in its arena, which is empty.
        sample = type(struct)(struct.model) if type(struct).__name__ == "MjData" else struct
        arrays = {name: getattr(sample, name) for name in dir(sample) if not name.startswith(_LEFT_OUT)}
        _NAMES[struct] = [name for name, value in arrays.items() if isinstance(value, np.ndarray) and value.size]
    return _NAMES[struct]


def _read_arrays(struct: Any) -> tuple[str, bytes]:
    content = b"".join([getattr(struct, name).tobytes() for name in _names_of_arrays(struct)])
    return sys.modules["mujoco"].__version__, content


def _write_arrays(struct: Any, version: str, content: bytes) -> None:
    present = sys.modules["mujoco"].__version__
    if version != present:
        raise ValueError(
            f"the snapshot was taken with MuJoCo {version}: expected {present}. Install that version to restore it, "
            "or take a new snapshot"
        )
    arrays = [getattr(struct, name) for name in _names_of_arrays(struct)]
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


_ENGINES = {
    ("ale_py", "ALEInterface"): Engine(_read_ale, _write_ale),
    ("mujoco", "MjData"): Engine(_read_data, _write_data),
    ("mujoco", "MjModel"): Engine(_read_model, _write_model),
}
