"""Workers as threads of the caller's process: for envs that leave the GIL alone, and for looking around."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping

from envactors.backends.base import ExitStatus, Stream
from envactors.system import Doorbell
from envactors.wire.channel import Channel
from envactors.worker.context import restored
from envactors.worker.main import serve


class ThreadBackend:
    """One thread an actor; arguments and results are pickled as for a process, so that nothing is shared by accident.

    A thread cannot be killed: deadlines are not enforced, ``kill`` and ``abort`` of a running call are refused.
    ``env_vars`` are refused too, since a thread has no environment of its own.
    """

    kills = False
    spin = False
    inline = False
    max_starting = None

    def launch(self, name: str, env_vars: Mapping[str, str], slab: int | None) -> ThreadWorker:
        """Starts a worker thread; see `envactors.backends.base.Backend.launch`."""
        del env_vars, slab
        return ThreadWorker(name)

    def retain(self) -> None:
        """Nothing to keep."""

    def release(self) -> None:
        """Nothing to let go."""

    def __repr__(self) -> str:
        return "ThreadBackend()"


class ThreadWorker:
    """One worker thread; see `envactors.backends.base.Worker`."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.board = None
        self.outputs: list[tuple[Stream, int]] = []
        ours, self._theirs = socket.socketpair()
        ours.setblocking(False)
        self.channel = Channel(ours)
        self._ended = Doorbell()
        self.sentinel = self._ended.fileno()
        self._thread = threading.Thread(target=self._run, name=f"envactors-worker-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._theirs, restored():
                serve(Channel(self._theirs))
        finally:
            self._ended.ring()

    def kill(self) -> None:
        # The thread sees the end of its channel after the call that it runs.
        self.channel.socket.shutdown(socket.SHUT_RDWR)

    def ask_stacks(self) -> None:
        """Nobody would act on them."""

    def stacks(self) -> str:
        return ""

    def work(self) -> bool:
        return False

    def reap(self) -> ExitStatus:
        self.channel.close()
        self._ended.close()
        return ExitStatus(None, None)
