"""Workers as threads of the caller's process: for envs that release the GIL, and for debugging."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

from envactors.backends.base import ExitStatus
from envactors.backends.local import LocalBackend, LocalDoorbell, LocalMemory, LocalWorker
from envactors.system import Poller
from envactors.wire.messages import Frame
from envactors.worker.main import serve


class ThreadBackend(LocalBackend):
    """A backend with one thread per actor.

    Arguments and results of calls are pickled as for a process; those of steps are copied, so that nothing is shared by
    accident. A thread cannot be killed: deadlines are not enforced, and ``kill`` and ``abort`` refuse to end a running
    call. ``env_vars`` are refused too, since a thread has no environment of its own.
    """

    inline = False

    def launch(self, name: str, env_vars: Mapping[str, str], memory: LocalMemory | None) -> ThreadWorker:
        """Start a worker thread; see `envactors.backends.base.Backend.launch`."""
        del env_vars
        return ThreadWorker(name, memory)


class QueueChannel:
    """The parent's end of a channel between threads; see `envactors.backends.base.ParentChannel`."""

    def __init__(self) -> None:
        self.requests: deque[Frame] = deque()
        self.replies: deque[Frame] = deque()
        self.request_bell, self.reply_bell = LocalDoorbell(), LocalDoorbell()
        self.backlog = False
        self.is_closed = False

    def fileno(self) -> int:
        return self.reply_bell.fileno()

    def send(self, frame: Frame) -> None:
        self.requests.append(frame)
        self.request_bell.ring()

    def flush(self) -> None:
        """Do nothing: there is never a backlog."""

    def receive(self) -> list[Frame]:
        self.reply_bell.clear()
        frames = []
        while self.replies:
            frames.append(self.replies.popleft())
        if not frames:
            raise BlockingIOError
        return frames

    def end(self) -> None:
        """Close the channel for the worker: it receives and sends nothing more."""
        self.is_closed = True
        self.request_bell.ring()

    def close(self) -> None:
        self.reply_bell.close()


class _WorkerEnd:
    """The worker's end; see `envactors.worker.main.WorkerChannel`."""

    def __init__(self, channel: QueueChannel) -> None:
        self._channel = channel
        self._poller = Poller()
        self._poller.add(channel.request_bell.fileno())

    def fileno(self) -> int:
        return self._channel.request_bell.fileno()

    def send(self, frame: Frame) -> None:
        if self._channel.is_closed:
            raise BrokenPipeError("abandoned by the parent")
        self._channel.replies.append(frame)
        self._channel.reply_bell.ring()

    def receive(self) -> list[Frame] | None:
        self._poller.poll(None)
        self._channel.request_bell.clear()
        if self._channel.is_closed:
            return None
        frames, requests = [], self._channel.requests
        while requests:
            frames.append(requests.popleft())
        return frames

    def close(self) -> None:
        self._poller.close()
        self._channel.request_bell.close()


class ThreadWorker(LocalWorker):
    """One worker thread; see `envactors.backends.base.Worker`."""

    def __init__(self, name: str, memory: LocalMemory | None) -> None:
        super().__init__(LocalDoorbell())
        self.channel = QueueChannel()
        self._thread = threading.Thread(target=self._run, args=(memory,), name=f"envactors-worker-{name}", daemon=True)
        self._thread.start()

    def _run(self, memory: LocalMemory | None) -> None:
        end = _WorkerEnd(self.channel)
        try:
            serve(end, self.page, None if memory is None else memory.open, self.guard)
        finally:
            end.close()
            self._ended.ring()

    def kill(self) -> None:
        # The thread finds its channel closed after the call that it runs.
        self.guard.close()
        self.channel.end()

    def work(self) -> bool:
        return False

    def reap(self) -> ExitStatus:
        self.channel.close()
        return super().reap()
