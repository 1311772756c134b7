"""Those who connect to an agent, until one of them has proved that it is the caller.

All of them are served in the agent's one thread, and take little of it: an agent must serve its caller, and let it in,
whoever else connects and says nothing.
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

# How many connections may be in the middle of a greeting. Each one more closes the oldest, silent ones first.
_MOST = 64
# How many are accepted before others get a turn.
_TURN = 64
# How long to accept no more connections after an error, such as too many open files, in seconds.
_PAUSE = 0.2
# How many refusals are printed.
_MOST_PRINTED = 100
_CHUNK = 1 << 12
_TAKEN = "this agent has a caller already"


class Door:
    """Greets those who connect, and admits one of them.

    Args:
        listener: Where they connect.
        orders: What the agent was told.
        tls: Its certificates; None for links that are not encrypted.
        watches: Watches the listener and the connections.

    Attributes:
        admitted: The link to the one that was admitted, and when that was; None before.
    """

    def __init__(
        self, listener: socket.socket, orders: AgentOrders, tls: ssl.SSLContext | None, watches: Watches
    ) -> None:
        self.admitted: tuple[Link, float] | None = None
        self._listener = listener
        self._orders, self._tls = orders, tls
        self._watches = watches
        # In the order of their coming, by descriptor.
        self._strangers: dict[int, _Stranger] = {}
        # When connections are accepted again (`time.monotonic`); None while they are.
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
            except ConnectionError:  # it has gone again
                continue
            except OSError as error:
                self._pause(error)
                return
            self._let_in(sock)

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: the listener stays readable, and trying again at once would change nothing."""
        self._say(f"no connection can be accepted: {error}")
        self._watches.remove(self._listener.fileno())
        self._paused_until = time.monotonic() + _PAUSE
        self._drop_oldest()  # it may be what uses up the descriptors

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
    """One that has connected: how far its greeting has come.

    Args:
        sock: Its connection.
        tls: The agent's certificates; None for a link that is not encrypted.
        orders: What the agent was told.
        may_come: Returns False if there is a caller already.

    Attributes:
        sock: Its connection.
        deadline: When it must have proved that (`time.monotonic`).
        has_spoken: Whether anything has come from it.
        admitted_at: When it was admitted, 0 before.
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
        # Made when it speaks: those that never do shall cost little.
        self._stream: Stream | None = None
        self._has_shaken_hands = False
        self._conversation = greeting.answer(orders.secret, orders.epoch, {"pid": os.getpid()}, self._claim)
        # What has come and is not a whole message.
        self._heard = b""

    def _claim(self) -> bool:
        self.admitted_at = boot_clock()  # before it knows: its own reckoning of the lease begins no sooner
        return self._may_come()

    def advance(self) -> Stream:
        """Go on with the greeting; return the connection once it is admitted.

        Raises:
            BlockingIOError: More has to come first.
            GreetingError: It is not the right one, and was told so.
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
            if not self._may_come():  # whoever it is
                stream.sendall(greeting.frame({"refused": _TAKEN}))
                raise GreetingError(_TAKEN)
            try:
                self._reply(stream, message)
            except StopIteration:
                return stream

    def _reply(self, stream: Stream, message: dict[str, Any]) -> None:
        """Say what follows from a message.

        Raises:
            StopIteration: Everything was said: it is admitted.
        """
        to_say = self._conversation.send(message)
        while to_say is not None:
            try:
                stream.sendall(greeting.frame(to_say))
            except BlockingIOError:
                raise ConnectionError("it does not read what it is told")
            to_say = next(self._conversation)

    def close(self) -> None:
        """Close its connection."""
        self._conversation.close()
        self.sock.close()
