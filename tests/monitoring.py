"""Programs that can be looked at, and clients of theirs, for the tests of the monitor."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from helpers import SOON

from envactors.observe import programs
from envactors.observe.addresses import path_of


def ask(request, pid=None, patience=SOON):
    return programs.ask(pid or os.getpid(), request, patience)


def take_snapshot(pid=None):
    return ask({"get": "snapshot"}, pid)


def connect():
    """Connect to the monitor of this process."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SOON)
    sock.connect(str(path_of(os.getpid())))
    return sock


def read_all(sock):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    return data


def monitor_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("envactors-monitor")]


@contextlib.contextmanager
def program(server, code, *arguments, **environment):
    """A program that runs until its input ends, and its first line."""
    with server.start(code, [*map(str, arguments)], {**os.environ, **environment}) as process:
        try:
            yield process, process.stdout.readline().strip()
            process.stdin.close()
            process.wait(SOON)
        finally:
            process.kill()
