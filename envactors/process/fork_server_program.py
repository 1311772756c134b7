"""The fork server: a program that imports what workers need and forks a worker for each request.

Each request and each answer is one packet: with a request come the worker's descriptors, with the answer its pidfd. The
answer is the worker's process id, or the `OSError` that kept it from starting; the first answer only says whether the
server is ready. The exit codes of workers are reported through another socket. The caller's half is
`envactors.process.fork_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Final, NoReturn

from envactors.process import reaper
from envactors.process.bootstrap import Descriptors, exit_after, run
from envactors.process.refusal import LaunchRefusedError
from envactors.system.processes import (
    adopt_orphans,
    count_threads,
    detach,
    end_with_parent,
    open_sentinel,
    tag_descendants,
)

# A worker's id and its exit code, minus the signal's number.
EXIT_REPORT: Final = struct.Struct("<qq")
# How long a thread that an import has started may take to end, in seconds.
_THREAD_GRACE: Final = 1.0


def serve_forks(requests: int, exits: int, parent_pid: int, preload: list[str]) -> NoReturn:
    """Fork workers until the other end of the socket is closed.

    Args:
        requests: The descriptor of the packet socket.
        exits: The descriptor of the socket for exit codes.
        parent_pid: The caller's process id.
        preload: Modules to import.
    """
    tag_descendants(int(os.environ[reaper.VARIABLE]))
    detach()
    end_with_parent(parent_pid)
    adopt_orphans()  # and reap them; otherwise they would stay zombies if the caller is process 1

    def work() -> None:
        _serve(requests, exits, preload)
        atexit._run_exitfuncs()  # noqa: SLF001 # those of preloaded modules; nothing public runs them

    exit_after(work)


def _serve(requests: int, exits: int, preload: list[str]) -> None:
    gc.disable()  # imports are quicker without
    with socket.socket(fileno=requests) as sock:
        refusal = _import_all(preload)
        gc.freeze()  # a garbage collection would write to these objects, which workers share copy-on-write
        gc.enable()
        sock.send(pickle.dumps(LaunchRefusedError(refusal) if refusal else 0))
        # Becomes readable when a worker has ended.
        ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the descriptor needs a handler of Python's
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # The ids of the running workers, by process id.
        worker_ids: dict[int, int] = {}
        if refusal:
            sock.recv(1)  # until the caller hangs up: a server that ends is replaced
            return
        while True:
            ready = select.select([requests, ended], [], [])[0]
            if ended in ready:
                os.read(ended, 1 << 12)
                _report_exits(worker_ids, exits)
            if requests in ready and not _answer(sock, worker_ids, (exits, ended, wake)):
                return


def _answer(sock: socket.socket, worker_ids: dict[int, int], own: tuple[int, ...]) -> bool:
    """Answer one request; return False if the caller has closed its end of the socket.

    Args:
        sock: The socket.
        worker_ids: Where the worker's id is added.
        own: Other descriptors that workers must not keep.
    """
    request, fds, _, _ = socket.recv_fds(sock, 1 << 20, len(Descriptors._fields))
    if not request:
        return False
    worker_id, *setup = pickle.loads(request)
    answer: int | OSError
    try:
        answer = os.fork()
    except OSError as error:
        answer = OSError(error.errno, f"the fork server cannot fork: {error.strerror}")
    if answer == 0:
        sock.close()
        for fd in own:
            os.close(fd)
        _run_worker(Descriptors(*fds), *setup)
    sentinels: list[int] = []
    if isinstance(answer, int):
        worker_ids[answer] = worker_id
        # The pidfd is opened here, where the worker cannot have been reaped yet.
        sentinels.append(open_sentinel(answer))
    socket.send_fds(sock, [pickle.dumps(answer)], sentinels)
    for fd in (*fds, *sentinels):
        os.close(fd)
    return True


def _run_worker(
    descriptors: Descriptors,
    changes: dict[str, str | None],
    path: list[str] | None,
    argv: list[str] | None,
    directory: str,
) -> NoReturn:
    """Run a worker with what its caller has as of its start.

    Args:
        descriptors: Its descriptors.
        changes: Environment variables to set, and with None to unset.
        path: ``sys.path``; None for that of the server.
        argv: ``sys.argv``; None for that of the server.
        directory: The working directory; empty if it was removed, and then it is that of the server.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path[:] = path or sys.path
    sys.argv[:] = argv or sys.argv
    with contextlib.suppress(OSError):  # it was removed; a fresh interpreter would start without it, too
        os.chdir(directory)
    run(descriptors, None, changes)


def _report_exits(worker_ids: dict[int, int], exits: int) -> None:
    """Reap the workers that have ended, and report their exit codes."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        worker_id = worker_ids.pop(pid, None)
        if worker_id is not None:  # otherwise a worker, or a preloaded module, has started it
            os.write(exits, EXIT_REPORT.pack(worker_id, os.waitstatus_to_exitcode(status)))


def _import_all(preload: list[str]) -> str:
    """Import modules; if one of them leaves threads running, return why the server must not fork."""
    before = count_threads()  # includes those of NumPy's libraries, which tolerate a fork
    for name in preload:
        with contextlib.suppress(Exception):  # an env that needs the module will raise the error
            importlib.import_module(name)
        end = time.monotonic() + _THREAD_GRACE
        while count_threads() > before and time.monotonic() < end:
            time.sleep(0.01)
        if count_threads() > before:
            known = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            return (
                f"importing {name!r} leaves threads running "
                f"({', '.join(known) or 'not of Python'}), which a forked worker would not have: "
                f"leave {name!r} out of preload, so that each worker imports it"
            )
    return ""
