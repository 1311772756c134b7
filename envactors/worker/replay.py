"""Bringing an env back to where it was: the same is asked of it again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from envactors.arrays.slab import RESET
from envactors.arrays.specs import reader
from envactors.wire.messages import REQUESTS, Kind, Replay, Set, Turns
from envactors.wire.pickling import loads
from envactors.worker.context import enter
from envactors.worker.host import Host

# How often it is told that the replay goes on, in seconds.
PULSE = 0.05
_METHODS: dict[int, str] = {Kind.RESET: "reset", Kind.STEP: "step"}


def replay(host: Host, message: Replay, progress: Callable[[str], None]) -> bool:
    """Asks an env everything again that a lost process was asked.

    Args:
        host: The env's host.
        message: What was asked.
        progress: Called with the name of the method that comes next, where that is another one than before, and now
            and then while it goes on.

    Returns:
        Whether the env has shown the same observations.
    """
    seat = host.seats[message.env]
    enter(seat.context)
    for payload in message.attributes:
        host.set(Set(*loads(payload)))
    if not message.entries:
        return True
    told, last = 0.0, ""

    def tell(method: str) -> None:
        nonlocal told, last
        now = time.monotonic()
        if method != last or now - told > PULSE:
            told, last = now, method
            progress(method)

    for method, ask in _asks(host, message, lambda: tell("reset")):
        tell(method)
        ask()
    same = seat.check == message.check
    # Where it is not the same, its next reset is that of an env that was made anew.
    seat.was_reset = same
    return same


def _asks(host: Host, message: Replay, resetting: Callable[[], None]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is to be asked, each with the name of its method."""
    seat = host.seats[message.env]
    handlers: dict[int, Callable[[Any], Any]] = {
        Kind.CALL: host.call,
        Kind.SET: host.set,
        Kind.RESET: host.reset,
        Kind.STEP: host.step,
    }

    def repeat(kind: int, payload: bytes) -> None:
        asked = REQUESTS[kind](*loads(payload))
        try:
            handlers[kind](asked)
        except Exception:
            if kind != Kind.CALL:  # a call may have raised the first time, too
                raise

    for entry in message.entries:
        if not isinstance(entry, Turns):
            yield _METHODS.get(entry[0], "call"), functools.partial(repeat, *entry)
            continue
        assert message.action is not None, "steps in shared memory have actions of a known spec"
        for row, what in enumerate(entry.what):
            if what == RESET:
                yield "reset", functools.partial(host.reset_seat, seat, None, None, None)
            else:
                action = reader(message.action, entry.actions, row)()
                yield "step", functools.partial(host.advance, seat, action, message.autoreset, None, resetting)
