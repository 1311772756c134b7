"""What goes with rows and does not fit into them: the options of resets, and actions without a fixed spec.

Between processes a payload is a `envactors.mailbox.bundle` of pickled parts, one per env, so that one that cannot be
unpickled fails only its env. Within one process it is a list of copied objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from envactors.mailbox import bundle
from envactors.mailbox.messages import Failure
from envactors.mailbox.pickling import copy_value, dumps, loads

# Marks the number of a part that is a failure in place of a payload.
_FAILED = 1 << 31


def make_payload(value: Any, *, pickles: bool) -> Any:
    """Return a value as it travels.

    Raises:
        Exception: It does not pickle, or cannot be copied.
    """
    return bytes(dumps(value)) if pickles else copy_value(value)


def pack_payloads(parts: Sequence[tuple[int, Any]], *, pickles: bool) -> Any:
    """Return the payload of a `Kind.PAYLOADS` frame.

    Args:
        parts: The payload of each env, with the env's position in its actor.
        pickles: Whether they are pickled.
    """
    return bundle.pack(parts) if pickles else [(position, copy_value(content)) for position, content in parts]


def unpack_payloads(payload: Any) -> Iterator[tuple[int, Any]]:
    """Yield the position of each env, and its payload: pickled, an object, or a failure."""
    if isinstance(payload, list):
        yield from payload
        return
    for number, content in bundle.unpack(payload):
        yield number & ~_FAILED, Failure(*loads(content)) if number & _FAILED else content


def failed_payload(number: int, failure: Failure) -> tuple[int, bytes | bytearray]:
    """Return what stands for the payload of an env that cannot be sent."""
    return number | _FAILED, dumps(tuple(failure))
