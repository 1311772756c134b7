"""An env that leaves processes behind in all ways. Workers import this module."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory

import envactors as ea

PYTHON = [sys.executable, "-I", "-S", "-c"]
SLEEP = "import time; print(flush=True); time.sleep(1000)"
# Starts a program in a session of its own and ends, so that nobody can tell any more who has started that one.
DAEMON = f"""
import os, subprocess
command = {[*PYTHON, SLEEP]!r}
print(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True)
os._exit(0)
"""


class Breeder:
    """Each method starts processes that stay, and gives their ids."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen] = []

    def plain(self, **options):
        child = subprocess.Popen([*PYTHON, SLEEP], stdout=subprocess.PIPE, **options)
        child.stdout.readline()
        self.children.append(child)
        return [child.pid]

    def daemon(self):
        return [int(subprocess.run([*PYTHON, DAEMON], stdout=subprocess.PIPE, check=True).stdout)]

    def multiprocess(self):
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        return [process.pid]

    def copies(self):
        return [copy(), copy(os.setsid), copy(os.setsid, go_on_as_a_copy)]

    def of_all_kinds(self):
        return [
            *self.plain(),
            *self.plain(start_new_session=True),
            *self.plain(env={}),
            *self.daemon(),
            *self.multiprocess(),
            *self.copies(),
        ]

    def nest(self, method):
        """An actor of this worker's own, with children of its own."""
        self.inner = ea.spawn(Breeder, backend=ea.ProcessBackend(start_method=method))
        return [*self.inner.of_all_kinds().result(30), self.inner.pid]

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
