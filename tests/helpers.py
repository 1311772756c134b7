"""Envs and utilities of the tests.

Workers import this module. They should not have to import pytest, which takes as long as an interpreter's start.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from budget import LONG

import envactors as ea
from envactors.process.starting import THREAD_CAPS
from envactors.system.choice import PORTABLE
from envactors.testing import FAULTS, EchoEnv, FaultyEnv

SOON = 50.0  # seconds that anything may take on a busy machine; only something that hangs takes longer


class _SessionBackend(ea.ProcessBackend):
    """Shares one fork server that imports the tests' modules among the actors of this process.

    Modules of the tests read no environment variables when they are imported, so actors with variables share it, too;
    elsewhere each mapping has a server when anything is preloaded. A forked child starts its own server, which imports
    none of the tests' modules, since that takes seconds of a core.
    """

    home = os.getpid()

    def _settings(self, env_vars):
        if os.getpid() != self.home or not env_vars.keys().isdisjoint(THREAD_CAPS):
            return _PLAIN._settings(env_vars)
        return super()._settings({})


_PLAIN = ea.ProcessBackend() if PORTABLE else ea.ProcessBackend(preload=("helpers",))
# For tests that end many processes, and to which it does not matter how these start: an interpreter costs more than
# a tenth of a second of a core, a worker of this one server a few milliseconds. The server lasts as long as the tests.
# Where there are no fork servers, these are fresh interpreters, and the tests take much longer.
FORK_SERVER = _SessionBackend()
START_METHODS = ["loky"] if PORTABLE else ["loky", "forkserver"]
# Seconds within which a process has begun to make its env, on a machine that is not too busy.
UP = 1.5 if PORTABLE else 0.5


def fork_server(**traits):
    """The session's fork server with other traits."""
    made = copy.copy(FORK_SERVER)
    made.traits = dataclasses.replace(made.traits, **traits)
    return made


@contextlib.contextmanager
def kept_fork_server(env_vars):
    """Keeps the session's fork server for actors with these variables, which ends with the last of them otherwise."""
    use = FORK_SERVER.use(env_vars)
    use.open()
    # The server ends with the thread that it was started by: that must be this one, and not one of an engine.
    first = use.start("first", None, 1)
    first.kill()
    select.select([first.sentinel], [], [])
    first.reap()
    yield
    use.close()


def promised(seconds: float) -> float:
    """The seconds that something may take: what is promised for an idle machine in long runs, and more in others."""
    return seconds if LONG else seconds + 20


def episode_seed(root, number):
    """The seed of an episode, from that of the reset that is number 0; as the formula in the documentation has it."""
    return root if number == 0 else int(np.random.SeedSequence(root, spawn_key=(0, number)).generate_state(1)[0])


class Counter:
    """An env without spaces, with methods for everything that tests do in a worker."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.closed_file: str | None = None

    def add(self, n: int = 1) -> int:
        self.count += n
        return self.count

    def echo(self, *args, **kwargs):
        return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args

    def make(self, size: int) -> bytes:
        return bytes(size)

    def take(self, payload: bytes) -> int:
        return len(payload)

    def pid(self) -> int:
        return os.getpid()

    def context(self):
        return ea.current_actor()

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def wait_for_file(self, path: str) -> str:
        while not Path(path).exists():
            time.sleep(0.005)
        return path

    def touch_then_wait(self, touched: str, path: str) -> str:
        Path(touched).touch()
        return self.wait_for_file(path)

    def touch(self, path: str) -> None:
        with Path(path).open("a") as file:
            file.write("x")

    def touch_on_close(self, path: str) -> None:
        self.closed_file = path

    def hang_in_c(self, touched: str | None = None) -> None:
        if touched is not None:
            Path(touched).touch()
        FAULTS["hang_in_c"]()

    def fail(self, kind, *args):
        raise kind(*args)

    def exit_now(self, code: int) -> None:
        os._exit(code)

    def die(self, signum: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), signum)
        time.sleep(SOON)

    def die_unless(self, path: str) -> str:
        """Crashes the first time, and leaves a mark so that it does not crash again."""
        if not Path(path).exists():
            Path(path).touch()
            os._exit(7)
        return "alive"

    def segfault(self) -> None:
        ctypes.string_at(0)

    def complain(self, *lines: str) -> None:
        for line in lines:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.closed_file is not None:
            Path(self.closed_file).touch()


class Mortal(Counter):
    """Prints to stderr, and then ends its process in the way that is requested."""

    def end(self, how):
        print("last words", file=sys.stderr)
        if how == "kill":
            self.die()
        elif how == "segfault":
            self.segfault()
        os._exit(3)


class Echo:
    """An env without spaces whose results say which call produced them; `wants` says how to misbehave."""

    def __init__(self, index: int = 0, length: int = 1000) -> None:
        self.index = index
        self.length = length
        self.count = 0
        self.seeds: list[object] = []
        self.wants: tuple[str, object] | None = None

    def reset(self, *, seed=None, options=None):
        self.count = 0
        self.seeds.append(seed)
        if self.wants is not None and self.wants[0] == "sleep in reset":
            time.sleep(self.wants[1])
        return self._obs(-1), {"seed": seed, "options": options}

    def step(self, action):
        wants, self.wants = self.wants, None
        if wants is not None:
            what, argument = wants
            if what == "sleep":
                time.sleep(argument)
            elif what == "raise":
                kind, *arguments = argument
                raise kind(*arguments)
            elif what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "wait":
                while not os.path.exists(argument):  # noqa: PTH110
                    time.sleep(0.002)
            elif what == "return":
                return argument
        self.count += 1
        return self._obs(action), float(self.count), self.count >= self.length, False, {"count": self.count}

    def _obs(self, action):
        return np.array([self.index, self.count, action], np.float64)

    def render(self):
        return f"frame {self.index}"


class FaultyEcho(FaultyEnv):
    """A faulty echo env with more faults."""

    def fail(self, kind, *args):
        raise kind(*args)

    def get_lock(self):
        return threading.Lock()

    def environ(self, name):
        return os.environ.get(name)

    def context(self):
        return ea.current_actor()


class Placed(FaultyEcho):
    """A faulty echo env that identifies itself in each result; its `close` appends a letter to a file."""

    def __init__(self, closed=None):
        super().__init__()
        self.made_as = dataclasses.astuple(ea.current_actor())
        self.closed_file = closed

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs, {**info, "who": dataclasses.astuple(ea.current_actor())}

    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "who": dataclasses.astuple(ea.current_actor())}

    def get_made_as(self):
        return self.made_as

    def close(self):
        if self.closed_file is not None:
            with self.closed_file.open("a") as file:
                file.write("x")


class PacedEnv(EchoEnv):
    """Steps at a steady pace; its reset waits while a file exists, and it hangs on request."""

    PACE = 0.002  # seconds a step: the envs are the limit, not this machine

    def __init__(self, env_id, blocked):
        super().__init__(env_id)
        self.blocked = blocked
        self.hangs = False

    def step(self, action):
        time.sleep(self.PACE)
        while self.hangs:
            # In C, and with the interpreter's lock held: PyDLL keeps it. A loop that computes would also take one of
            # the machine's cores, and then it is the machine that the test measures.
            ctypes.PyDLL(None).sleep(1000)
        return super().step(action)

    def reset(self, **kwargs):
        wait_while(self.blocked)
        return super().reset(**kwargs)


def clocked(kind, path, pace=0.005):
    """Return a subclass of an env that records when it steps and resets, and takes a moment longer."""

    class Clocked(kind):
        is_inside = False

        def reset(self, *args, **kwargs):
            with self.clock():
                return super().reset(*args, **kwargs)

        def step(self, *args, **kwargs):
            with self.clock():
                return super().step(*args, **kwargs)

        @contextlib.contextmanager
        def clock(self):
            if self.is_inside:  # a step that resets
                yield
                return
            self.is_inside, begin = True, time.monotonic()
            time.sleep(pace)
            yield
            self.is_inside = False
            with Path(path).open("a") as file:
                file.write(f"{begin!r} {time.monotonic()!r}\n")

    return Clocked


def most_at_once(path):
    """Return the largest number of clocked envs that stepped or reset at once."""
    intervals = [[float(time) for time in line.split()] for line in Path(path).read_text().splitlines()]
    changes = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
    return max(itertools.accumulate(change for _, change in changes))


class FixedWait:
    """Replaces a `WaitTuner`: always the same strategy."""

    def __init__(self, strategy) -> None:
        self.strategy = strategy
        self.recorded = 0.0

    def record(self, seconds: float, now: float) -> None:
        self.recorded = now


def wait_always(envs: ea.VectorEnv, strategy) -> None:
    """Has the caller and the workers of a vector wait for each other with one strategy."""
    envs._engine._spin.enabled = strategy == "spin"


def frozen(value):
    """An object that compares by value and type."""
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *(frozen(inner) for inner in value)]
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), value.shape, value.tolist()
    return value


def wait_while(path):
    path.with_suffix(".seen").touch()
    while path.exists():
        time.sleep(0.02)


def park():
    threading.Event().wait(100)


class TwoArguments(Exception):
    """An exception that pickle alone cannot rebuild: its __init__ takes two arguments."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Unpicklable(Exception):
    """An exception whose state does not pickle."""

    def __init__(self) -> None:
        super().__init__("no way out")
        self.lock = threading.Lock()


class Frozen(Exception):
    """An exception that refuses assignments."""

    def __setattr__(self, name, value):
        raise AttributeError(f"cannot assign {name}")


class MuteError(Exception):
    """An exception without a text."""

    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __repr__


class ExitsOnArrival:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return sys.exit, (3,)


class ExplodesOnArrival:
    """Pickles well and raises when it is unpickled in a process other than the one that made it."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __reduce__(self):
        return _explode, (self.home,)


def _explode(home: int):
    if os.getpid() != home:
        raise RuntimeError("boom on arrival")
    return ExplodesOnArrival()


def wait_until(condition, patience: float = SOON) -> None:
    """Wait for a condition that has no event."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def wait_for_path(path: Path) -> None:
    wait_until(path.exists)


class Gated(EchoEnv):
    """An env whose steps wait for a file."""

    def __init__(self, env_id, path):
        super().__init__(env_id)
        self.path = path

    def step(self, action):
        wait_for_path(self.path)
        return super().step(action)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_script(code: str, *args: str, timeout: float = 100, **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user would, warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **kwargs,
    )


def journals(actor):
    """Return the requests to an actor's envs that led to their current states."""
    envs = actor._actor.tenant
    return [envs.table.journals.flushed(index) for index in envs.indices]
