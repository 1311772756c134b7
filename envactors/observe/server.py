"""Answers ``envactors top`` and ``envactors stacks`` through a Unix socket of the user's own.

A process listens from its first actor to its last one. A client sends one line of JSON and gets one JSON object back:

    {"get": "snapshot"}                                  see `envactors.observe.snapshot.take_snapshot`
    {"get": "stacks", "name": null, "timeout": 1.0}      see `envactors.observe.snapshot.take_stacks`

Other requests, and clients of other users, get no answer. Until the first client connects, no thread runs and nothing
is imported to answer it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from envactors.observe.addresses import find_sockets, is_listening, path_of
from envactors.system.sockets import SEND_FLAGS, prevent_sigpipe

_log = logging.getLogger("envactors")
# "0" switches the server off; any other value logs a warning if there can be none.
_VARIABLE = "ENVACTORS_MONITOR"
# The longest request, in bytes.
_MOST_REQUEST = 4096
# Number of clients that are served at a time; others are rejected.
_MOST_CLIENTS = 16
# The longest wait for stacks that a client may ask for, in seconds.
_LONGEST_WAIT = 10.0
# Pause after the system had no descriptor for a client, in seconds.
_REST = 0.1


class Watcher(Protocol):
    """The interface of the loop that this module uses."""

    def watch(self, fd: int, callback: Callable[[int], object]) -> None:
        """Call ``callback(events)`` whenever a descriptor is readable."""

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""


def begin(watcher: Watcher) -> Server | None:
    """Begin what the environment asks for: a trace, and a server that is watched until its first client connects.

    Nothing that goes wrong here is an error of the program: it then runs without a server.

    Returns:
        The server; None if ``ENVACTORS_MONITOR`` is 0, or if there can be no socket.
    """
    global _server
    if "ENVACTORS_TRACE" in os.environ:
        from envactors.observe.trace import begin_by_environment

        begin_by_environment()
    setting = os.environ.get(_VARIABLE, "")
    if setting == "0":
        return None
    try:
        find_sockets()  # removes those that killed programs have left
        server = _server = Server(path_of(os.getpid()), watcher)
    except OSError as error:
        level = logging.WARNING if setting else logging.DEBUG
        _log.log(level, "envactors top and envactors stacks cannot show this program: %s", error)
        return None
    watcher.watch(server.fileno(), lambda _events: server.start())
    return server


class Server(socketserver.ThreadingUnixStreamServer):
    """Serves each client in a thread, for at most a few seconds.

    Args:
        path: Path of the socket.
        watcher: Watches the socket until the first client connects.

    Raises:
        FileExistsError: Another program listens there.
        OSError: The socket cannot be created.
    """

    daemon_threads = True
    request_queue_size = 16
    # How often to look for the end where shutting down the socket wakes nobody, in seconds.
    timeout: float | None = 0.5

    def __init__(self, path: Path, watcher: Watcher) -> None:
        self._path = path
        self._watcher = watcher
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # Guards what follows, and the start of the thread.
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        if is_listening(path):
            raise FileExistsError(f"another program listens at {path}")
        path.unlink(missing_ok=True)  # of a killed program with the same process id
        super().__init__(str(path), _Client, bind_and_activate=False)
        try:
            self.server_bind()
            path.chmod(0o600)  # nobody can connect before it listens
            self.server_activate()
        except BaseException:
            self.server_close()
            raise

    def start(self) -> None:
        """Start the thread that serves this first client and all later ones; called in the loop's thread."""
        with self._lock:
            if self._closing.is_set():
                return
            thread = threading.Thread(target=self._serve, name="envactors-monitor", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left: this client gets no answer
                with contextlib.suppress(OSError):
                    self.socket.accept()[0].close()
            else:
                self._thread = thread
                self._watcher.unwatch(self.fileno())

    def close(self) -> None:
        """Remove the socket, disconnect the clients, and tell the threads to end; do not wait for them."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        with self._lock:
            self._closing.set()
            for sock in (self.socket, *self._clients):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            if self._thread is None:
                self._watcher.unwatch(self.fileno())
                self.server_close()

    def join(self, timeout: float) -> None:
        """Wait until the socket is closed, which it is soon after `close`."""
        if self._thread is not None:
            self._thread.join(timeout)

    def server_close(self) -> None:
        global _server
        super().server_close()
        if _server is self:
            _server = None

    def _serve(self) -> None:
        while not self._closing.is_set():
            self.handle_request()
        self.server_close()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            self._closing.wait(_REST)  # the process has no free descriptor; the client stays in the queue
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        with self._lock:
            accepted = len(self._clients) < _MOST_CLIENTS and not self._closing.is_set() and _is_of_this_user(request)
            if accepted:
                self._clients.add(request)
            return accepted

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.discard(request)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        _log.warning("a request of envactors top or envactors stacks failed", exc_info=True)


class _Client(socketserver.StreamRequestHandler):
    """Reads a request and sends the answer."""

    timeout: ClassVar[float | None] = 2.0  # for each of both, in seconds

    def handle(self) -> None:
        threading.current_thread().name = "envactors-monitor-client"
        with contextlib.suppress(OSError):  # it has gone, or takes too long
            line = self.rfile.readline(_MOST_REQUEST)
            if (answer := _answer(line)) is not None:
                prevent_sigpipe(self.request)
                self.request.sendall(json.dumps(answer).encode(), SEND_FLAGS)


def _answer(line: bytes) -> dict[str, Any] | None:
    """Return the answer to a request; None if it is malformed."""
    # Imported here, since most programs are never looked at.
    from envactors.observe.snapshot import take_snapshot, take_stacks

    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match request:
        case {"get": "snapshot"}:
            return take_snapshot()
        case {"get": "stacks", "name": str() | None as name, "timeout": int() | float() as timeout}:
            return {"actors": take_stacks(name, max(0.0, min(timeout, _LONGEST_WAIT)))}
    return None


def _is_of_this_user(client: socket.socket) -> bool:
    """Return whether the other end is a process of this user; where that is unknown, rely on the file's mode."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    # The user at the time of the connection.
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


# The open one of this process.
_server: Server | None = None


def _reset_after_fork() -> None:
    # The socket stays the parent's.
    global _server
    if _server is not None:
        _server.socket.close()
        _server = None


os.register_at_fork(after_in_child=_reset_after_fork)
