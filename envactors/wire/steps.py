"""Steps and their outcomes in frames: packed env by env, so that a value that cannot be pickled fails only its env.

Between processes a payload is a `envactors.wire.bundle`; within one process it is a tuple or list of copied objects.
The type of a payload tells the two apart.

    steps      (1 with stream, else 0, nothing)  (env's position, pickled item) ...
    outcomes   (env's position, checksum and whether it failed)  (env's position, pickled transition or failure) ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from envactors.wire import bundle
from envactors.wire.copying import copy_value
from envactors.wire.messages import Failure, Fault, PickledItem, Reset, Step, StepOutcome, Steps
from envactors.wire.pickling import dumps, loads, pack_failure

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
        steps: The steps and resets; items that are pickled already are used as they are.
        pickles: Whether the frame goes to another process.

    Raises:
        Exception: An item does not pickle, or cannot be copied.
    """
    if not pickles:
        return Steps([item if isinstance(item, PickledItem) else copy_item(item) for item in steps.items], steps.stream)
    items = [item if isinstance(item, PickledItem) else pack_item(item) for item in steps.items]
    return bundle.pack([(int(steps.stream), b""), *items])


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
        items = ((item.env, item.payload if isinstance(item, PickledItem) else item) for item in payload.items)
        return payload.stream, [(env, item if isinstance(item, tuple) else _load_item(item)) for env, item in items]
    (stream, _), *parts = bundle.unpack(payload)
    return bool(stream), [(env, _load_item(part)) for env, part in parts]


def _load_item(pickled: bytes | bytearray | memoryview) -> Step | Reset | Failure:
    try:
        item: Step | Reset = loads(pickled)
    except BaseException as error:  # unpickling runs any code
        return pack_failure(error, Fault.ARGUMENTS)
    return item


class ReceivedOutcome(NamedTuple):
    """An outcome that is not unpickled yet; its checksum and whether it is a failure can be read before."""

    check: int
    failed: bool
    content: Any

    def load(self) -> StepOutcome:
        """Return the outcome.

        Raises:
            BaseException: Whatever unpickling raises.
        """
        content = self.content if isinstance(self.content, tuple) else loads(self.content)
        return StepOutcome(self.check, None, content) if self.failed else StepOutcome(self.check, content, None)


class OutcomePacker:
    """Collects the outcomes of a `Kind.STEPS` frame until they are sent.

    Args:
        pickles: Whether they go to another process.
    """

    def __init__(self, pickles: bool) -> None:
        self._pickles = pickles
        self._ready: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add_transition(self, env: int, check: int, transition: tuple[Any, ...]) -> None:
        """Add the result of an env's item.

        Raises:
            Exception: The result does not pickle or cannot be copied, and nothing was added.
        """
        if self._pickles:
            content: Any = dumps(transition)
        else:
            content = tuple([copy_value(part) for part in transition])
        self._add(env, check, False, content)

    def add_failure(self, env: int, check: int, failure: Failure) -> None:
        """Add the failure of an env's item."""
        self._add(env, check, True, dumps(tuple(failure)) if self._pickles else tuple(failure))

    def _add(self, env: int, check: int, failed: bool, content: Any) -> None:
        if self._pickles:
            self._ready += (env, _HEAD.pack(check, failed)), (env, content)
        else:
            self._ready.append((env, ReceivedOutcome(check, failed, content)))

    def take_payload(self) -> Any:
        """Return the payload of a `Kind.OUTCOMES` frame with the outcomes that were added since the last call."""
        ready, self._ready = self._ready, []
        return bundle.pack(ready) if self._pickles else ready


def unpack_outcomes(payload: Any) -> Iterator[tuple[int, ReceivedOutcome]]:
    """Yield the outcomes of a `Kind.OUTCOMES` frame, each with its env's position."""
    if isinstance(payload, list):
        yield from payload
        return
    parts: Iterable[tuple[int, memoryview]] = iter(bundle.unpack(payload))
    for (env, head), (_, content) in zip(parts, parts, strict=True):
        check, failed = _HEAD.unpack(head)
        yield env, ReceivedOutcome(check, failed, content)
