"""Kinds of objects that a snapshot does not copy. The restored env uses its own object at the same place instead.

A kind defines which part of such an object belongs to the state, and how to restore that part in the object's
counterpart. `envactors.state.places` finds the counterparts.
"""

from __future__ import annotations

import _thread
import csv
import dataclasses
import io
import logging
import multiprocessing.process
import subprocess
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any

from envactors.state import ale, mujoco


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of objects that an env keeps.

    Attributes:
        name: The name of the kind in a pickle.
        capture: Returns the part of an object that belongs to the state.
        restore: Restores that part in an object.
        describe: Returns a value that must be equal for an object and its counterpart.
        required: Whether restoring fails if the env has no counterpart.
    """

    name: str
    capture: Callable[[Any], Any]
    restore: Callable[[Any, Any], None]
    describe: Callable[[Any], Any]
    required: bool = True


# Modules whose objects only display the env.
_DISPLAY_MODULES = (
    *("OpenGL", "glfw", "gymnasium.envs.mujoco.mujoco_rendering", "matplotlib", "pyglet", "tkinter"),
    *("mujoco._render", "mujoco.egl", "mujoco.gl_context", "mujoco.glfw", "mujoco.osmesa", "mujoco.renderer"),
    "mujoco.viewer",
)
# Types of pygame that only display or play something. Its vectors and rectangles hold state and are copied.
_PYGAME = frozenset(["Channel", "Clock", "Font", "Joystick", "Renderer", "Sound", "Surface", "Texture", "Window"])
_OUTPUTS = (_thread.LockType, _thread.RLock, logging.Handler, type(csv.writer(io.StringIO())))
_UNCOPIED = (subprocess.Popen, multiprocessing.process.BaseProcess)


def kind_of(value: Any) -> Kind | None:
    """Return the kind of an object; None if the snapshot copies it.

    Raises:
        TypeError: The object can be neither kept nor copied.
    """
    cls = type(value)
    if cls is types.FunctionType:
        return None if _is_importable(value) else FUNCTION
    root = cls.__module__.partition(".")[0] if isinstance(cls.__module__, str) else ""
    if root == "ale_py" and cls.__name__ == "ALEInterface":
        return ALE
    if root == "mujoco" and cls.__name__ in _MUJOCO:
        return _MUJOCO[cls.__name__]
    if root == "mujoco" and cls.__name__.startswith(("_MjData", "_MjModel")):
        return VIEW
    if is_output(value):
        return OUTPUT
    if _is_file(value):
        raise TypeError("a file that is open for reading has a position, which cannot be captured")
    return _kind_of_gymnasium(value)


def is_output(value: Any) -> bool:
    """Return whether no step depends on an object.

    Such an object displays the env, is written to, or describes how the env was created.
    """
    if isinstance(value, _OUTPUTS) or (_is_file(value) and (value.closed or value.writable())):
        return True
    cls = type(value)
    module, name = str(cls.__module__), cls.__name__
    if module.startswith("pygame"):
        return name in _PYGAME
    if module.startswith("mujoco._structs"):
        return name.startswith(("Mjv", "Mjr"))
    if module == "gymnasium.envs.registration":
        return name in ("EnvSpec", "WrapperSpec")
    return any(module == display or module.startswith(f"{display}.") for display in _DISPLAY_MODULES)


def _is_file(value: Any) -> bool:
    return isinstance(value, io.IOBase) and not isinstance(value, (io.BytesIO, io.StringIO))


def _kind_of_gymnasium(value: Any) -> Kind | None:
    if isinstance(value, _UNCOPIED):
        raise TypeError(f"{type(value).__name__} is a process")
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return None
    if isinstance(value, gymnasium.spaces.Space):
        return SPACE
    if isinstance(value, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        raise TypeError(f"{type(value).__name__} is an env that is not in the chain of wrappers")
    if isinstance(value, gymnasium.utils.EzPickle):
        raise TypeError(f"{type(value).__name__} is pickled without its state (EzPickle)")
    return None


def _is_importable(function: types.FunctionType) -> bool:
    """Return whether another process finds a function by its name."""
    found: Any = sys.modules.get(function.__module__) if function.__module__ != "__main__" else None
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


# Functions ---------------------------------------------------------------------------------------------


def _capture_function(function: Any) -> tuple[Any, ...]:
    """Return the variables that a function closes over, its defaults, and its attributes: it may use all as state.

    The env may share objects with the function: a random generator that both hold must stay one object.
    """
    cells = {}
    for index, cell in enumerate(function.__closure__ or ()):
        try:
            if not isinstance(cell.cell_contents, (type, types.ModuleType)):
                cells[index] = cell.cell_contents
        except ValueError:  # empty
            continue
    return cells, function.__defaults__, function.__kwdefaults__, vars(function)


def _restore_function(function: Any, state: tuple[Any, ...]) -> None:
    cells, function.__defaults__, function.__kwdefaults__, attributes = state
    for index, value in cells.items():
        function.__closure__[index].cell_contents = value
    vars(function).clear()
    vars(function).update(attributes)


def _describe_function(function: Any) -> tuple[Any, ...]:
    code = function.__code__
    return function.__module__, function.__qualname__, code.co_firstlineno, zlib.crc32(code.co_code)


# Spaces ------------------------------------------------------------------------------------------------


def _capture_space(space: Any) -> tuple[Any, list[Any]]:
    """Return the random generator of a space, and the spaces in it, which have generators too.

    Bounds are not captured: they are large, and assumed to be constant.
    """
    children = [*vars(space).values()]
    for value in [*children]:
        children += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    kind = sys.modules["gymnasium"].spaces.Space
    return space._np_random, [child for child in children if isinstance(child, kind)]  # noqa: SLF001 # the property would create one


def _restore_space(space: Any, state: tuple[Any, list[Any]]) -> None:
    space._np_random = state[0]  # noqa: SLF001 # the property cannot be set


def _nothing(_value: Any) -> None:
    pass


def _nothing_to_restore(_value: Any, _state: Any) -> None:
    pass


FUNCTION = Kind("function", _capture_function, _restore_function, _describe_function)
SPACE = Kind("space", _capture_space, _restore_space, repr)
OUTPUT = Kind("output", _nothing, _nothing_to_restore, _nothing, required=False)
# Arrays and structures in the memory of an engine. The kind of the engine restores that memory.
VIEW = Kind("view", _nothing, _nothing_to_restore, _nothing)
ALE = Kind("ALEInterface", ale.capture_ale, ale.restore_ale, _nothing)
_MUJOCO = {
    "MjModel": Kind("MjModel", mujoco.capture_model, mujoco.restore_model, _nothing),
    "MjData": Kind("MjData", mujoco.capture_data, mujoco.restore_data, _nothing),
}
KINDS = {kind.name: kind for kind in (FUNCTION, SPACE, OUTPUT, VIEW, ALE, *_MUJOCO.values())}
