"""Objects that a snapshot does not copy: the restored env keeps its own.

Such an object is an attribute of an env or wrapper. Spaces and engines have a state, which is saved and written back
into the env's own object. Windows, locks, files that are written, and plain functions have none.
"""

from __future__ import annotations

import _thread
import csv
import io
import logging
import sys
import types
from typing import Any

from envactors.mailbox.pickling import has_importable_name
from envactors.state.engines import engine_of

# Modules and packages whose objects only display the env.
_DISPLAY_MODULES = (
    *("OpenGL.", "glfw.", "gymnasium.envs.mujoco.mujoco_rendering.", "matplotlib.", "pyglet.", "tkinter."),
    *("mujoco._render.", "mujoco.egl.", "mujoco.gl_context.", "mujoco.glfw.", "mujoco.osmesa.", "mujoco.renderer."),
    *("mujoco.rendering.", "mujoco.viewer."),
)
# Types of pygame that only display or play something. Its vectors and rectangles hold state and are copied.
_PYGAME = frozenset(["Channel", "Clock", "Font", "Joystick", "Renderer", "Sound", "Surface", "Texture", "Window"])
_OUTPUTS = (_thread.LockType, _thread.RLock, logging.Handler, type(csv.writer(io.StringIO())))


def is_kept(value: Any) -> bool:
    """Return whether the restored env keeps its own object in place of this attribute."""
    return is_output(value) or is_plain_function(value) or is_space(value) or engine_of(value) is not None


def is_output(value: Any) -> bool:
    """Return whether an object, or each object of a list, only displays the env or is written to."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(is_output, value))
    if isinstance(value, _OUTPUTS) or (is_file(value) and (value.closed or value.writable())):
        return True
    module, name = str(type(value).__module__), type(value).__name__
    if module.startswith("pygame"):
        return name in _PYGAME
    if module.startswith("mujoco._structs"):
        return name.startswith(("Mjv", "Mjr"))
    return f"{module}.".startswith(_DISPLAY_MODULES)


def is_file(value: Any) -> bool:
    """Return whether an object is an open or closed file."""
    return isinstance(value, io.IOBase) and not isinstance(value, (io.BytesIO, io.StringIO))


def is_plain_function(value: Any) -> bool:
    """Return whether an object is a function that cannot be imported, and has no variables that could be state.

    The functions of Gymnasium's wrappers have variables, but never change them.
    """
    if not isinstance(value, types.FunctionType) or has_importable_name(value):
        return False
    return value.__module__.startswith("gymnasium.") or not has_variables(value)


def has_variables(function: types.FunctionType) -> bool:
    """Return whether a function is a closure, or has defaults or attributes."""
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function))


def is_space(value: Any) -> bool:
    """Return whether an object is a space of Gymnasium."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(value, gymnasium.spaces.Space)


def parts_of(value: Any) -> list[Any]:
    """Return a kept object and, if it is a space, the spaces in it, which have random generators too."""
    parts = [value]
    for part in parts:
        for child in vars(part).values() if is_space(part) else ():
            children = child.values() if isinstance(child, dict) else child if isinstance(child, tuple) else (child,)
            parts += filter(is_space, children)
    return parts


def identity_of(value: Any) -> Any:
    """Return a value that is equal for an object and its counterpart in another env from the same factory."""
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return value.__module__, value.__qualname__, code.co_firstlineno, code.co_code
    return repr(value) if is_space(value) else None


def read_state(value: Any) -> Any:
    """Return the part of an object that belongs to the state of the env.

    Raises:
        TypeError: It cannot be read.
    """
    if is_space(value):
        # Not the bounds, which are large, and assumed to be constant.
        return value._np_random  # noqa: SLF001 # the property would create a generator
    engine = engine_of(value)
    return None if engine is None else engine.read(value)


def write_state(value: Any, state: Any) -> None:
    """Restore the state that `read_state` returned.

    Raises:
        ValueError: It belongs to another model, or another version of an engine.
    """
    if is_space(value):
        value._np_random = state  # noqa: SLF001 # the property cannot be set
    elif (engine := engine_of(value)) is not None:
        engine.write(value, state)
