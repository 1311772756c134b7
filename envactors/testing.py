"""Envs for tests: an echo env whose results show which calls produced them, and a wrapper that fails on command.

Nothing here needs Gymnasium.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FAULTS", "EchoEnv", "FaultyEnv", "expected_checksum"]

_LONG = 1000.0  # in seconds, longer than the deadline of any test


class Space:
    """A minimal space: a shape and a dtype.

    Args:
        shape: Shape of one value.
        dtype: Dtype of its elements.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape = shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    def sample(self) -> npt.NDArray[Any]:
        """Return a value of this space, always zeros."""
        return np.zeros(self.shape, self.dtype)


def expected_checksum(seed: int | None, actions: Iterable[int]) -> int:
    """Return the checksum in the observation of an `EchoEnv` after a reset with this seed and these actions."""
    checksum = zlib.crc32(struct.pack("<q", -1 if seed is None else seed))
    for action in actions:
        checksum = zlib.crc32(struct.pack("<q", int(action)), checksum)
    return checksum


class EchoEnv:
    """An env whose observation is ``[env id, steps since the reset, last action, checksum]`` (int64).

    The checksum covers the seed of the last reset and every action since. It therefore exposes a result that belongs to
    another call, and a step that ran twice or not at all. The reward of a step is its action.

    Args:
        env_id: Number shown in the observations.
        episode_length: Number of steps after which an episode terminates.
    """

    observation_space: Space = Space((4,), np.int64)
    action_space: Space = Space((), np.int64)

    def __init__(self, env_id: int = 0, episode_length: int = 1_000_000) -> None:
        self.env_id = env_id
        self.episode_length = episode_length
        self.steps: int = 0
        self.last_action: int = -1
        self.checksum: int = 0
        self.closed: bool = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
        """Begin an episode; the info contains the seed and the options."""
        self.steps = 0
        self.last_action = -1
        self.checksum = expected_checksum(seed, ())
        return self._observe(), {"seed": seed, "options": options}

    def step(self, action: Any) -> tuple[npt.NDArray[np.int64], float, bool, bool, dict[str, Any]]:
        """Record the action."""
        self.steps += 1
        self.last_action = int(action)
        self.checksum = zlib.crc32(struct.pack("<q", self.last_action), self.checksum)
        return self._observe(), float(self.last_action), self.steps >= self.episode_length, False, {}

    def echo(self, value: Any) -> Any:
        """Return the value unchanged."""
        return value

    def close(self) -> None:
        """Record that the env was closed."""
        self.closed = True

    def _observe(self) -> npt.NDArray[np.int64]:
        return np.array([self.env_id, self.steps, self.last_action, self.checksum], np.int64)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_LONG)


def _segfault() -> None:
    ctypes.string_at(0)


def _exit() -> None:
    os._exit(3)


def _hang_in_c() -> None:
    # A deadlock in C code that holds the GIL. No signal handler of Python ends it, and unlike an endless loop it leaves
    # the cores to the other processes.
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def _sleep() -> None:
    time.sleep(_LONG)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise RuntimeError("raised on command")


def _print() -> None:
    sys.stdout.write("printed on command\n")
    sys.stderr.write("complained on command\n")


def _start_child() -> None:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_LONG})"])  # noqa: S603 # its own interpreter


_grown: list[bytearray] = []


def _grow() -> None:
    _grown.append(bytearray(os.urandom(1 << 20) * 16))


FAULTS: dict[str, Callable[[], None]] = {
    "crash": _crash,
    "segfault": _segfault,
    "exit": _exit,
    "hang_in_c": _hang_in_c,
    "sleep": _sleep,
    "stop": _stop,
    "raise": _raise,
    "print": _print,
    "start_child": _start_child,
    "grow": _grow,
}
"""Faults of `FaultyEnv` by name. `FaultyEnv` also supports ``"unpicklable"``, a result that cannot be pickled."""


class FaultyEnv:
    """Wrapper that fails on command.

    ``env.arm("crash")`` makes the next step crash, and ``env.arm("sleep", where="reset")`` makes the next reset sleep;
    see `FAULTS` for the names. All other attributes are those of the wrapped env.

    Args:
        env: The env to wrap; None for an `EchoEnv`.
    """

    def __init__(self, env: Any = None) -> None:
        self.env: EchoEnv | Any = EchoEnv() if env is None else env
        self._armed: dict[str, str] = {}

    def arm(self, fault: str, where: str = "step") -> None:
        """Arm a fault, which occurs once.

        Args:
            fault: A key of `FAULTS`, or ``"unpicklable"``.
            where: ``"step"`` or ``"reset"``.

        Raises:
            ValueError: The fault or the place is unknown.
        """
        if fault not in FAULTS and fault != "unpicklable":
            raise ValueError(f"fault is {fault!r}: expected 'unpicklable' or one of {sorted(FAULTS)}")
        if where not in ("step", "reset"):
            raise ValueError(f"where is {where!r}: expected 'step' or 'reset'")
        self._armed[where] = fault

    def step(self, action: Any) -> Any:
        """Step the wrapped env, then run the armed fault, if any."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, self._fail("step", info)

    def reset(self, **kwargs: Any) -> Any:
        """Reset the wrapped env, then run the armed fault, if any."""
        obs, info = self.env.reset(**kwargs)
        return obs, self._fail("reset", info)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def _fail(self, where: str, info: dict[str, Any]) -> dict[str, Any]:
        fault = self._armed.pop(where, None)
        if fault == "unpicklable":
            return {**info, "lock": threading.Lock()}
        if fault is not None:
            FAULTS[fault]()
        return info
