"""The fork server: a process that has imported what envs need, and forks workers on request."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket

from envactors import system
from envactors.worker.bootstrap import Descriptors, run_forked

_PRELOADED = ("numpy", "gymnasium")


def serve_forks(channel: int, parent_pid: int, preload: list[str]) -> None:
    """Fork workers until the other end of the channel is closed.

    Args:
        channel: The descriptor of a packet socket; each request and each answer is one packet.
        parent_pid: The caller's process id.
        preload: Further modules to import.
    """
    system.die_with_parent(parent_pid)
    os.setpgid(0, 0)
    system.leave_terminal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (*_PRELOADED, *preload):
        with contextlib.suppress(Exception):  # an env that needs a module that fails to import raises the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # workers share these objects copy-on-write; a garbage collection would write to them
    with socket.socket(fileno=channel) as sock:
        while True:
            request, fds, _, _ = socket.recv_fds(sock, 1 << 20, len(Descriptors._fields))
            if not request:
                return
            number, kind, content = pickle.loads(request)
            if kind == "fork":
                _fork(sock, number, Descriptors(*fds), content)
            else:
                sock.send(pickle.dumps((number, system.await_exit(content))))


def _fork(sock: socket.socket, number: int, descriptors: Descriptors, changes: dict[str, str | None]) -> None:
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        sock.close()
        run_forked(descriptors, server_pid, changes)
    # The pidfd is opened here, where the child cannot have been reaped yet.
    sentinel = system.open_sentinel(pid)
    socket.send_fds(sock, [pickle.dumps((number, pid))], [sentinel])
    for fd in (sentinel, *descriptors.present()):
        os.close(fd)
