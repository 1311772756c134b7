"""The caller's side of the reaper: the process that ends what workers leave behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading

from envactors import system
from envactors.worker import reaper

# How long the reaper may take over its last look, in seconds; it ends with the last actor.
_PATIENCE = 1.0


class Reaper:
    """Starts the reaper with the first worker of this process, and tells it of each one; threads may share it.

    Workers end with their caller by themselves (`envactors.system.die_with_parent`). What they have started does not,
    nor does it end with the worker: that is what the reaper is for, a process of its own so that it survives the
    caller's SIGKILL, and so that looking through all processes of a machine keeps nobody here waiting. If it is lost,
    the next one takes over where it was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._begin()
        os.register_at_fork(after_in_child=self._forget)

    def _begin(self) -> None:
        self._id = os.urandom(8).hex()
        self._numbers = itertools.count()
        self._workers: dict[int, int] = {}
        # Those that have ended, until the reaper says that nothing of them is left: it may be lost before it looks.
        self._ended: set[int] = set()
        self._process: system.Process | None = None
        self._socket: socket.socket | None = None

    def _forget(self) -> None:
        # It is the parent's; only this process's copies of the descriptors are its own.
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            os.close(self._process.fileno())
        self._lock = threading.Lock()
        self._users = 0
        self._begin()

    def retain(self) -> None:
        """An actor has begun to use it."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """An actor uses it no more; after the last one it is gone."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            if self._ended:
                with contextlib.suppress(OSError):
                    self._ensure()
            process, sock = self._process, self._socket
            self._begin()
        if sock is not None:
            sock.shutdown(socket.SHUT_WR)  # not only closed: a forked child may have a copy of the descriptor
            sock.close()
        if process is not None:
            if not process.wait(_PATIENCE):
                process.send(system.SIGKILL)
            process.reap()

    def enlist(self) -> tuple[int, dict[str, str]]:
        """Gives the next worker's number, and what its environment has to have.

        Raises:
            OSError: The reaper could not be started.
        """
        with self._lock:
            number = next(self._numbers)
            self._ensure()
        return number, self.mark(str(number))

    def mark(self, who: str) -> dict[str, str]:
        """The mark of a process in its environment, after those of the workers that this process itself is in."""
        marks = *os.environ.get(reaper.VARIABLE, "").split(), f"{self._id}/{who}"
        return {reaper.VARIABLE: " ".join(marks)}

    def watch(self, number: int, pid: int) -> None:
        """A worker has started; it leads a group."""
        with self._lock:
            self._workers[number] = pid
            with contextlib.suppress(OSError):  # if it was lost just now, the next one is told
                self._say(f"+{number} {pid}")

    def dismiss(self, number: int) -> None:
        """A worker has ended, and is not reaped yet: ends whatever it had started."""
        with self._lock:
            try:
                self._ensure()
                self._say(f"-{number}")
                self._ended.add(number)
            except OSError:
                system.kill_group(self._workers[number])  # better than nothing
            del self._workers[number]

    def _say(self, message: str) -> None:
        assert self._socket is not None, "it was started before"
        self._socket.send(message.encode(), socket.MSG_DONTWAIT)

    def _ensure(self) -> None:
        """Starts it if it does not run; does not wait until it is ready."""
        if self._socket is not None:
            self._hear(self._socket)
        if self._process is not None:
            if not self._process.wait(0.0):
                return
            self._process.reap()
            self._process = None
        if self._socket is not None:
            self._socket.close()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), self._id]
            pid = system.start_detached(command, theirs.fileno())
        self._process = system.Process.open(pid, lambda: system.await_exit(pid))
        for number, worker in self._workers.items():
            self._say(f"+{number} {worker}")
        for number in self._ended:
            self._say(f"-{number}")  # not its group: the id may be another's by now

    def _hear(self, sock: socket.socket) -> None:
        """Takes in which of the workers that have ended have left nothing."""
        with contextlib.suppress(OSError):
            while message := sock.recv(64, socket.MSG_DONTWAIT):
                self._ended.discard(int(message))


REAPER = Reaper()
