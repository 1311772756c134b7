"""Envs and small tools of the tests."""

from __future__ import annotations

import collections
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil

import envactors as ea

SOON = 10.0  # seconds that anything may take on a busy machine

# For tests that end many processes, and to which it does not matter how these start: an interpreter costs more than
# a tenth of a second of a core, a worker of this one server a few milliseconds. The server lasts as long as the tests.
FORK_SERVER = ea.ProcessBackend(start_method="forkserver")


class Counter:
    """An env without spaces; everything that a test may want from a worker."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.closed_file: str | None = None

    def add(self, n: int = 1) -> int:
        self.count += n
        return self.count

    def echo(self, *args, **kwargs):
        return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args

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
        collections.deque(itertools.repeat(0), maxlen=0)

    def fail(self, kind, *args):
        raise kind(*args)

    def exit_now(self, code: int) -> None:
        os._exit(code)

    def die(self, signum: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), signum)
        time.sleep(SOON)

    def die_unless(self, path: str) -> str:
        """Dies the first time, leaves a mark, and lives from then on."""
        if not Path(path).exists():
            Path(path).touch()
            os._exit(7)
        return "alive"

    def segfault(self) -> None:
        import ctypes

        ctypes.string_at(0)

    def complain(self, *lines: str) -> None:
        for line in lines:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.closed_file is not None:
            Path(self.closed_file).touch()


class TwoArguments(Exception):
    """An exception that does not survive pickle's own way: its __init__ wants two arguments."""

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


class ExitsOnArrival:
    """Ends the program of whoever unpickles it."""

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
    """Waits for something that has no event of its own."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def wait_for_path(path: Path) -> None:
    wait_until(path.exists)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_script(code: str, *args: str, timeout: float = 40.0, **kwargs) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user would, warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **kwargs,
    )
