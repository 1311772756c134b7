"""An env that leaves processes behind in every way, and functions that watch them end. Workers import this module."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing import shared_memory

import psutil

import envactors as ea
from envactors.testing import FAULTS

AT_MOST = 5.0  # the promised limit, in seconds

# Starts a program in a new session and exits, so that the program's parent is unknown.
DAEMON = "setsid sleep 1000 >/dev/null & echo $!"
# Starts one without any trace of its origin, and keeps running.
SECRETIVE = "env -i setsid sleep 1000 >/dev/null & echo $!; wait"
# Starts such a program, and exits.
ESCAPE = "env -i setsid sleep 1000 >/dev/null & echo $!"


class Breeder:
    """Each method starts processes that keep running, and returns their ids."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []

    def plain(self, **options):
        child = subprocess.Popen(["sleep", "1000"], **options)
        self.children.append(child)
        return [child.pid]

    def daemon(self):
        return [int(subprocess.run(["sh", "-c", DAEMON], stdout=subprocess.PIPE, check=True).stdout)]

    def secretive(self):
        child = subprocess.Popen(["sh", "-c", SECRETIVE], stdout=subprocess.PIPE)
        self.children.append(child)
        return [child.pid, int(child.stdout.readline())]

    def escape(self):
        """Start one that shares neither environment, group, session, nor parent with the worker."""
        return [int(subprocess.run(["sh", "-c", ESCAPE], stdout=subprocess.PIPE, check=True, env={}).stdout)]

    def short_lived(self):
        """Start one whose parent has ended; it ends by itself."""
        subprocess.run(["sh", "-c", "env -i setsid sleep 0.01 >/dev/null &"], check=True)

    def getpid(self):
        return os.getpid()

    def multiprocess(self):
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        return [process.pid]

    def copies(self):
        return [copy()]

    def hidden_copies(self):
        """Fork processes that execute no program and leave the worker's group: only the environment tells."""
        return [copy(os.setsid), copy(os.setsid, go_on_as_a_copy)]

    def of_own_group(self):
        """Start processes that stay in the worker's process group."""
        return [*self.plain(), *self.plain(env={}), *self.stubborn(), *self.multiprocess(), *self.copies()]

    def stubborn(self):
        """Start one that ignores SIGTERM."""
        return self.plain(preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))

    def of_all_kinds(self, hidden=True):
        return [
            *self.plain(),
            *self.plain(start_new_session=True),
            *self.plain(env={}),
            *self.daemon(),
            *self.secretive(),
            *self.multiprocess(),
            *self.copies(),
            *(self.hidden_copies() if hidden else ()),
        ]

    def nest(self, method, hidden=True):
        """Start an actor in this worker that has children, too."""
        self.inner = ea.spawn(Breeder, backend=ea.ProcessBackend(start_method=method))
        return [*self.inner.of_all_kinds(hidden).result(30), self.inner.pid]

    def share_memory(self):
        """Create named shared memory, which multiprocessing's resource tracker removes at the end; return the name."""
        self.memory = shared_memory.SharedMemory(create=True, size=100)
        return self.memory.name

    def hang_in_c(self):
        FAULTS["hang_in_c"]()

    def exit_now(self):
        os._exit(3)


def copy(*steps):
    """Fork a copy of this process that performs these steps and keeps running; return the id of the last one."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            for step in steps:
                step()
            os.write(writer, str(os.getpid()).encode())
            signal.pause()
        finally:
            os._exit(0)
    pid = int(os.read(reader, 100))
    os.close(writer)
    os.close(reader)
    return pid


def go_on_as_a_copy():
    if os.fork() > 0:
        os._exit(0)


def assert_gone(doomed, seconds: float = AT_MOST) -> None:
    """Check that each process has ended in time; psutil recognizes a reused pid."""
    deadline = time.monotonic() + seconds
    while left := [process for process in doomed if is_there(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


def helpers_of(pid: int, name: str = "helper_program") -> list[psutil.Process]:
    """Return the children of a caller whose command lines contain this word: by default its helper processes."""
    caller = psutil.Process(pid)
    own = caller.cmdline()
    found = []
    for child in caller.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            # Until it executes its program, a child has the command line of its parent, which may contain the word.
            if is_there(child) and command != own and name in " ".join(command):
                found.append(child)
    return found
