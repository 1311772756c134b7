"""The event loop of an agent: descriptors, each with a handler."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from envactors.remote.link import LinkLostError
from envactors.remote.records import LinkCorruptError
from envactors.system.polling import Doorbell, Poller


class Watches:
    """Waits for descriptors and calls their handlers, in one thread.

    Handlers contain errors that concern one worker or memory. Any other error of a handler is printed, and the next
    handler is called, unless the link is lost.
    """

    def __init__(self) -> None:
        self._poller = Poller()
        self._handlers: dict[int, Callable[[int], None]] = {}
        # The descriptors that are temporarily ignored.
        self._paused: set[int] = set()

    def add(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call a function with the event mask when a descriptor is readable, or writable after `want_write`."""
        self._handlers[fd] = handler
        self._poller.add(fd)

    def add_bell(self, bell: Doorbell, handler: Callable[[int], None]) -> None:
        """Call a function for each ring of a doorbell."""
        self._handlers[bell.fileno()] = handler
        bell.register(self._poller)

    def remove_bell(self, bell: Doorbell) -> None:
        """Stop listening to a doorbell."""
        self._handlers.pop(bell.fileno(), None)
        bell.unregister(self._poller)

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor, if it is watched."""
        if self._handlers.pop(fd, None) is not None:
            self._paused.discard(fd)
            self._poller.remove(fd)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Set whether a descriptor is also watched for being writable."""
        self._poller.watch(fd, writable=wanted)

    def pause(self, fd: int) -> None:
        """Ignore a descriptor until `resume_all`."""
        self._poller.watch(fd, readable=False)
        self._paused.add(fd)

    def resume_all(self) -> None:
        """Watch all descriptors again."""
        for fd in self._paused:
            self._poller.watch(fd)
        self._paused.clear()

    def handle(self, seconds: float) -> Callable[[], None]:
        """Wait at most this long; return a function that calls the handlers of the events."""
        handlers = self._handlers
        events = [(fd, mask, handlers.get(fd)) for fd, mask in self._poller.poll(max(0.0, seconds))]

        def call_handlers() -> None:
            for fd, mask, handler in events:
                # An earlier handler may have closed the descriptor, and its number may have been reused.
                if handler is not None and handlers.get(fd) is handler:
                    try:
                        handler(mask)
                    except (LinkLostError, LinkCorruptError):
                        raise
                    except Exception:  # the other handlers have to run anyway
                        traceback.print_exc()

        return call_handlers
