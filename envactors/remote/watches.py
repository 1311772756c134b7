"""The descriptors that an agent waits for, each with its handler."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from envactors.remote.link import LinkLostError
from envactors.remote.records import LinkCorruptError
from envactors.system.polling import Doorbell, Poller


class Watches:
    """Waits for descriptors and calls their handlers, in one thread.

    Handlers deal with the errors that concern one worker or memory. Any other error of a handler is printed, and the
    next one is called, unless the link is lost.
    """

    def __init__(self) -> None:
        self._poller = Poller()
        self._handlers: dict[int, Callable[[int], None]] = {}
        # Those that are not looked at for a while.
        self._paused: set[int] = set()

    def add(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call a function with the event mask when a descriptor is readable, or writable if that is wanted."""
        self._handlers[fd] = handler
        self._poller.add(fd)

    def add_bell(self, bell: Doorbell, handler: Callable[[int], None]) -> None:
        """Call a function when a doorbell is rung, until it is closed."""
        self._handlers[bell.fileno()] = handler
        bell.register(self._poller)

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor, if it is watched."""
        if self._handlers.pop(fd, None) is not None:
            self._paused.discard(fd)
            self._poller.remove(fd)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Set whether a descriptor is also watched for room to write."""
        self._poller.watch(fd, writable=wanted)

    def pause(self, fd: int) -> None:
        """Do not look at a descriptor until `resume_all`."""
        self._poller.watch(fd, readable=False)
        self._paused.add(fd)

    def resume_all(self) -> None:
        """Look at all descriptors again."""
        for fd in self._paused:
            self._poller.watch(fd)
        self._paused.clear()

    def handle(self, seconds: float) -> Callable[[], None]:
        """Wait so many seconds at most; return what calls the handlers of the events that have come."""
        handlers = self._handlers
        events = [(fd, mask, handlers.get(fd)) for fd, mask in self._poller.poll(max(0.0, seconds))]

        def call_handlers() -> None:
            for fd, mask, handler in events:
                # One that ran before may have closed the descriptor, and its number may be another's by now.
                if handler is not None and handlers.get(fd) is handler:
                    try:
                        handler(mask)
                    except (LinkLostError, LinkCorruptError):
                        raise
                    except Exception:  # whatever it was about, the others are not to suffer for it
                        traceback.print_exc()

        return call_handlers
