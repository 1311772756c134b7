"""Answers ``envactors top`` and ``envactors stacks`` through a Unix socket of the user's own.

A client sends one line of JSON and gets one JSON object back:

    {"get": "snapshot"}                                    the fields of `envactors.observe.snapshot.Snapshot`
    {"get": "stacks", "name": ..., "key": ..., "timeout": 1.0}    {"actors": [{"name", "key", ..., "stacks"}, ...]}
    {"get": "output", "name": ..., "key": ...}             {"actors": [{"name", "key", ..., "stdout", "stderr"}, ...]}

Other requests, and clients of other users, get no answer. Each client has a thread for at most a few seconds; no other
thread of the program waits for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

from envactors.actor.supervisor import Supervisor
from envactors.observe.listener import Listener, path_of
from envactors.observe.snapshot import find_actors, take_snapshot
from envactors.system.sockets import SEND_FLAGS, prevent_sigpipe

_log = logging.getLogger("envactors")
# How long a client may take to send its request, and to receive the answer, in seconds.
_PATIENCE = 2.0
# The longest request, in bytes.
_MOST_REQUEST = 4096
# Number of clients that are served at a time; others are rejected.
_MOST_CLIENTS = 16
# The longest wait for stacks that a client may ask for, in seconds.
_LONGEST_WAIT = 10.0
# Number of actors whose stacks are read at a time.
_MOST_ASKED = 32
# Least time for the stacks of an actor, in seconds, even if the others took all of the time.
_LEAST_WAIT = 0.1
# Pause before the next client, in seconds, after the system had no descriptor or thread for one.
_REST = 0.1


def monitor(path: str | Path | None = None) -> Monitor:
    """Let ``envactors top`` and ``envactors stacks`` look at this program.

    Every program with actors does so automatically, unless ``ENVACTORS_MONITOR=0`` is in its environment. Call this to
    give the socket another path, or to answer before the first actor starts and after the last one has ended.

    Args:
        path: Path of the Unix socket, to which only this user can connect. None for a path that the commands find by
            the program's process id.

    Returns:
        A context manager, whose ``close`` stops the monitor.

    Raises:
        FileExistsError: There is a file with this path, or another program listens there.
        PermissionError: The directory for sockets is not this user's alone.
        ValueError: The path is too long for a socket.
    """
    return Monitor(path_of(os.getpid()) if path is None else Path(path))


class Monitor:
    """Answers ``envactors top`` and ``envactors stacks`` until it is closed; also a context manager.

    Args:
        path: Path of the socket. Monitors of one process with the same path share the socket.

    Attributes:
        path: Path of the socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_open = True
        self._listener = Listener.acquire(path)
        server = Server(self._listener)
        try:
            self._listener.start(threading.Thread(target=server.run, name="envactors-monitor", daemon=True))
        except BaseException:
            self._listener.release()
            raise

    def close(self) -> None:
        """Stop answering, and remove the socket if nobody else shares it; may be called again."""
        with _lock:
            was_open = self._is_open
            self._is_open = False
        if was_open:
            self._listener.release()
            thread = self._listener.thread
            if self._listener.closing.is_set() and thread is not None:
                thread.join()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Monitor at {self.path}{'' if self._is_open else ', closed'}>"


class Server:
    """Serves the clients of a listener, each in a thread.

    Args:
        listener: The listener.
    """

    def __init__(self, listener: Listener) -> None:
        self._socket = listener.socket
        self._closing = listener.closing
        self._lock = threading.Lock()
        # The connections of the clients that are served now.
        self._clients: set[socket.socket] = set()
        _servers.add(self)

    def run(self) -> None:
        """Serve clients until the listener is closed, then close its socket."""
        threads: list[threading.Thread] = []
        while not self._closing.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                self._closing.wait(_REST)  # the listener is closed, or the process has no free descriptor
                continue
            threads = [thread for thread in threads if thread.is_alive()]
            if len(threads) >= _MOST_CLIENTS or not _is_of_this_user(client):
                client.close()
                continue
            with self._lock:
                self._clients.add(client)
            thread = threading.Thread(target=self._serve_client, args=(client,), daemon=True)
            thread.name = "envactors-monitor-client"
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                self._dismiss(client)
                self._closing.wait(_REST)
                continue
            threads.append(thread)
        with self._lock:
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        self._socket.close()

    def forget(self) -> None:
        """Close the connections that a fork has inherited."""
        for client in self._clients:
            client.close()

    def _serve_client(self, client: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                request = _read_request(client)
                answer = None if request is None else _answer(request, self._closing)
                if answer is not None:
                    client.settimeout(_PATIENCE)
                    prevent_sigpipe(client)
                    client.sendall(json.dumps(answer).encode(), SEND_FLAGS)
        except Exception:  # must end neither the program nor the monitor
            _log.warning("a request to the monitor failed", exc_info=True)
        finally:
            self._dismiss(client)

    def _dismiss(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.discard(client)
            client.close()


def _is_of_this_user(client: socket.socket) -> bool:
    """Return whether the other end is a process of this user; where that is unknown, rely on the file's mode."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    # The user at the time of the connection.
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


def _read_request(client: socket.socket) -> dict[str, Any] | None:
    """Return the request of a client; None if it is malformed."""
    end = time.monotonic() + _PATIENCE
    data = b""
    while not data.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0 or len(data) > _MOST_REQUEST:
            return None
        client.settimeout(left)
        chunk = client.recv(_MOST_REQUEST)
        if not chunk:
            return None
        data += chunk
    try:
        request = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _answer(request: dict[str, Any], closing: threading.Event) -> dict[str, Any] | None:
    what, name, key, timeout = (request.get(field) for field in ("get", "name", "key", "timeout"))
    if name is not None and not isinstance(name, str):
        return None
    if key is not None and not isinstance(key, int):
        return None
    if what == "snapshot":
        return dict(take_snapshot())
    if what == "output":
        return {"actors": [{**_identity(actor), **actor.last_output()} for actor in find_actors(name, key)]}
    if what == "stacks":
        # Compared before it is converted: an integer may be too large for a float.
        seconds = float(max(0, min(timeout, _LONGEST_WAIT))) if isinstance(timeout, (int, float)) else 1.0
        stacks = _stacks(find_actors(name, key), seconds, closing)
        return None if stacks is None else {"actors": stacks}
    return None


def _stacks(actors: list[Supervisor], seconds: float, closing: threading.Event) -> list[dict[str, Any]] | None:
    """Return the stacks of actors, read in parallel; None if the monitor is closed meanwhile.

    An executor would not do: the interpreter waits for its threads when it exits.
    """
    found: dict[int, str] = {}
    waiting = iter(enumerate(actors))
    end = time.monotonic() + seconds
    lock = threading.Lock()
    done = threading.Semaphore(0)

    def ask() -> None:
        try:
            while True:
                with lock:
                    number, actor = next(waiting)
                found[number] = actor.stacks(max(_LEAST_WAIT, end - time.monotonic()))
        except StopIteration:
            pass
        finally:
            done.release()

    threads = [threading.Thread(target=ask, daemon=True) for _ in actors[:_MOST_ASKED]]
    for thread in threads:
        thread.name = "envactors-monitor-stacks"
        thread.start()
    for _ in threads:
        while not done.acquire(timeout=_REST):
            if closing.is_set():
                return None
    return [{**_identity(actor), "stacks": found.get(number, "")} for number, actor in enumerate(actors)]


def _identity(actor: Supervisor) -> dict[str, Any]:
    stats = actor.stats()
    doing = {"state": stats.state.value, "method": stats.method, "elapsed": stats.elapsed}
    return {"name": actor.config.name, "key": id(actor), "pid": stats.pid, "node": stats.node, **doing}


_lock = threading.Lock()
# Those that may have clients now.
_servers: WeakSet[Server] = WeakSet()


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for server in _servers:
        server.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
