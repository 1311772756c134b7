"""Steps and their outcomes in frames: packed env by env, so that a value that cannot be pickled fails only its env.

Between processes a payload is a `envactors.wire.bundle`; within one process it is a tuple or list of copied objects.
The type of a payload tells the two apart.

    steps      (1 with stream, else 0, nothing)  (env's position, pickled item) ...
    outcomes   (env's position, checksum and whether it failed)  (env's position, pickled transition or failure) ...
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from envactors.wire import bundle
from envactors.wire.messages import Failure, Fault, PickledItem, Reset, Step, Steps
from envactors.wire.pickling import copy_value, dumps, loads, pack_failure

# The checksum, and whether the env has failed.
_HEAD = struct.Struct("<I?")


def pack_item(item: Step | Reset) -> PickledItem:
    """Pickle one item.

    Raises:
        Exception: The item does not pickle.
    """
    return PickledItem(item.env, dumps(item))


def pack_steps(steps: Steps, pickles: bool) -> Any:
    """Return the payload of a `Kind.STEPS` frame.

    Args:
        steps: The steps and resets, pickled if the frame goes to another process.
        pickles: Whether it does.

    Raises:
        Exception: An item cannot be copied.
    """
    items: Sequence[Any] = steps.items
    if pickles:
        return bundle.pack([(int(steps.stream), b""), *items])
    return Steps([copy_item(item) for item in items], steps.stream)


def copy_item(item: Step | Reset) -> Step | Reset:
    """Return an item whose action or options are copies.

    Raises:
        Exception: They cannot be copied.
    """
    if isinstance(item, Step):
        return item._replace(action=copy_value(item.action))
    return item._replace(options=copy_value(item.options))


def unpack_steps(payload: Any) -> tuple[bool, list[tuple[int, Step | Reset | Failure]]]:
    """Return whether the outcomes are streamed, and each item with its env's position.

    An item that cannot be unpickled is a `Failure`.
    """
    if isinstance(payload, Steps):
        items: Sequence[Any] = payload.items
        return payload.stream, [(item.env, item) for item in items]
    (stream, _), *parts = bundle.unpack(payload)
    return bool(stream), [(env, _load_item(part)) for env, part in parts]


def _load_item(pickled: bytes | bytearray | memoryview) -> Step | Reset | Failure:
    try:
        item: Step | Reset = loads(pickled)
    except BaseException as error:  # unpickling runs any code
        return pack_failure(error, Fault.ARGUMENTS)
    return item


class Outcome(NamedTuple):
    """The outcome of one item.

    Attributes:
        check: The checksum over the env's observations since its last seeded reset, 0 without a journal.
        failed: Whether the content is a `Failure`'s fields rather than a `Transition`'s.
        content: These fields, or their pickle.
    """

    check: int
    failed: bool
    content: Any


class OutcomePacker:
    """Collects the outcomes of a `Kind.STEPS` frame until they are sent.

    Args:
        pickles: Whether they go to another process.
    """

    def __init__(self, pickles: bool) -> None:
        self._pickles = pickles
        self._ready: list[tuple[int, Outcome]] = []

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add_transition(self, env: int, check: int, transition: tuple[Any, ...]) -> None:
        """Add the result of an env's item.

        Raises:
            Exception: The result does not pickle or cannot be copied, and nothing was added.
        """
        content = dumps(transition) if self._pickles else tuple([copy_value(part) for part in transition])
        self._ready.append((env, Outcome(check, False, content)))

    def add_failure(self, env: int, check: int, failure: Failure) -> None:
        """Add the failure of an env's item."""
        content = dumps(tuple(failure)) if self._pickles else tuple(failure)
        self._ready.append((env, Outcome(check, True, content)))

    def take_payload(self) -> Any:
        """Return the payload of a `Kind.OUTCOMES` frame with the outcomes that were added since the last call."""
        ready, self._ready = self._ready, []
        if not self._pickles:
            return ready
        pairs = [((env, _HEAD.pack(check, failed)), (env, content)) for env, (check, failed, content) in ready]
        return bundle.pack(itertools.chain.from_iterable(pairs))


def unpack_outcomes(payload: Any) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcomes of a `Kind.OUTCOMES` frame, each with its env's position."""
    if isinstance(payload, list):
        yield from payload
        return
    parts = bundle.unpack(payload)
    for (env, head), (_, content) in zip(parts, parts, strict=True):
        check, failed = _HEAD.unpack(head)
        yield env, Outcome(check, failed, content)
