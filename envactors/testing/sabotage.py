"""Faults that are ordered from outside and happen once, whatever becomes of the process that they happen in."""

from __future__ import annotations

import enum
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.testing.envs import FAULTS, EchoEnv, Space

CHILD_SECONDS = 1000  # how long a child that is left running would run


class FaultKind(enum.Enum):
    """What can be done to an env."""

    KILL_IDLE = "SIGKILL, idle"
    KILL_STEP = "SIGKILL in a step"
    KILL_RESET = "SIGKILL in a reset"
    KILL_FACTORY = "SIGKILL in the factory"
    KILL_WRITING = "SIGKILL while writing"
    BUS_WRITING = "SIGBUS while writing"
    STOP = "SIGSTOP"
    HANG = "hang in C"
    SLEEP = "sleep"
    EXCEPTION = "exception"
    UNPICKLABLE = "unpicklable result"
    EXIT = "os._exit"
    SEGFAULT = "segfault"
    CHILD = "child left running"


class Place(enum.IntEnum):
    """Where in an env's life a fault happens."""

    FACTORY = 0
    RESET = 1
    STEP = 2


class Order(NamedTuple):
    """One fault that is to happen.

    Attributes:
        kind: What happens.
        seconds: How long a sleep lasts.
    """

    kind: FaultKind
    seconds: float = 0.0


_KINDS = list(FaultKind)
_CHILD = len(Place)  # the word after those of the places: the process id of the last child that was left running
_WORDS = _CHILD + 1


class Orders:
    """What is to go wrong with each env, in a file that both halves map.

    An order is taken off before it is executed. So it happens once, also where a new process is brought to the point
    at which the old one was lost.

    Args:
        path: Where the file is.
        num_envs: How many envs there are.
    """

    def __init__(self, path: str, num_envs: int) -> None:
        self.path = path
        self.num_envs = num_envs
        with open(path, "r+b") as file:  # noqa: PTH123
            self._map = mmap.mmap(file.fileno(), 8 * _WORDS * num_envs)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def make(cls, num_envs: int) -> Orders:
        """Makes the file; `remove` removes it."""
        file, path = tempfile.mkstemp(prefix="envactors-chaos-")
        os.write(file, bytes(8 * _WORDS * num_envs))
        os.close(file)
        return cls(path, num_envs)

    def remove(self) -> None:
        """Removes the file, also for whoever has mapped it."""
        self._words.release()
        self._map.close()
        os.unlink(self.path)  # noqa: PTH108

    def give(self, env_id: int, place: Place, order: Order) -> None:
        """Has something go wrong the next time that an env is at a place."""
        milliseconds = round(order.seconds * 1000)
        self._words[_WORDS * env_id + place] = milliseconds * 256 + _KINDS.index(order.kind) + 1

    def waits(self, env_id: int, place: Place) -> bool:
        """Whether an order has not been taken yet."""
        return self._words[_WORDS * env_id + place] != 0

    def take(self, env_id: int, place: Place) -> Order | None:
        """Takes an order off."""
        index = _WORDS * env_id + place
        word, self._words[index] = self._words[index], 0
        return Order(_KINDS[word % 256 - 1], word // 256 / 1000) if word else None

    def left_running(self, env_id: int, pid: int) -> None:
        """Notes the process that an env has left running."""
        self._words[_WORDS * env_id + _CHILD] = pid

    def take_child(self, env_id: int) -> int:
        """The process id of the last one that an env has left running, once; 0 where there was none."""
        index = _WORDS * env_id + _CHILD
        pid, self._words[index] = self._words[index], 0
        return pid


class Saboteur:
    """Wraps an env, and does to it what was ordered; everything else is the wrapped env's.

    Args:
        factory: Makes the env.
        path: Where the orders are.
        num_envs: How many envs the orders are for.
        env_id: Which of them this is.
    """

    def __init__(self, factory: Callable[[], Any], path: str, num_envs: int, env_id: int) -> None:
        self._orders = Orders(path, num_envs)
        self._env_id = env_id
        self._obey(Place.FACTORY, None, {})
        self.env = factory()

    def step(self, action: Any) -> Any:
        """Steps the wrapped env; then happens what was ordered."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs, info = self._obey(Place.STEP, obs, info)
        return obs, reward, terminated, truncated, info

    def reset(self, **kwargs: Any) -> Any:
        """Resets the wrapped env; then happens what was ordered."""
        obs, info = self.env.reset(**kwargs)
        return self._obey(Place.RESET, obs, info)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def _obey(self, place: Place, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        order = self._orders.take(self._env_id, place)
        if order is None:
            return obs, info
        faulthandler.disable()  # what it would print is of no use here, and stands in the way of a live view
        if order.kind is FaultKind.UNPICKLABLE:
            return obs, {**info, "lock": threading.Lock()}
        if order.kind is FaultKind.KILL_WRITING:
            _die_when_the_interpreter_is_free()
            return obs, info
        if order.kind is FaultKind.BUS_WRITING and (half := _half_there(obs)) is not obs:
            return half, info
        if order.kind is FaultKind.CHILD:
            self._leave_a_child()
        if order.kind is FaultKind.SLEEP:
            time.sleep(order.seconds)
            return obs, info
        FAULTS[_NAMES.get(order.kind, "crash")]()
        return obs, info

    def _leave_a_child(self) -> None:
        code = f"import time; time.sleep({CHILD_SECONDS})"
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, self._orders.path])  # noqa: S603 # its own
        self._orders.left_running(self._env_id, child.pid)


_NAMES = {
    FaultKind.STOP: "stop",
    FaultKind.HANG: "hang_in_c",
    FaultKind.EXCEPTION: "raise",
    FaultKind.EXIT: "exit",
    FaultKind.SEGFAULT: "segfault",
}
"""Keys of `envactors.testing.FAULTS`; all other kinds end with a SIGKILL."""


def _die_when_the_interpreter_is_free() -> None:
    """Has a thread kill this process as soon as the main thread lets go of the interpreter.

    NumPy does so while it copies: the process dies with the observation partly written, or just after.
    """
    gate, is_there = threading.Lock(), threading.Event()
    gate.acquire()

    def kill() -> None:
        is_there.set()
        with gate:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    is_there.wait()
    sys.setswitchinterval(CHILD_SECONDS)
    gate.release()


def _half_there(value: Any) -> Any:
    """An observation whose first array has memory for its first half only: who reads on is ended by SIGBUS."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            half = _half_there(inner)
            if half is not inner:
                return {**value, key: half}
        return value
    if isinstance(value, tuple):
        for i, inner in enumerate(value):
            half = _half_there(inner)
            if half is not inner:
                return (*value[:i], half, *value[i + 1 :])
        return value
    if not isinstance(value, np.ndarray) or value.dtype.hasobject or value.nbytes == 0:
        return value
    return _with_half_its_memory(value)


def _with_half_its_memory(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    data = value.tobytes()
    half = len(data) // 2 // value.itemsize * value.itemsize
    end = -(-max(half, 1) // mmap.PAGESIZE) * mmap.PAGESIZE  # of what there is memory for
    start = end - half
    with tempfile.TemporaryFile() as file:
        file.truncate(end + len(data))
        memory = mmap.mmap(file.fileno(), 0)
        memory[start:end] = data[:half]
        file.truncate(end)
    there: npt.NDArray[Any] = np.ndarray(value.shape, value.dtype, memory, offset=start)
    return there


class LargeEcho(EchoEnv):
    """An echo env whose observation takes a while to write; a mark all over it shows one that is not in one piece.

    Args:
        env_id: Its number.
    """

    SIZE = 1 << 17
    EPISODE_LENGTH = 7
    observation_space = Space((SIZE,), np.int64)

    def __init__(self, env_id: int = 0) -> None:
        super().__init__(env_id, self.EPISODE_LENGTH)

    def _observe(self) -> npt.NDArray[np.int64]:
        head = super()._observe()
        obs = np.full(self.SIZE, zlib.crc32(head.tobytes()), np.int64)
        obs[: len(head)] = head
        return obs


def head_of(obs: npt.NDArray[np.int64]) -> list[int] | None:
    """What an observation of `LargeEcho` begins with: env, steps, action, checksum; None where it is torn."""
    head: list[int] = obs[:4].tolist()
    return head if (obs[4:] == zlib.crc32(obs[:4].tobytes())).all() else None
