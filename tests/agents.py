"""Node agents that are forked from an interpreter which has imported what they need.

Starting an interpreter for an agent takes a quarter of a second of CPU time, and one for its fork server as long again,
or twice as long where workers need modules of the tests. The forks run the agent's own main function, with the
descriptors, the environment, the directory, and the path that they would get from their caller; for fork servers see
`nursery`. `quick_agents` puts them in the place of the agents of `LocalNodes`; tests of how agents start have fresh
ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

_SERVER = """
def serve():
    import contextlib, gc, importlib, json, os, select, signal, socket, sys

    fd, sys.path[:], modules = json.loads(sys.argv[1])
    for module in ("envactors.remote.agent", "nursery", *modules):
        with contextlib.suppress(Exception):  # a test that needs the module reports the error
            importlib.import_module(module)
    # A collection in a fork would write to all of these objects, and so copy them.
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=fd)
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    statuses = {}
    while True:
        ready = select.select([requests, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 1 << 12)
            while statuses and (exited := os.waitpid(-1, os.WNOHANG))[0]:
                status = statuses.pop(exited[0])
                os.write(status, b"%d" % os.waitstatus_to_exitcode(exited[1]))
                os.close(status)
        if requests not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not request:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            break
        statuses[pid] = fds.pop()
        for fd in fds:
            os.close(fd)
        requests.send(b"%d" % pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    for fd in (ended, wake, fds.pop(), *statuses.values()):
        os.close(fd)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.path[:], environment, directory = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.modules["nursery"].fork_nursery()

serve()
from envactors.remote.agent import main
main()
"""


class ForkedAgent:
    """What `subprocess.Popen` would be for an agent.

    Args:
        pid: Its process id.
        stdin: A descriptor for its orders.
        stdout: A descriptor for its answer.
        status: A descriptor from which its exit code can be read once it has ended.
    """

    def __init__(self, pid, stdin, stdout, status):
        self.pid = pid
        self.stdin = open(stdin, "w")  # noqa: PTH123, SIM115
        self.stdout = open(stdout)  # noqa: PTH123, SIM115
        self.returncode = None
        self._status = open(status, "rb")  # noqa: PTH123, SIM115
        self._lock = threading.Lock()

    def wait(self, timeout=None):
        """Returns the exit code, or raises `subprocess.TimeoutExpired`."""
        with self._lock:
            if self.returncode is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("agent", timeout)
                with self._status as status:
                    self.returncode = int(status.read())
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class AgentServer:
    """Forks agents.

    Args:
        modules: The modules that workers may need.
    """

    def __init__(self, modules):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            orders = json.dumps([theirs.fileno(), sys.path, modules])
            command = [sys.executable, "-c", _SERVER, orders]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._requests = ours
        self._lock = threading.Lock()

    def start_agent(self, orders):
        """Does what `envactors.remote.starting.start_agent` does."""
        (stdin, to_stdin), (from_stdout, stdout), (from_status, status) = os.pipe(), os.pipe(), os.pipe()
        request = json.dumps([sys.path, {**os.environ}, os.getcwd()]).encode()  # noqa: PTH109
        with self._lock:
            socket.send_fds(self._requests, [request], [stdin, stdout, 2, status])
            pid = int(self._requests.recv(100))
        for fd in (stdin, stdout, status):
            os.close(fd)
        agent = ForkedAgent(pid, to_stdin, from_stdout, from_status)
        agent.stdin.write(json.dumps(orders._asdict(), default=os.fspath) + "\n")
        agent.stdin.flush()
        return agent

    def close(self):
        self._requests.close()
        self._process.wait()
