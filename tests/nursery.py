"""Fork servers that are forked from a process which has imported what they need.

Starting an interpreter for a fork server takes a fifth of a second of CPU time, and half a second or more where its
workers need modules of the tests. A process that was forked from a warm one forks a nursery before it does anything
else. The nursery becomes the first fork server that the process starts, with the descriptors, the environment, the
path, and the directory that this would have. Later ones, and those of other interpreters, are started afresh.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

from envactors.process import fork_server
from envactors.process.fork_server_program import serve_forks
from envactors.system.processes import await_exit, end_with_parent

_LONGEST = 1 << 20  # bytes


class ForkedServer:
    """What `subprocess.Popen` would be for a fork server."""

    def __init__(self, pid):
        self.pid = pid
        self.returncode = None
        self._lock = threading.Lock()

    def wait(self):
        with self._lock:
            if self.returncode is None:
                self.returncode = await_exit(self.pid) or 0
        return self.returncode

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """A process that waits until it is needed as a fork server, and ends with this one."""

    def __init__(self):
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._start_python = fork_server.start_python
        self._lock = threading.Lock()
        caller = os.getpid()
        # The thread that starts a fork server blocks all signals, too.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._pid = os.fork()
        if self._pid == 0:
            requests.close()
            end_with_parent(caller)
            _become_fork_server(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        # A number alone, since nobody closes it if this process starts no fork server.
        self._requests = requests.detach()

    def start_python(self, module, function, boot, fds, env, python):
        """Does what `envactors.process.starting.start_python` does."""
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
        return ForkedServer(pid)


def _become_fork_server(requests):
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with requests:
        request, fds, _, _ = socket.recv_fds(requests, _LONGEST, 4)
    if not request:
        os._exit(0)
    boot, environment, sys.path[:], sys.argv[:], directory = json.loads(request)
    for fd, source in zip((1, 2), fds[2:], strict=True):
        os.dup2(source, fd)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    serve_forks(**{**boot, "requests": fds[0], "exits": fds[1]})


def fork_nursery():
    """Has the first fork server of this process be a fork of it, as it is now."""
    fork_server.start_python = Nursery().start_python
