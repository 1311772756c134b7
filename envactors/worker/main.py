"""The worker's life: read a request, run it, answer; end when told to or when the channel does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from envactors import system
from envactors.arrays.slab import Slab
from envactors.system import Poller, look_out, woken_on
from envactors.wire.board import FRAMES_DOWN, FRAMES_UP, LOOKING, ORDERED, WAIT, Board, core_of
from envactors.wire.channel import Channel
from envactors.wire.messages import REQUESTS, Adopt, Attach, Failure, Fault, Frame, Kind
from envactors.wire.pickling import dumps, loads, pack_failure
from envactors.worker.host import Host
from envactors.worker.replay import replay
from envactors.worker.turns import Turns

_ANYWHERE = contextlib.nullcontext()
# How many times a worker looks on a core of its own before it makes sure that it is there.
_LOOKS_IN_PLACE = 50


def serve(channel: Channel, board: Board | None = None, slab: int | None = None) -> None:
    """Answers requests until the parent closes or is gone.

    Args:
        channel: The worker's end, which blocks.
        board: What is shared with the parent, where that is another process.
        slab: The descriptor of the file that a slab may be mapped from.
    """
    try:
        if board is None:
            _read(channel, Server(channel.send))
        else:
            _attend(channel, board, slab)
    except OSError:
        # The parent is gone or has given this process up: there is nobody left to tell.
        return


def _read(channel: Channel, server: Server) -> None:
    while (frames := channel.receive()) is not None:
        for frame in frames:
            if not server.handle(frame):
                return


def _attend(channel: Channel, board: Board, slab: int | None) -> None:
    """Waits for frames and for turns together."""
    words = board.words

    def send(frame: Frame) -> None:
        channel.send(frame)
        words[FRAMES_UP] += 1

    server = Server(send, board, slab)
    poller = Poller()
    fd = channel.fileno()
    poller.add(fd)
    board.to_worker.tell(poller)
    received = taken = looks = 0

    def called() -> bool:
        return words[ORDERED] != taken or words[FRAMES_DOWN] > received

    while True:
        if words[ORDERED] != taken:
            taken = words[ORDERED]
            server.take_turn(taken)
            continue
        if words[FRAMES_DOWN] <= received:
            wait = words[WAIT]
            core = core_of(wait)
            if wait & LOOKING:
                if core is not None and looks % _LOOKS_IN_PLACE == 0:
                    with woken_on(core):
                        pass  # the scheduler has no reason to move it there, nor from there soon
                looks += 1
                if look_out(called):
                    continue
            with _ANYWHERE if core is None else woken_on(core):
                events = dict(poller.poll(None))
            if fd not in events:
                continue
        frames = channel.receive()
        if frames is None:
            return
        for frame in frames:
            received += 1
            if not server.handle(frame):
                return


class Server:
    """Answers one request at a time.

    Args:
        send: Takes each answer.
        board: What is shared with the parent, where that is another process.
        slab: The descriptor of the file that a slab may be mapped from.
    """

    def __init__(self, send: Callable[[Frame], None], board: Board | None = None, slab: int | None = None) -> None:
        self._send = send
        self._board = board
        self._slab = slab
        self._turns: Turns | None = None
        self._handlers: dict[int, Callable[[Any], Any]] = {Kind.START: self._start}
        self._pid = os.getpid()
        self._host: Host | None = None
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

    def _execute(self, frame: Frame) -> tuple[Kind, bytes | bytearray]:
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
        host = Host(message, self._incarnation, self._resetting, self._made)
        self._handlers = {
            Kind.ADOPT: lambda adopt: self._adopt(host, adopt),
            Kind.ATTACH: lambda attach: self._attach(host, attach),
            Kind.CALL: host.call,
            Kind.GET: host.get,
            Kind.SET: host.set,
            Kind.DESCRIBE: host.describe,
            Kind.RESET: host.reset,
            Kind.STEP: host.step,
            Kind.REPLAY: lambda message: replay(host, message, self._progress),
            Kind.CLOSE: host.close,
        }
        self._host = host
        if message.attach is not None:
            self._attach(host, message.attach)

    def _adopt(self, host: Host, message: Adopt) -> None:
        host.adopt(message, self._incarnation)
        if message.attach is not None:
            self._attach(host, message.attach)

    def _attach(self, host: Host, message: Attach) -> None:
        assert self._board is not None, "only processes are told to attach a slab"
        assert self._slab is not None, "and only those that have one"
        slab = Slab(message.layout, system.map_file(self._slab, message.layout.size))
        self._turns = Turns(host, slab, self._board, message.autoreset, self._answer)

    def take_turn(self, order: int) -> None:
        """Runs the steps that were asked through shared memory."""
        assert self._turns is not None, "no turn comes before the slab"
        self._call_id = order
        self._turns.take(order)

    def _made(self, count: int) -> None:
        self._answer(Kind.MADE, dumps(count))

    def _progress(self, method: str) -> None:
        self._answer(Kind.PROGRESS, method.encode())

    def _resetting(self) -> None:
        self._answer(Kind.RESETTING, b"")

    def _failed(self, error: BaseException, fault: Fault) -> tuple[Kind, bytes | bytearray]:
        failure: Failure = pack_failure(error, fault)
        return Kind.FAILED, dumps(tuple(failure))

    def _answer(self, kind: Kind, payload: bytes | bytearray) -> None:
        check = 0 if self._host is None else self._host.check
        self._send(Frame(kind, self._incarnation, self._call_id, payload, check))
