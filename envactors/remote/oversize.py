"""Requests and replies that are too large for one record: their sender replaces them by failures.

The receiver of such a record would close the link, and the node would be lost. Instead, only the call or the step of
the env fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from envactors.mailbox import packing
from envactors.mailbox.messages import Failure, Fault, Frame, Kind
from envactors.mailbox.pickling import dumps
from envactors.remote import records

# The overhead of packing, and at most of each of its parts, in bytes.
_PER_BUNDLE, _PER_PART = 16, 32


def fit_request(frame: Frame) -> tuple[Frame | None, Frame | None]:
    """Return the request as it can be sent, and the reply if it cannot; either may be None."""
    if len(frame.payload) <= records.LONGEST:
        return frame, None
    if frame.kind != Kind.PAYLOADS:
        return None, _as_failed(frame, "its arguments have")
    parts: list[tuple[int, bytes | bytearray | memoryview]] = []
    room = records.LONGEST - _PER_BUNDLE
    for index, part in packing.unpack(frame.payload):
        if len(part) + _PER_PART <= room:
            room -= len(part) + _PER_PART
            parts.append((index, part))
        else:
            parts.append((index, dumps(_failure("its arguments have", len(part)))))
    return frame._replace(payload=packing.pack(parts)), None


def fit_reply(frame: Frame, mark_failed: Callable[[int], None]) -> Iterator[Frame]:
    """Yield the frames that can be sent for a reply.

    Args:
        frame: A frame from a worker.
        mark_failed: Called with the index of an env whose result has become a failure.
    """
    if len(frame.payload) <= records.LONGEST:
        yield frame
    elif frame.kind == Kind.OVERFLOW:
        for index, part in packing.unpack(frame.payload):  # one by one, since together they may be too large again
            piece: tuple[int, bytes | bytearray | memoryview] = index, part
            if len(part) + _PER_BUNDLE + _PER_PART > records.LONGEST:
                piece = index, dumps(tuple(_failure("its result has", len(part))))
                mark_failed(index)
            yield frame._replace(payload=packing.pack([piece]))
    elif frame.kind != Kind.LOGGED:
        yield _as_failed(frame, "its result has")


def _as_failed(frame: Frame, what: str) -> Frame:
    return frame._replace(kind=Kind.FAILED, payload=dumps(tuple(_failure(what, len(frame.payload)))))


def _failure(what: str, size: int) -> Failure:
    text = f"{what} {size} bytes pickled, and one record of the link has at most {records.LONGEST}: pass it in parts"
    return Failure(Fault.TOO_LARGE, None, text, "")
