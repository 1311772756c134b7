"""The connections to an agent, until one of them has proved that it is the caller.

The agent's only thread serves all of them. Each costs little, since the agent must admit and serve its caller however
many others connect and stay silent.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

from envactors.remote import greeting
from envactors.remote.greeting import GreetingError
from envactors.remote.link import Link
from envactors.remote.starting import AgentOrders
from envactors.remote.streams import Stream, make_stream
from envactors.remote.watches import Watches
from envactors.system.clocks import boot_clock

# How many connections may be in the middle of a greeting. A further one closes the oldest, preferably a silent one.
_MOST = 64
# How many connections are accepted before other handlers get a turn.
_TURN = 64
# How long to accept no connections after an error, such as too many open files, in seconds.
_PAUSE = 0.2
# How many refusals are printed.
_MOST_PRINTED = 100
_CHUNK = 1 << 12
_TAKEN = "this agent has a caller already"


class Door:
    """Greets those who connect, and admits one of them.

    Args:
        listener: The listening socket.
        orders: The agent's orders.
        tls: The agent's certificates; None for links without encryption.
        watches: Watches the listener and the connections.

    Attributes:
        admitted: The link to the caller, and when it was admitted; None before.
    """

    def __init__(
        self, listener: socket.socket, orders: AgentOrders, tls: ssl.SSLContext | None, watches: Watches
    ) -> None:
        self.admitted: tuple[Link, float] | None = None
        self._listener = listener
        self._orders = orders
        self._tls = tls
        self._watches = watches
        # By descriptor, oldest first.
        self._strangers: dict[int, _Stranger] = {}
        # When connections will be accepted again (`time.monotonic`); None while they are accepted.
        self._paused_until: float | None = None
        self._refusals = 0
        listener.setblocking(False)
        watches.add(listener.fileno(), self._on_listener)

    def next_timer(self) -> float:
        """Return the time (`time.monotonic`) of the next deadline, infinity if there is none."""
        oldest = next(iter(self._strangers.values()), None)
        ends = float("inf") if oldest is None else oldest.deadline
        return ends if self._paused_until is None else min(ends, self._paused_until)

    def on_timer(self, now: float) -> None:
        """Handle the deadlines that have passed."""
        for stranger in [one for one in self._strangers.values() if one.deadline <= now]:
            self._refuse(stranger, "it took too long")
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            self._watches.add(self._listener.fileno(), self._on_listener)

    def _on_listener(self, _mask: int) -> None:
        for _ in range(_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it was closed again
                continue
            except OSError as error:
                self._pause(error)
                return
            self._let_in(sock)

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: the listener stays readable, and an immediate retry would fail again."""
        self._say(f"no connection can be accepted: {error}")
        self._watches.remove(self._listener.fileno())
        self._paused_until = time.monotonic() + _PAUSE
        self._drop_oldest()  # such connections may be what uses up the descriptors

    def _let_in(self, sock: socket.socket) -> None:
        if len(self._strangers) >= _MOST:
            self._drop_oldest()
        stranger = _Stranger(sock, self._tls, self._orders, lambda: self.admitted is None)
        self._strangers[sock.fileno()] = stranger
        self._watches.add(sock.fileno(), lambda _mask: self._advance(stranger))

    def _drop_oldest(self) -> None:
        strangers = self._strangers.values()
        oldest = next((one for one in strangers if not one.has_spoken), next(iter(strangers), None))
        if oldest is not None:
            self._refuse(oldest, "others came before it had proved that it knows the secret")

    def _advance(self, stranger: _Stranger) -> None:
        try:
            stream = stranger.advance()
        except BlockingIOError:
            return
        except (OSError, GreetingError) as error:
            self._refuse(stranger, str(error))
            return
        self._forget(stranger)
        self.admitted = Link(stream), stranger.admitted_at

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._forget(stranger)
        stranger.close()
        self._say(f"a caller was refused: {why}")

    def _forget(self, stranger: _Stranger) -> None:
        fd = stranger.sock.fileno()
        del self._strangers[fd]
        self._watches.remove(fd)

    def _say(self, text: str) -> None:
        self._refusals += 1
        if self._refusals <= _MOST_PRINTED:
            print(f"envactors agent: {text}", file=sys.stderr)


class _Stranger:
    """A connection that has not proved that it is the caller, and the state of its greeting.

    Args:
        sock: The connection.
        tls: The agent's certificates; None for a link without encryption.
        orders: The agent's orders.
        may_come: Returns False if there is a caller already.

    Attributes:
        sock: The connection.
        deadline: When the greeting must be complete (`time.monotonic`).
        has_spoken: Whether anything was received.
        admitted_at: When it was admitted; 0 before.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None, orders: AgentOrders, may_come: Callable[[], bool]
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.deadline = time.monotonic() + greeting.PATIENCE
        self.has_spoken = False
        self.admitted_at = 0.0
        self._tls = tls
        self._may_come = may_come
        # None while the connection is silent, so that such a connection costs little.
        self._stream: Stream | None = None
        self._has_shaken_hands = False
        self._conversation = greeting.answer(orders.secret, orders.epoch, {"pid": os.getpid()}, self._claim)
        # What was received after the last complete message.
        self._heard = b""

    def _claim(self) -> bool:
        self.admitted_at = boot_clock()  # not later than the caller's own lease begins
        return self._may_come()

    def advance(self) -> Stream:
        """Continue the greeting; return the stream once the connection is admitted.

        Raises:
            BlockingIOError: The next message is not complete.
            GreetingError: The connection was refused.
            OSError: The connection is lost.
        """
        if self._stream is None:
            self.has_spoken = True
            self._stream = make_stream(self.sock, self._tls, server_side=True)
            next(self._conversation)
        stream = self._stream
        if not self._has_shaken_hands:
            stream.handshake()
            self._has_shaken_hands = True
        while True:
            message, self._heard = greeting.parse(self._heard)
            while message is None:
                part = stream.recv(_CHUNK)
                if not part:
                    raise ConnectionError(greeting.CLOSED)
                message, self._heard = greeting.parse(self._heard + part)
            if not self._may_come():  # also if it knows the secret
                stream.sendall(greeting.frame({"refused": _TAKEN}))
                raise GreetingError(_TAKEN)
            try:
                self._reply(stream, message)
            except StopIteration:
                return stream

    def _reply(self, stream: Stream, message: dict[str, Any]) -> None:
        """Reply to a message.

        Raises:
            StopIteration: The greeting is complete, and the connection admitted.
        """
        to_say = self._conversation.send(message)
        while to_say is not None:
            try:
                stream.sendall(greeting.frame(to_say))
            except BlockingIOError:
                raise ConnectionError("it does not read the replies")
            to_say = next(self._conversation)

    def close(self) -> None:
        """Close the connection."""
        self._conversation.close()
        self.sock.close()
