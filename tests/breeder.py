"""An env that leaves processes behind in all ways, and what it takes to see them end. Workers import this module."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing import shared_memory

import psutil

import envactors as ea
from envactors.process import reaper

AT_MOST = 5.0  # seconds, promised

# Starts a program in a session of its own and ends, so that nobody can tell any more who has started that one.
DAEMON = "setsid sleep 1000 >/dev/null & echo $!"
# Starts one that shows nothing of where it is from, and stays.
SECRETIVE = "env -i setsid sleep 1000 >/dev/null & echo $!; wait"
# Starts one like that, and ends.
ESCAPE = "env -i setsid sleep 1000 >/dev/null & echo $!"


class Breeder:
    """Each method starts processes that stay, and gives their ids."""

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
        """One without environment, group, session, and parent of the worker's."""
        return [int(subprocess.run(["sh", "-c", ESCAPE], stdout=subprocess.PIPE, check=True, env={}).stdout)]

    def short_lived(self):
        """One whose parent has ended, and which ends by itself."""
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
        """Forked, without a program of their own, and not in the worker's group: only their environment tells."""
        return [copy(os.setsid), copy(os.setsid, go_on_as_a_copy)]

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
        """An actor of this worker's own, with children of its own."""
        self.inner = ea.spawn(Breeder, backend=ea.ProcessBackend(start_method=method))
        return [*self.inner.of_all_kinds(hidden).result(30), self.inner.pid]

    def share_memory(self):
        """Memory that has a name, which multiprocessing's resource tracker removes in the end; gives the name."""
        self.memory = shared_memory.SharedMemory(create=True, size=100)
        return self.memory.name

    def hang_in_c(self):
        collections.deque(itertools.repeat(0), maxlen=0)

    def exit_now(self):
        os._exit(3)


def copy(*steps):
    """Forks a copy of this process that goes through these steps and stays; gives the id of the last one."""
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
    """Each process has ended in time; a pid that is used again is another one's to psutil."""
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


def reapers_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if reaper.__file__ in child.cmdline():
                found.append(child)
    return found


def helpers_of(pid: int, name: str) -> list[psutil.Process]:
    """Returns the helper processes of a caller with this word in their command lines."""
    caller = psutil.Process(pid)
    own = caller.cmdline()
    found = []
    for child in caller.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            # Until it executes its program, a child has the command line of its parent, which may name all helpers.
            if is_there(child) and command != own and name in " ".join(command):
                found.append(child)
    return found
