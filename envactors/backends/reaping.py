"""The parent's half of the reaper, the process that ends whatever workers leave behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading

from envactors import system
from envactors.worker import reaper

# How long the reaper may take to end after the last actor, in seconds.
_PATIENCE = 1.0


class Reaper:
    """Starts the reaper with the first worker of this process and reports each worker to it. It is thread-safe.

    The kernel ends workers with their caller (`envactors.system.die_with_parent`). The processes that they have started
    end neither with the caller nor with the worker: the reaper ends them. It is a process of its own so that it
    survives the caller's SIGKILL, and so that searching all processes of a machine delays no thread here. If the reaper
    itself is lost, the next one continues with the same workers.
    """

    def __init__(self) -> None:
        # Guards everything here.
        self._lock = threading.Lock()
        # How many actors use it.
        self._users = 0
        self._reset()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def _reset(self) -> None:
        # What the marks of this process's workers begin with, such as "9f86d081884c7d65".
        self._id = os.urandom(8).hex()
        self._numbers = itertools.count()
        # worker's number: its process id, which is also its group's
        self._workers: dict[int, int] = {}
        # The numbers of ended workers, until the reaper reports that nothing of them is left. A new reaper gets them
        # again, since the old one may have been lost before it searched.
        self._ended: set[int] = set()
        self._process: system.Process | None = None
        self._socket: socket.socket | None = None

    def _reset_after_fork(self) -> None:
        # The reaper belongs to the parent; only the copies of the descriptors are this process's own.
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            os.close(self._process.fileno())
        self._lock = threading.Lock()
        self._users = 0
        self._reset()

    def retain(self) -> None:
        """Count an actor that uses the reaper."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Uncount an actor; after the last one, end the reaper."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            if self._ended:
                with contextlib.suppress(OSError):
                    self._ensure_running()
            process, sock = self._process, self._socket
            self._reset()
        if sock is not None:
            sock.shutdown(socket.SHUT_WR)  # closing is not enough: a forked child may have a copy of the descriptor
            sock.close()
        if process is not None:
            if not process.wait(_PATIENCE):
                process.send_signal(system.SIGKILL)
            process.reap()

    def enlist(self) -> tuple[int, dict[str, str]]:
        """Return the next worker's number, and the environment variables that mark it.

        Raises:
            OSError: The reaper could not be started.
        """
        with self._lock:
            number = next(self._numbers)
            self._ensure_running()
        return number, self.mark(str(number))

    def mark(self, suffix: str) -> dict[str, str]:
        """Return the environment variable that marks a process.

        Its value ends with this process's id and ``suffix``, after the marks of the workers that this process itself is
        in, such as "9f86d081884c7d65/3".
        """
        marks = *os.environ.get(reaper.VARIABLE, "").split(), f"{self._id}/{suffix}"
        return {reaper.VARIABLE: " ".join(marks)}

    def watch(self, number: int, pid: int) -> None:
        """Report a worker that has started; it leads a process group."""
        with self._lock:
            self._workers[number] = pid
            with contextlib.suppress(OSError):  # if the reaper was lost just now, the next one gets all workers
                self._send(f"+{number} {pid}")

    def dismiss(self, number: int) -> None:
        """Report a worker that has ended and is not reaped yet; the reaper ends whatever it has started."""
        with self._lock:
            try:
                self._ensure_running()
                self._send(f"-{number}")
                self._ended.add(number)
            except OSError:
                system.kill_group(self._workers[number])  # without a reaper, at least its process group
            del self._workers[number]

    def _send(self, message: str) -> None:
        assert self._socket is not None, "it was started before"
        self._socket.send(message.encode(), socket.MSG_DONTWAIT)

    def _ensure_running(self) -> None:
        """Start the reaper if it does not run; do not wait until it is ready."""
        if self._socket is not None:
            self._receive_done(self._socket)
        if self._process is not None:
            if not self._process.wait(0.0):
                return
            self._process.reap()
            self._process = None
        if self._socket is not None:
            self._socket.close()
        self._socket, theirs = system.packet_pair()
        with theirs:
            command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), self._id]
            pid = system.start_detached(command, theirs.fileno())
        self._process = system.Process.open(pid, lambda: system.await_exit(pid))
        for number, worker in self._workers.items():
            self._send(f"+{number} {worker}")
        for number in self._ended:
            self._send(f"-{number}")  # without its group, whose id may be reused by now

    def _receive_done(self, sock: socket.socket) -> None:
        """Read which of the ended workers have nothing left."""
        with contextlib.suppress(OSError):
            while message := sock.recv(64, socket.MSG_DONTWAIT):
                self._ended.discard(int(message))


REAPER = Reaper()
