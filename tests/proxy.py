"""A connection that tests can tamper with: what all proxies between one caller and one agent share."""

from __future__ import annotations

import contextlib
import socket
import threading

from helpers import SOON


class Proxy:
    """Accepts one caller, connects it to an agent, and runs `pass_on` in a thread for each way."""

    def __init__(self, host, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = host, port
        self._sockets = []
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            caller, _ = self._listener.accept()
            agent = socket.create_connection(self._target)
            self._sockets = [caller, agent]
            for source, target, way in ((caller, agent, "there"), (agent, caller, "back")):
                thread = threading.Thread(target=self.pass_on, args=(source, target, way))
                self._threads.append(thread)
                thread.start()

    def pass_on(self, source, target, way):
        """Passes on what comes, until one of the two sockets is closed."""
        raise NotImplementedError

    def close(self):
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(SOON)
