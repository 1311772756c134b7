"""What begins with the first actor of a program: the monitor, and a trace if the environment asks for one.

The reactor watches its socket, and the thread that serves clients starts when the first one connects.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from envactors.observe.listener import Listener, path_of, sockets

_log = logging.getLogger("envactors")
_VARIABLE = "ENVACTORS_MONITOR"


class Watcher(Protocol):
    """The interface of the reactor that this module uses."""

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(mask)`` when ``fd`` becomes readable."""

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""


def begin(watcher: Watcher) -> Listener | None:
    """Begin what the environment asks for; called with the first actor. For arguments and result see `listen`."""
    if "ENVACTORS_TRACE" in os.environ:
        from envactors.observe.trace import begin_by_environment

        begin_by_environment()
    return listen(watcher)


def listen(watcher: Watcher) -> Listener | None:
    """Let ``envactors top`` and ``envactors stacks`` find this program.

    Nothing that goes wrong here is an error of the program: it then runs without a socket.

    Args:
        watcher: Watches the socket.

    Returns:
        The listener, to be released; None if ``ENVACTORS_MONITOR`` is 0, or if there can be no socket.
    """
    setting = os.environ.get(_VARIABLE, "")
    if setting == "0":
        return None
    try:
        sockets()  # removes those that killed programs have left
        listener = Listener.acquire(path_of(os.getpid()))
    except (OSError, ValueError) as error:
        level = logging.WARNING if setting else logging.DEBUG
        _log.log(level, "envactors top and envactors stacks cannot show this program: %s", error)
        return None
    fd = listener.socket.fileno()
    watcher.watch(fd, lambda _mask: _on_client(listener, watcher, fd))
    return listener


def _on_client(listener: Listener, watcher: Watcher, fd: int) -> None:
    """Start the thread that serves this client and all later ones; called in the reactor's thread."""
    thread = threading.Thread(target=_serve, args=(listener,), name="envactors-monitor", daemon=True)
    # The listener may have been closed just now.
    with contextlib.suppress(OSError):
        try:
            listener.start(thread)
        except RuntimeError:  # the system has no thread left: this client gets no answer
            listener.socket.accept()[0].close()
        else:
            watcher.unwatch(fd)


def _serve(listener: Listener) -> None:
    # Imported here, since most programs are never looked at, and an import may take long.
    from envactors.observe.monitor import Server

    Server(listener).run()
