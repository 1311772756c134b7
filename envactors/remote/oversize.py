"""Requests and replies that are too large for one record: refused by their sender, each by itself.

A record that is too long would be the end of the link, and so a lost node. Here it becomes the failure of its own call,
or of its own env's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from envactors.mailbox import bundle
from envactors.mailbox.messages import Failure, Fault, Frame, Kind
from envactors.mailbox.pickling import dumps
from envactors.remote import records

# What a bundle needs besides its parts, in bytes: for itself, and at most for each part.
_PER_BUNDLE, _PER_PART = 16, 32


def fit_request(frame: Frame) -> tuple[Frame | None, Frame | None]:
    """Return what can be sent of a request, and the reply to what cannot be; None where that is nothing."""
    if len(frame.payload) <= records.LONGEST:
        return frame, None
    if frame.kind != Kind.PAYLOADS:
        return None, _as_failed(frame, "its arguments have")
    parts: list[tuple[int, bytes | bytearray | memoryview]] = []
    room = records.LONGEST - _PER_BUNDLE
    for number, part in bundle.unpack(frame.payload):
        if len(part) + _PER_PART <= room:
            room -= len(part) + _PER_PART
            parts.append((number, part))
        else:
            parts.append((number, dumps(_failure("its arguments have", len(part)))))
    return frame._replace(payload=bundle.pack(parts)), None


def fit_reply(frame: Frame, mark_failed: Callable[[int], None]) -> Iterator[Frame]:
    """Yield the frames that can be sent of a reply.

    Args:
        frame: What a worker has sent.
        mark_failed: Called with the index of an env whose result in rows is a failure now.
    """
    if len(frame.payload) <= records.LONGEST:
        yield frame
    elif frame.kind == Kind.OVERFLOW:
        for number, part in bundle.unpack(frame.payload):  # one by one: together they may be too much again
            piece: tuple[int, bytes | bytearray | memoryview] = number, part
            if len(part) + _PER_BUNDLE + _PER_PART > records.LONGEST:
                piece = number, dumps(tuple(_failure("its result has", len(part))))
                mark_failed(number)
            yield frame._replace(payload=bundle.pack([piece]))
    elif frame.kind != Kind.LOGGED:
        yield _as_failed(frame, "its result has")


def _as_failed(frame: Frame, what: str) -> Frame:
    return frame._replace(kind=Kind.FAILED, payload=dumps(tuple(_failure(what, len(frame.payload)))))


def _failure(what: str, size: int) -> Failure:
    text = f"{what} {size} bytes pickled, and one record of the link has at most {records.LONGEST}: pass it in parts"
    return Failure(Fault.TOO_LARGE, None, text, "")
