"""Helper processes that are forked from a process which has imported what they need.

Starting an interpreter for a helper takes a fifth of a second of CPU time, and half a second or more where its
workers need modules of the tests. A process that was forked from a warm one forks a nursery before it does anything
else. The nursery becomes the first helper that the process starts, with the descriptors, the environment, the
path, and the directory that this would have. Later ones, and those of other interpreters, are started afresh.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

from envactors.process import helper, helper_program
from envactors.system.processes import end_with_parent

_LONGEST = 1 << 20  # bytes
_MOST_FDS = 5  # those of a helper with a lease, its stdout, and its stderr


class ForkedHelper(subprocess.Popen):
    """A `subprocess.Popen` of a process that was forked before."""

    def __init__(self, pid):
        self._execute_child = lambda *_: None
        super().__init__([])
        self.pid = pid
        self._child_created = True


class Nursery:
    """A process that waits until it is needed as a helper, and ends with this one."""

    def __init__(self):
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._start_python = helper.start_python
        self._lock = threading.Lock()
        caller = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until it is a helper
        self._pid = os.fork()
        if self._pid == 0:
            requests.close()
            end_with_parent(caller)
            _become_helper(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        # A number alone, since nobody closes it if this process starts no helper.
        self._requests = requests.detach()

    def start_python(self, module, function, boot, fds, env, python):
        """Does what `envactors.system.interpreters.start_python` does."""
        with self._lock:
            pid = self._pid
            if python is None:
                self._pid = None
        if python is not None or pid is None:
            return self._start_python(module, function, boot, fds, env, python)
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109
        request = json.dumps([boot, {**env}, path, sys.argv, os.getcwd()]).encode()  # noqa: PTH109
        with socket.socket(fileno=self._requests) as requests:
            socket.send_fds(requests, [request], [*fds, 1, 2])
        return ForkedHelper(pid)


def _become_helper(requests):
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with requests:
        request, fds, _, _ = socket.recv_fds(requests, _LONGEST, _MOST_FDS)
    if not request:
        os._exit(0)
    boot, environment, sys.path[:], sys.argv[:], directory = json.loads(request)
    for fd in (2, 1):
        source = fds.pop()
        os.dup2(source, fd)
        os.close(source)
    # The descriptors that the boot names have other numbers here.
    names = [name for name in ("requests", "exits", "lease") if boot[name] is not None]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    helper_program.main(**{**boot, **dict(zip(names, fds, strict=True))})


def fork_nursery():
    """Has the first helper of this process be a fork of it, as it is now."""
    helper.start_python = Nursery().start_python
