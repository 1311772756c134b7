"""Workers that run in the threads of their callers: as fast as a plain loop, and for debugging."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

from envactors.backends.base import ExitStatus
from envactors.backends.local import LocalBackend, LocalDoorbell, LocalMemory, LocalWorker
from envactors.system import Doorbell
from envactors.wire.control_page import POSTED
from envactors.wire.messages import Frame
from envactors.worker.context import enter
from envactors.worker.main import Server


class InlineBackend(LocalBackend):
    """A backend without processes and threads: a call has run when its future is returned.

    Arguments and results of calls are pickled as for a process; those of steps are copied, so that nothing is shared by
    accident. Nothing can be killed: deadlines are not enforced, and ``kill`` and ``abort`` refuse to end a running
    call.
    """

    inline = True

    def launch(self, name: str, env_vars: Mapping[str, str], memory: LocalMemory | None) -> InlineWorker:
        """Make a worker; see `envactors.backends.base.Backend.launch`."""
        del name, env_vars
        return InlineWorker(memory)


class InlineChannel:
    """The parent's end of a channel; see `envactors.backends.base.ParentChannel`."""

    def __init__(self) -> None:
        self.requests: deque[Frame] = deque()
        self.replies: deque[Frame] = deque()
        self.backlog = False
        self._bell = Doorbell()

    def fileno(self) -> int:
        return self._bell.fileno()

    def send(self, frame: Frame) -> None:
        self.requests.append(frame)

    def flush(self) -> None:
        """Do nothing: there is never a backlog."""

    def receive(self) -> list[Frame]:
        return _pop_all(self.replies)

    def close(self) -> None:
        self._bell.close()


class _WorkerEnd:
    """The worker's end; see `envactors.worker.main.WorkerChannel`."""

    def __init__(self, channel: InlineChannel) -> None:
        self._channel = channel

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, frame: Frame) -> None:
        self._channel.replies.append(frame)

    def receive(self) -> list[Frame]:
        return _pop_all(self._channel.requests)


def _pop_all(frames: deque[Frame]) -> list[Frame]:
    popped = []
    while frames:
        popped.append(frames.popleft())
    if not popped:
        raise BlockingIOError
    return popped


class _NoDoorbell(LocalDoorbell):
    """The doorbell of a worker that is called and so never waits."""

    def ring_open(self) -> None:
        """Do nothing: no thread waits for it."""


class InlineWorker(LocalWorker):
    """A worker that runs in `work`; see `envactors.backends.base.Worker`."""

    def __init__(self, memory: LocalMemory | None) -> None:
        super().__init__(_NoDoorbell())
        self.channel = InlineChannel()
        self._counters = self.page.counters
        self._server = Server(_WorkerEnd(self.channel), self.page, None if memory is None else memory.open, self.guard)
        self._run_lock = threading.Lock()

    def work(self) -> bool:
        # One thread at a time runs requests, also those that other threads post meanwhile. A frame comes after the
        # counter that announces it, so both are checked.
        server, channel = self._server, self.channel
        while (self._counters[POSTED] != server.handled or channel.requests) and not server.closed:
            if not self._run_lock.acquire(blocking=False):
                return False
            before = enter(server.envs)
            try:
                server.run_posted()
            except BlockingIOError:
                break  # the frame is announced but not there yet; its sender calls this method afterwards
            except OSError:
                server.closed = True  # the parent has abandoned this worker
            finally:
                enter(before)
                self._run_lock.release()
            if server.closed:
                self._ended.ring()
        return bool(channel.replies)

    def kill(self) -> None:
        self.guard.close()
        self.channel.requests.clear()
        self._ended.ring()

    def reap(self) -> ExitStatus:
        self.channel.close()
        return super().reap()
