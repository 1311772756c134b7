"""What one env was asked since its last seeded reset, so that a new process can bring it to where it was lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.batch_step import StepRequest
from envactors.arrays.slab import Slab
from envactors.arrays.specs import unflatten
from envactors.errors import SerializationError
from envactors.wire.messages import REQUESTS, Attach, Kind, RecordedSteps, Replay, Set
from envactors.wire.pickling import loads

_FIRST_ROWS = 64
# Entries larger than this, in bytes, count as several steps, so that the limit on steps bounds memory too.
_STEP_ROOM = 1024


class _StepColumns:
    """Steps in shared memory, one after the other, in arrays that grow."""

    def __init__(self, rows: Slab) -> None:
        self._columns = [np.empty((_FIRST_ROWS, *array.shape[1:]), array.dtype) for array in rows.actions]
        self._ops = bytearray()
        self.row_size = sum(column[0].nbytes for column in self._columns)

    def add(self, rows: Slab, env: int) -> None:
        row = len(self._ops)
        for number, array in enumerate(rows.actions):
            column = self._columns[number]
            if row == len(column):
                column = self._columns[number] = np.concatenate([column, np.empty_like(column)])
            column[row] = array[env]
        self._ops.append(rows.ops[env])

    @property
    def recorded(self) -> RecordedSteps:
        actions: list[npt.NDArray[Any]] = [column[: len(self._ops)] for column in self._columns]
        return RecordedSteps(actions, bytes(self._ops))


class Journal:
    """What one env was asked since its last seeded reset.

    Args:
        limit: How many steps it may hold; a call counts as one, and so does each further KiB of either.

    Attributes:
        whole: Whether it leads from a seeded reset to where the env stands.
        since: The incarnation in which it begins.
    """

    def __init__(self, limit: int) -> None:
        self.whole = False
        self.since = 0
        self._limit = limit
        # The checksum over all observations so far, as the worker computed it.
        self._check = 0
        # What the limit is compared with.
        self._size = 0
        # Attributes set before the journal began, pickled `Set` messages by name.
        self._attributes: dict[str, bytes] = {}
        self._entries: list[_StepColumns | tuple[int, bytes]] = []
        # How many requests it holds; and how many it held when the one after them ended a process.
        self._length = 0
        self._failed_at: int | None = None
        # The call id of the last request in it.
        self._last_call = 0

    def begin(self, payload: bytes, incarnation: int, call_id: int, check: int) -> None:
        """Start anew with a seeded reset."""
        self.forget()
        self.whole, self.since = True, incarnation
        self._entries = [(Kind.RESET, payload)]
        self._length, self._last_call, self._check = 1, call_id, check

    def forget(self) -> None:
        """Discard what was asked; attributes are kept."""
        for entry in self._entries:
            if isinstance(entry, tuple) and entry[0] == Kind.SET:
                self._set_attribute(entry[1])
        self._entries = []
        self._size = self._length = 0
        self._failed_at = None
        self.whole = False

    def record_message(self, kind: int, payload: bytes, call_id: int, check: int | None = None) -> None:
        """Record a request that has ended; a reset or a step comes with the checksum after it."""
        if not self.whole:
            if kind == Kind.SET:
                self._set_attribute(payload)
            return
        self._entries.append((kind, payload))
        self._grow(call_id, check, len(payload))

    def record_row(self, rows: Slab, env: int, call_id: int) -> None:
        """Record a step in shared memory."""
        if not self.whole:
            return
        if not self._entries or not isinstance(columns := self._entries[-1], _StepColumns):
            columns = _StepColumns(rows)
            self._entries.append(columns)
        columns.add(rows, env)
        self._grow(call_id, int(rows.checks[rows.requested[env] & 1, env]), columns.row_size)

    def _grow(self, call_id: int, check: int | None, size: int) -> None:
        self._last_call = call_id
        if check is not None:
            self._check = check
        self._length += 1
        self._size += 1 + size // _STEP_ROOM
        if self._size > self._limit:
            self.forget()

    def _set_attribute(self, payload: bytes) -> None:
        self._attributes[Set(*loads(payload)).name] = payload

    def can_retry(self, *, seeded: bool, error: BaseException | None = None) -> bool:
        """Return whether what has failed may be tried once more: the same inputs are not tried a third time.

        Args:
            seeded: Whether it is a seeded reset, which needs no journal.
            error: What it raised, if it did.
        """
        if not (self.whole or seeded) or self._failed_at == self._length:
            return False
        # A result that cannot be read: the env has done the step, and would do it again.
        return not (isinstance(error, SerializationError) and error.call_id == self._last_call)

    def count_failure(self) -> None:
        """Count a failure against what comes next."""
        self._failed_at = self._length

    def replay(self, env: int, attach: Attach | None) -> Replay | None:
        """Return what brings the env in a new process to where it was; None if there is nothing to bring back."""
        attributes = list(self._attributes.values())
        if not self.whole and not attributes:
            return None
        entries = [entry.recorded if isinstance(entry, _StepColumns) else entry for entry in self._entries]
        action, autoreset = (None, False) if attach is None else (attach.layout.action, attach.autoreset)
        return Replay(env, attributes, action, autoreset, entries, self._check)

    def inputs(self, attach: Attach | None, last: StepRequest) -> list[tuple[Any, ...]]:
        """Return what reproduces a failure: everything that was asked, and what was asked last."""
        asked: list[tuple[Any, ...]] = [("set", *Set(*loads(payload))[1:]) for payload in self._attributes.values()]
        for entry in self._entries:
            if isinstance(entry, _StepColumns):
                assert attach is not None, "steps in shared memory have a layout"
                columns, ops = entry.recorded
                for row, resets in enumerate(ops):
                    action = unflatten(attach.layout.action, iter([column[row] for column in columns]))
                    asked.append(("reset", None, None) if resets else ("step", action))
            else:
                asked.append(_as_input(entry[0], REQUESTS[entry[0]](*loads(entry[1]))))
        return [*asked, _as_input(last.kind, last.message)]


def _as_input(kind: int, message: Any) -> tuple[Any, ...]:
    if kind == Kind.RESET:
        return "reset", message.seed, message.options
    if kind == Kind.STEP:
        return "step", message.action
    return (Kind(kind).name.lower(), *message[1:])
