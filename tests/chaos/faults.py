"""Faults that are armed from outside and happen once, even if their process is replaced."""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import json
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

from envactors.testing import FAULTS, EchoEnv, Space

CHILD_SECONDS = 1000  # run time of a child that is left running


class FaultKind(enum.Enum):
    """Kinds of fault."""

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
    """Points of an env's life at which a fault can happen."""

    FACTORY = 0
    RESET = 1
    STEP = 2


class ArmedFault(NamedTuple):
    """A fault that waits in the table.

    Attributes:
        kind: What happens.
        seconds: Duration of a sleep.
        visit: The point at which it happens, as `FiredFault.visit`; 0 for the next time.
    """

    kind: FaultKind
    seconds: float = 0.0
    visit: int = 0


class FiredFault(NamedTuple):
    """A fault that has happened.

    Attributes:
        kind: What has happened.
        env_id: To which env.
        place: Where.
        pid: In which process.
        visit: A checksum over the last seed of the env and the numbers of its resets and steps since; never 0.
    """

    kind: FaultKind
    env_id: int
    place: Place | None
    pid: int
    visit: int


_KINDS = list(FaultKind)
# Index of the word after those of the places: the pid of the last child that was left running.
_CHILD = len(Place)
# Index of the word with the visit at which the armed fault happens.
_VISIT = _CHILD + 1
_WORDS = _VISIT + 1


class FaultTable:
    """Armed faults of all envs, in a file that is mapped by the caller and the workers.

    A fault is removed from the table before it happens. It therefore happens once, even if a new process replays the
    same actions.

    Args:
        path: Path of the file.
        num_envs: Number of envs.
    """

    def __init__(self, path: str, num_envs: int) -> None:
        self.path = path
        self.num_envs = num_envs
        with open(path, "r+b") as file:  # noqa: PTH123
            self._map = mmap.mmap(file.fileno(), 8 * _WORDS * num_envs)
        self._words = memoryview(self._map).cast("q")
        self._log = f"{path}.log"

    @classmethod
    def make(cls, num_envs: int) -> FaultTable:
        """Create the file; `remove` deletes it."""
        file, path = tempfile.mkstemp(prefix="envactors-chaos-")
        os.write(file, bytes(8 * _WORDS * num_envs))
        os.close(file)
        table = cls(path, num_envs)
        os.close(os.open(table._log, os.O_CREAT))
        return table

    def remove(self) -> None:
        """Unmap and delete the file."""
        self._words.release()
        self._map.close()
        os.unlink(self.path)  # noqa: PTH108
        os.unlink(self._log)  # noqa: PTH108

    def arm(self, env_id: int, place: Place, armed: ArmedFault) -> None:
        """Arm a fault for the next time that the env is at a place."""
        milliseconds = round(armed.seconds * 1000)
        self._words[_WORDS * env_id + _VISIT] = armed.visit
        self._words[_WORDS * env_id + place] = milliseconds * 256 + _KINDS.index(armed.kind) + 1

    def disarm(self, env_id: int) -> None:
        """Remove the armed faults of an env."""
        for place in Place:
            self._words[_WORDS * env_id + place] = 0

    def is_armed(self, env_id: int, place: Place) -> bool:
        """Return whether a fault is armed and has not happened yet."""
        return self._words[_WORDS * env_id + place] != 0

    def take_fault(self, env_id: int, place: Place, visit: int) -> ArmedFault | None:
        """Remove and return the armed fault, or None if there is none for this visit."""
        index = _WORDS * env_id + place
        if self._words[_WORDS * env_id + _VISIT] not in (0, visit):
            return None
        word, self._words[index] = self._words[index], 0
        return ArmedFault(_KINDS[word % 256 - 1], word // 256 / 1000) if word else None

    def kill(self, env_id: int, pid: int) -> None:
        """Kill the process of an env from outside, and record that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.record_fired(FiredFault(FaultKind.KILL_IDLE, env_id, None, pid, 1))

    def record_fired(self, fault: FiredFault) -> None:
        """Record a fault that is about to happen."""
        name = None if fault.place is None else fault.place.name
        line = json.dumps([fault.kind.value, fault.env_id, name, fault.pid, fault.visit])
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{line}\n".encode())
        os.close(file)

    def fired(self) -> list[FiredFault]:
        """Return the faults that have happened."""
        with open(self._log) as file:  # noqa: PTH123
            lines = [json.loads(line) for line in file]
        return [
            FiredFault(FaultKind(kind), env_id, place and Place[place], *rest) for kind, env_id, place, *rest in lines
        ]

    def record_child(self, env_id: int, pid: int) -> None:
        """Record a child process that an env has left running."""
        self._words[_WORDS * env_id + _CHILD] = pid

    def take_child(self, env_id: int) -> int:
        """Return and clear the pid of the child that an env has left running; 0 if there is none."""
        index = _WORDS * env_id + _CHILD
        pid, self._words[index] = self._words[index], 0
        return pid


class FaultInjectingEnv:
    """Wrapper that runs the faults armed for its env; all other attributes are those of the wrapped env.

    Args:
        factory: Makes the env.
        path: Path of the fault table.
        num_envs: Number of envs in the table.
        env_id: Index of this env.
    """

    def __init__(self, factory: Callable[[], Any], path: str, num_envs: int, env_id: int) -> None:
        self._fault_table = FaultTable(path, num_envs)
        self._env_id = env_id
        self._seed: int | None = None
        self._visits = [0] * len(Place)
        self._run_armed_fault(Place.FACTORY, None, {})
        self.env = factory()

    def step(self, action: Any) -> Any:
        """Step the wrapped env, then run the armed fault, if any."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs, info = self._run_armed_fault(Place.STEP, obs, info)
        return obs, reward, terminated, truncated, info

    def reset(self, **kwargs: Any) -> Any:
        """Reset the wrapped env, then run the armed fault, if any."""
        if kwargs.get("seed") is not None:
            self._seed = kwargs["seed"]
            self._visits = [0] * len(Place)
        obs, info = self.env.reset(**kwargs)
        return self._run_armed_fault(Place.RESET, obs, info)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def _run_armed_fault(self, place: Place, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._visits[place] += 1
        visit = zlib.crc32(repr((self._seed, self._visits)).encode()) or 1
        armed = self._fault_table.take_fault(self._env_id, place, visit)
        if armed is None:
            return obs, info
        self._fault_table.record_fired(FiredFault(armed.kind, self._env_id, place, os.getpid(), visit))
        faulthandler.disable()  # its output would disturb the live view
        if armed.kind is FaultKind.UNPICKLABLE:
            return obs, {**info, "lock": threading.Lock()}
        if armed.kind is FaultKind.KILL_WRITING:
            _die_when_the_interpreter_is_free()
            return obs, info
        if armed.kind is FaultKind.BUS_WRITING and (half := _half_there(obs)) is not obs:
            return half, info
        if armed.kind is FaultKind.CHILD:
            self._leave_a_child()
        if armed.kind is FaultKind.SLEEP:
            time.sleep(armed.seconds)
            return obs, info
        FAULTS[_NAMES.get(armed.kind, "crash")]()
        return obs, info

    def _leave_a_child(self) -> None:
        code = f"import time; time.sleep({CHILD_SECONDS})"
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, self._fault_table.path])  # its own
        self._fault_table.record_child(self._env_id, child.pid)


_NAMES = {
    FaultKind.STOP: "stop",
    FaultKind.HANG: "hang_in_c",
    FaultKind.EXCEPTION: "raise",
    FaultKind.EXIT: "exit",
    FaultKind.SEGFAULT: "segfault",
}
"""Keys of `envactors.testing.FAULTS` by kind; all other kinds end with a SIGKILL."""


def _die_when_the_interpreter_is_free() -> None:
    """Start a thread that kills this process as soon as the main thread releases the GIL.

    NumPy releases it while it copies, so the process crashes with the observation partly written, or just after.
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
    """Return the observation with memory for the first half of its first array only; reading on raises SIGBUS."""
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
    # A stride of two, since contiguous memory may be copied from its end.
    wide = np.stack([value, value], axis=-1)
    data = wide.tobytes()
    half = value.size // 2 * 2 * wide.itemsize
    end = -(-max(half, 1) // mmap.PAGESIZE) * mmap.PAGESIZE  # of what there is memory for
    start = end - half
    with tempfile.TemporaryFile() as file:
        file.truncate(end + len(data))
        memory = mmap.mmap(file.fileno(), 0)
        memory[start:end] = data[:half]
        file.truncate(end)
    there: npt.NDArray[Any] = np.ndarray(wide.shape, wide.dtype, memory, offset=start)
    return there[..., 0]


class LargeEcho(EchoEnv):
    """Echo env with a large observation, filled with a checksum that exposes a mix of two writes.

    Args:
        env_id: Number shown in the observations.
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
    """Return env, steps, action and checksum of a `LargeEcho` observation, or None if it mixes two writes."""
    head: list[int] = obs[:4].tolist()
    return head if (obs[4:] == zlib.crc32(obs[:4].tobytes())).all() else None
