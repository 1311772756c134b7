"""The worker's life: read a request, run it, answer; end when told to or when the channel does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from envactors.wire.channel import Channel
from envactors.wire.messages import REQUESTS, Failure, Fault, Frame, Kind
from envactors.wire.pickling import dumps, loads, pack_failure
from envactors.worker.host import Host


def serve(channel: Channel) -> None:
    """Answers requests until the parent closes or is gone.

    Args:
        channel: The worker's end, which blocks.
    """
    try:
        server = Server(channel.send)
        while (frames := channel.receive()) is not None:
            for frame in frames:
                if not server.handle(frame):
                    return
    except OSError:
        # The parent is gone or has given this process up: there is nobody left to tell.
        return


class Server:
    """Answers one request at a time.

    Args:
        send: Takes each answer.
    """

    def __init__(self, send: Callable[[Frame], None]) -> None:
        self._send = send
        self._handlers: dict[int, Callable[[Any], Any]] = {Kind.START: self._start}
        self._pid = os.getpid()
        self._incarnation = 0
        self._call_id = 0

    def handle(self, frame: Frame) -> bool:
        """Runs a request and answers it; False after the last one."""
        self._incarnation, self._call_id = frame.incarnation, frame.call_id
        kind, payload = self._execute(frame)
        if os.getpid() != self._pid:
            os._exit(1)  # env code forked, and its child came back here: it must not answer
        self._answer(kind, payload)
        return frame.kind != Kind.CLOSE

    def _execute(self, frame: Frame) -> tuple[Kind, bytes]:
        """Runs one request and gives its reply; whatever it raises fails this request alone."""
        try:
            message = REQUESTS[frame.kind](*loads(frame.payload))
        except BaseException as error:
            return self._failed(error, Fault.ARGUMENTS)
        try:
            result = self._handlers[frame.kind](message)
        except BaseException as error:
            return self._failed(error, Fault.RAISED)
        try:
            return Kind.RESULT, dumps(result)
        except BaseException as error:
            return self._failed(error, Fault.RESULT)

    def _start(self, message: Any) -> None:
        host = Host(message, self._incarnation, self._resetting)
        self._handlers = {
            Kind.CALL: host.call,
            Kind.GET: host.get,
            Kind.SET: host.set,
            Kind.DESCRIBE: host.describe,
            Kind.RESET: host.reset,
            Kind.STEP: host.step,
            Kind.CLOSE: host.close,
        }

    def _resetting(self) -> None:
        self._answer(Kind.RESETTING, b"")

    def _failed(self, error: BaseException, fault: Fault) -> tuple[Kind, bytes]:
        failure: Failure = pack_failure(error, fault)
        return Kind.FAILED, dumps(tuple(failure))

    def _answer(self, kind: Kind, payload: bytes) -> None:
        self._send(Frame(kind, self._incarnation, self._call_id, payload))
