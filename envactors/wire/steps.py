"""Steps and their outcomes in frames: packed env by env, so that a value that cannot be pickled fails only its env.

Between processes a payload is a `envactors.wire.bundle`; within one process it is a tuple or list of copied objects.
The type of a payload tells the two apart.

    steps      (env's position, marked if it is a reset, and if results stream; its fields, pickled) ...
    outcomes   (env's position, marked if it has failed or was reset within its step, with a checksum; a transition's
               or failure's fields) ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from envactors.wire import bundle
from envactors.wire.messages import Failure, Fault, PickledItem, Reset, Step, Steps
from envactors.wire.pickling import copy_value, dumps, loads, pack_failure

# The parts of a part's number: the lowest 30 bits are the env's position, the highest 32 the checksum.
_MARK, _STREAM, _POSITION, _CHECK_SHIFT = 1 << 31, 1 << 30, (1 << 30) - 1, 32
_RESET_WITHIN = _STREAM  # of an outcome


def pack_item(item: Step | Reset) -> PickledItem:
    """Pickle one item.

    Raises:
        Exception: The item does not pickle.
    """
    # As a plain tuple, which pickles and unpickles in a fraction of the time that a named one takes.
    return PickledItem(item.env | _MARK if isinstance(item, Reset) else item.env, dumps(tuple(item)))


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
        return bundle.pack(((number | _STREAM, item) for number, item in items) if steps.stream else items)
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
    parts = list(bundle.unpack(payload))
    stream = any(number & _STREAM for number, _ in parts)
    return stream, [(number & _POSITION, _load_item(number, part)) for number, part in parts]


def _load_item(number: int, pickled: bytes | bytearray | memoryview) -> Step | Reset | Failure:
    try:
        fields = loads(pickled)
    except BaseException as error:  # unpickling runs any code
        return pack_failure(error, Fault.ARGUMENTS)
    return Reset(*fields) if number & _MARK else Step(*fields)


class Outcome(NamedTuple):
    """The outcome of one item.

    Attributes:
        check: The checksum over the env's observations since its last seeded reset, 0 without a journal.
        failed: Whether the content is a `Failure`'s fields rather than a `Transition`'s.
        content: These fields, or their pickle.
        reset_within: Whether the step has ended an episode and reset the env.
    """

    check: int
    failed: bool
    content: Any
    reset_within: bool = False


class OutcomePacker:
    """Collects the outcomes of a `Kind.STEPS` frame until they are sent.

    Args:
        pickles: Whether they go to another process.
    """

    def __init__(self, pickles: bool) -> None:
        self.pickles = pickles
        self._ready: list[tuple[int, Outcome]] = []

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add_transition(self, env: int, check: int, transition: tuple[Any, ...], *, reset_within: bool = False) -> None:
        """Add the result of an env's item; for ``reset_within`` see `Outcome`.

        Raises:
            Exception: The result does not pickle or cannot be copied, and nothing was added.
        """
        content = dumps(transition) if self.pickles else tuple([copy_value(part) for part in transition])
        self._ready.append((env, Outcome(check, False, content, reset_within)))

    def add_failure(self, env: int, check: int, failure: Failure) -> None:
        """Add the failure of an env's item."""
        content = dumps(tuple(failure)) if self.pickles else tuple(failure)
        self._ready.append((env, Outcome(check, True, content)))

    def take_payload(self) -> Any:
        """Return the payload of a `Kind.OUTCOMES` frame with the outcomes that were added since the last call."""
        ready, self._ready = self._ready, []
        if not self.pickles:
            return ready
        return bundle.pack(
            (env | _MARK * failed | _RESET_WITHIN * reset_within | check << _CHECK_SHIFT, content)
            for env, (check, failed, content, reset_within) in ready
        )


def failed_outcome(number: int, failure: Failure) -> tuple[int, bytes | bytearray]:
    """Return the part of an outcome that has failed, in place of the part of an item or an outcome."""
    return (number | _MARK) & ~_RESET_WITHIN, dumps(tuple(failure))


def unpack_outcomes(payload: Any) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcomes of a `Kind.OUTCOMES` frame, each with its env's position."""
    if isinstance(payload, list):
        yield from payload
        return
    for number, content in bundle.unpack(payload):
        failed, reset_within = bool(number & _MARK), bool(number & _RESET_WITHIN)
        yield number & _POSITION, Outcome(number >> _CHECK_SHIFT, failed, content, reset_within)
