"""The entries of a journal: runs of steps, as arrays of actions, and single requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from envactors.mailbox.messages import RECORDED_RESET, REQUESTS, Kind, Pickled, RecordedSteps
from envactors.mailbox.pickling import content_of, dumps, loads
from envactors.mailbox.slab import Slab
from envactors.mailbox.specs import Spec, unflatten


class Message:
    """A request that is repeated as it was: a reset, a call, a step whose action does not fit into a row."""

    columns: ClassVar[None] = None
    steps = 1

    def __init__(self, kind: int, payload: bytes) -> None:
        self.recorded: tuple[int, bytes] = kind, payload
        self.size: int = len(payload)
        self.attribute: bytes | None = payload if kind == Kind.SET else None
        self.resets: bool = kind == Kind.RESET

    def inputs(self, _action: Spec | None) -> Iterator[tuple[Any, ...]]:
        kind, payload = self.recorded
        yield as_input(kind, REQUESTS[kind](*loads(payload)))


class StepColumns:
    """Steps in shared memory, one after the other: the bytes of their actions, leaf by leaf.

    Args:
        columns: The actions so far, an array of shape (k, ...) per leaf.
        ops: For each step, whether it was a reset.
    """

    attribute: ClassVar[None] = None
    resets = False

    def __init__(self, columns: Sequence[npt.NDArray[Any]], ops: bytes = b"") -> None:
        self._outlines = [(column.dtype, column.shape[1:]) for column in columns]
        self._columns = [bytearray(column.tobytes()) for column in columns]
        self._ops = bytearray(ops)
        self.size: int = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._outlines)

    @property
    def columns(self) -> StepColumns:
        return self

    @property
    def steps(self) -> int:
        return len(self._ops)

    def add(self, rows: Slab, env: int, resets: bool) -> None:
        for number, array in enumerate(rows.actions):
            self._columns[number] += array[env].tobytes()
        self._ops.append(RECORDED_RESET if resets else 0)

    def extend(self, columns: Sequence[npt.NDArray[Any]], ops: bytes) -> None:
        """Add several steps at once."""
        for number, added in enumerate(columns):
            self._columns[number] += added.astype(self._outlines[number][0], copy=False).tobytes()
        self._ops += ops

    @property
    def recorded(self) -> RecordedSteps:
        outlined = zip(self._columns, self._outlines, strict=True)
        columns = [np.ndarray((len(self._ops), *shape), dtype, bytearray(data)) for data, (dtype, shape) in outlined]
        return RecordedSteps(columns, bytes(self._ops))

    def inputs(self, action: Spec | None) -> Iterator[tuple[Any, ...]]:
        columns = self.recorded.actions
        for row, resets in enumerate(self._ops):
            if resets:
                yield "reset", None, None
            else:
                assert action is not None, "actions in rows have a spec"
                yield "step", unflatten(action, iter([column[row] for column in columns]))


def as_messages(
    position: int, actions: npt.NDArray[Any], resets: npt.NDArray[np.bool_], autoreset: bool
) -> Iterator[tuple[int, bytes]]:
    """Yield steps and resets of an env whose actions have no place in rows as requests: their kinds and payloads."""
    for action, is_reset in zip(actions, resets.tolist(), strict=True):
        if is_reset:
            yield Kind.RESET, bytes(dumps((position, None, None)))
        else:
            yield Kind.STEP, bytes(dumps((position, Pickled(bytes(dumps(action))), autoreset, None)))


def as_input(kind: int, message: Any) -> tuple[Any, ...]:
    """Return a request as errors show it: its method and arguments."""
    if kind == Kind.RESET:
        return "reset", message.seed, content_of(message.options)
    if kind == Kind.STEP:
        return "step", content_of(message.action)
    return (Kind(kind).name.lower(), *message[1:])
