"""Programs that are forked from an interpreter which has imported what they need.

Starting an interpreter for a program with actors takes a quarter of a second of CPU time, and one for its fork server
as long again. A fork runs the program's code with the arguments, the environment, the directory, and the path that an
interpreter of its own would get; for its fork server see `nursery`. Programs run beside their caller, which writes to
them and reads from them meanwhile; a script runs to its end. The command `envactors` is such a script, too.
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
from pathlib import Path
from typing import NamedTuple

# What scripts import. There is another fork server for callers that have gymnasium.
OF_SCRIPTS = ("numpy", "envactors.vector_env", "envactors.backends.process", "gymnasium")

_SERVER = """
def serve():
    import contextlib, gc, importlib, json, os, select, signal, socket, sys

    own_path = sys.path[:]
    fd, sys.path[:], modules = json.loads(sys.argv[1])
    gc.disable()  # imports are faster
    for module in ("nursery", *modules):
        with contextlib.suppress(Exception):  # a test that needs the module reports the error
            importlib.import_module(module)
    # A collection in a fork would write to all of these objects, and so copy them.
    gc.freeze()
    gc.enable()
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
    code, sys.argv[1:], path, environment, directory = json.loads(request)
    sys.path[:] = path or own_path  # no path: that of this interpreter
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.modules["nursery"].fork_nursery()
    return code

# A program finds no names but its own, so that it must import what it uses.
code = serve()
del serve
exec(code)
"""


# A program that runs a script in its directory, with the path that an interpreter of its own would have.
_SCRIPT = """
def prepare():
    import os, sys

    script, keeps_server, *arguments = sys.argv[1:]
    for fd, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    if keeps_server:
        import envactors as ea

        ea.ProcessBackend().use({}).open()
    with open(script) as file:
        return script, compile(file.read(), script, "exec")

__file__, code = prepare()
del prepare
exec(code)
"""


class Done(NamedTuple):
    """How a script has ended."""

    returncode: int
    stdout: str
    stderr: str


class ForkedProgram:
    """What `subprocess.Popen` would be for a program.

    Args:
        pid: Its process id.
        stdin: A descriptor for its input.
        stdout: A descriptor for its output.
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
                    raise subprocess.TimeoutExpired("program", timeout)
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

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.kill()
        self.stdin.close()
        self.stdout.close()
        self.wait()


class ProgramServer:
    """Forks programs.

    Args:
        flags: Those of the interpreter.
        modules: The modules that programs may need.
    """

    def __init__(self, *flags, modules):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            orders = json.dumps([theirs.fileno(), sys.path, modules])
            command = [sys.executable, *flags, "-c", _SERVER, orders]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._requests = ours
        self._lock = threading.Lock()

    def run(self, script, arguments, directory, *, keeps_server=True):
        """Runs a script in a directory to its end."""
        arguments = [str(script), "keeps the server" if keeps_server else "", *arguments]
        with self.start(_SCRIPT, arguments, path=[], directory=directory) as program:
            program.stdin.close()
            code = program.wait()
        return Done(code, *((directory / name).read_text() for name in ("stdout", "stderr")))

    def start(self, code, arguments=(), environment=os.environ, *, path=None, directory=None):
        """Runs code in a fork, as `python -c` would; by default with the path and the directory of this process."""
        (stdin, to_stdin), (from_stdout, stdout), (from_status, status) = os.pipe(), os.pipe(), os.pipe()
        path, directory = sys.path if path is None else path, str(directory or Path.cwd())
        request = json.dumps([code, arguments, path, {**environment}, directory])
        with self._lock:
            socket.send_fds(self._requests, [request.encode()], [stdin, stdout, 2, status])
            pid = int(self._requests.recv(100))
        for fd in (stdin, stdout, status):
            os.close(fd)
        return ForkedProgram(pid, to_stdin, from_stdout, from_status)

    def close(self):
        self._requests.close()
        self._process.wait()
