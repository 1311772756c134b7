"""Functions that executors run in tests. Workers import this module, which therefore imports little."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

state = None
calls = 0


def set_state(value):
    global state
    state = value


def fill_state(size):
    set_state(b"1" * size)


def get_state():
    return state


def shut_down_state():
    state.shutdown()


def submit_to_state(count):
    """Return the count of calls that are left after so many calls, each of which makes the next one."""
    return count and state.submit(submit_to_state, count - 1).result()


def make_getter():
    return lambda: (state, calls)


def identity(value=None):
    return value


def keywords(*args, **kwargs):
    return args, kwargs


def add(one, other):
    return one + other


def pid():
    return os.getpid()


def count_calls():
    global calls
    calls += 1
    return calls


def divide(one, other):
    return one // other


def wait_for(path):
    """Wait until a file exists; return the process id."""
    while not Path(path).exists():
        time.sleep(0.002)
    return os.getpid()


def announce(here, path):
    """Create a file, and wait until another one exists."""
    Path(here).touch()
    return wait_for(path)


def append_line(path, line):
    with Path(path).open("a") as file:
        file.write(f"{line}\n")
    return line


def hang_in_c():
    """Hold the interpreter's lock for ever."""
    from envactors.testing import FAULTS

    FAULTS["hang_in_c"]()


def sleep_in_c(seconds=1000):
    ctypes.CDLL(None).sleep(seconds)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_at_once(code=3):
    os._exit(code)


def exit_politely():
    sys.exit(4)


def fail(text="no"):
    raise ValueError(text)


def start_stubborn_child(path, steps=()):
    """Start a grandchild that ignores SIGTERM and writes its pid, then hang.

    With the step "session" both leave the worker's session, with "fork" the child ends, and with "env" the grandchild
    gets no variables.
    """
    code = (
        "import signal, sys, time, os, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1] + '.part').write_text(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "time.sleep(1000)\n"
    )
    start = "Popen" if "fork" in steps else "run"
    options = f"start_new_session={'session' in steps}" + (", env={}" if "env" in steps else "")
    child = f"import subprocess, sys; subprocess.{start}([sys.executable, '-c', {code!r}, sys.argv[1]], {options})"
    subprocess.Popen([sys.executable, "-c", child, path], start_new_session="session" in steps)
    wait_for(path)
    sleep_in_c()


def allocate(count):
    return bytes(count)


def make_unpicklable():
    return (one for one in ())


class FalseError(Exception):
    """An exception that is false."""

    def __bool__(self):
        return False

    def __len__(self):
        return 0


def fail_falsely():
    raise FalseError("it is false")


class Explosive:
    """Does something when it is pickled, or when it is loaded."""

    def __init__(self, act, where):
        self.act, self.where = act, where

    def __reduce__(self):
        if self.where == "pickle":
            self.act()
        return (_act, (self.act, os.getpid())) if self.where == "load elsewhere" else (_Loaded, (self.act, self.where))


def _act(act, home):
    if os.getpid() != home:
        act()


class _Loaded:
    def __init__(self, act, where):
        if where == "load":
            act()


def explode_later(act, where):
    return Explosive(act, where)


def write_at_exit(path):
    atexit.register(Path(path).touch)
    return os.getpid()


class Marked:
    """Creates a file when it is freed in another process."""

    def __init__(self, path):
        self.path, self.home = path, os.getpid()

    def __del__(self):
        if os.getpid() != self.home:
            Path(self.path).touch()


def make_marked(path):
    marked = Marked(path)
    marked.home = 0
    return marked


def exit_if(data, exits):
    if exits:
        exit_at_once()
    return len(data)
