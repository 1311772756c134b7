"""Workers that run in the threads that call them: for debugging, where nothing shall stand in between."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping

from envactors.backends.base import ExitStatus, Stream
from envactors.system import Doorbell
from envactors.wire.messages import Frame
from envactors.worker.context import restored
from envactors.worker.main import Server


class InlineBackend:
    """No process and no thread: a call has run when its future is returned.

    Arguments and results are pickled as for a process, so that nothing is shared by accident. Nothing can be
    killed: deadlines are not enforced, ``kill`` and ``abort`` of a running call are refused.
    """

    kills = False
    spin = False
    inline = True
    max_starting = None

    def launch(self, name: str, env_vars: Mapping[str, str], slab: int | None) -> InlineWorker:
        """Makes a worker; see `envactors.backends.base.Backend.launch`."""
        del name, env_vars, slab
        return InlineWorker()

    def retain(self) -> None:
        """Nothing to keep."""

    def release(self) -> None:
        """Nothing to let go."""

    def __repr__(self) -> str:
        return "InlineBackend()"


class InlineChannel:
    """Both ends of a channel at once; see `envactors.backends.base.ParentChannel`."""

    def __init__(self) -> None:
        self.requests: deque[Frame] = deque()
        self.replies: deque[Frame] = deque()
        self.backlog = False
        self._bell = Doorbell()

    def fileno(self) -> int:
        return self._bell.fileno()

    def unread(self) -> bool:
        return bool(self.requests)

    def send(self, frame: Frame) -> None:
        self.requests.append(frame)

    def flush(self) -> None:
        """Nothing is ever left."""

    def receive(self) -> list[Frame]:
        frames = []
        while self.replies:
            frames.append(self.replies.popleft())
        if not frames:
            raise BlockingIOError
        return frames

    def close(self) -> None:
        self._bell.close()


class InlineWorker:
    """A worker that runs when it is told to; see `envactors.backends.base.Worker`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.board = None
        self.outputs: list[tuple[Stream, int]] = []
        self.channel = InlineChannel()
        self._ended = Doorbell()
        self.sentinel = self._ended.fileno()
        self._server = Server(self.channel.replies.append)
        self._turn = threading.Lock()

    def work(self) -> bool:
        # One thread at a time; another one's request is run by the thread that is at it.
        if not self.channel.requests or not self._turn.acquire(blocking=False):
            return False
        try:
            with restored():
                if not self._server.handle(self.channel.requests.popleft()):
                    self._ended.ring()
        finally:
            self._turn.release()
        return True

    def kill(self) -> None:
        self.channel.requests.clear()
        self._ended.ring()

    def ask_stacks(self) -> None:
        """Nobody would act on them."""

    def stacks(self) -> str:
        return ""

    def reap(self) -> ExitStatus:
        self.channel.close()
        self._ended.close()
        return ExitStatus(None, None)
