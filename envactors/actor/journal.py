"""Bringing envs back to where they were lost: everything that each was asked since its last seeded reset.

    record ... what has ended is recorded, in the order in which the worker ran it
    replays    a new process has started: one request per env, before all that waits
    can_retry  a step was lost, or has raised: once more, from where the journal ends

With snapshots it begins at the last one instead: so many steps after another, the state of the env is saved.

All of it happens under the actor's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.actor.batch_step import StepRequest
from envactors.actor.requests import Answer, CallRequest, Request
from envactors.arrays.slab import RESET, Slab
from envactors.arrays.specs import unflatten
from envactors.errors import SerializationError
from envactors.options import Deadlines
from envactors.wire.info_codec import InfoReader
from envactors.wire.messages import (
    REQUESTS,
    Attach,
    Kind,
    PickledItem,
    RecordedSteps,
    Replay,
    Reset,
    Restore,
    Save,
    Set,
    renewed_seed,
)
from envactors.wire.pickling import dumps, loads

_FIRST_ROWS = 64
# Entries larger than this, in bytes, count as several steps, so that the limit on steps bounds memory too.
_STEP_ROOM = 1024


class _StepColumns:
    """Steps in shared memory, one after the other, in arrays that grow."""

    def __init__(self, columns: list[npt.NDArray[Any]], ops: bytes = b"") -> None:
        self._columns = columns
        self._ops = bytearray(ops)
        self.row_size = sum(column[:1].nbytes for column in columns)

    def __len__(self) -> int:
        return len(self._ops)

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
        return RecordedSteps([column[: len(self._ops)] for column in self._columns], bytes(self._ops))


class SavedJournal(NamedTuple):
    """A journal on disk; see `Journal`."""

    whole: bool
    attributes: dict[str, bytes]
    entries: list[RecordedSteps | tuple[int, bytes]]
    check: int


class Journal:
    """What one env was asked since its last seeded reset.

    Args:
        limit: How many steps it may hold; a call counts as one, and so does each further KiB of either.
        save_every: After how many steps and calls the state of the env is to be saved; None for never.

    Attributes:
        whole: Whether it leads from a seeded reset, or a saved state, to where the env stands.
        since: The incarnation in which it begins.
        fresh: Whether the env was not reset yet in the present process: its first reset may have a seed of its own.
        length: How many steps and calls it has, or would have if it were whole.
    """

    def __init__(self, limit: int, save_every: int | None) -> None:
        self.whole = False
        self.since = 0
        self.fresh = True
        self.length = 0
        self._limit = limit
        self._save_every = save_every
        # The checksum over all observations so far, as the worker computed it.
        self._check = 0
        # What the limit is compared with: it grows with every entry.
        self._size = 0
        # Attributes set before the journal began, pickled `Set` messages by name.
        self._attributes: dict[str, bytes] = {}
        self._entries: list[_StepColumns | tuple[int, bytes]] = []
        # The size when the request after its end ended a process.
        self._failed_at: int | None = None
        # The call id of the last request in it.
        self._last_call = 0

    def record(self, answer: Answer, incarnation: int) -> bool:
        """Record the end of a request; return False if it is a replay after which the env is not where it was."""
        request = answer.request
        if isinstance(request, StepRequest):
            if not answer.failed:
                self._record_transition(request, answer, incarnation)
        elif isinstance(request, CallRequest):
            if request.kind == Kind.REPLAY:
                same = not answer.failed and bool(loads(answer.content))
                if same and self.whole:
                    self.fresh = False
                else:
                    self.forget()
                return same
            if request.kind in (Kind.SAVE, Kind.RESTORE):
                self._record_state(request, answer, incarnation)
            if request.kind == Kind.CALL or (request.kind == Kind.SET and not answer.failed):
                self._record_message(request.kind, bytes(request.payload), request.call_id, self._check)
        return True

    def _record_transition(self, request: StepRequest, answer: Answer, incarnation: int) -> None:
        """Record a step or reset in a frame, and the checksum after it; a seeded reset starts anew."""
        message, item, seed = request.message, request.item, None
        assert isinstance(item, PickledItem), "only processes are replayed"
        payload = bytes(item.payload)
        if isinstance(message, Reset):
            seed = message.seed
            if seed is None and self.fresh and incarnation > 0 and message.root_seed is not None:
                seed = renewed_seed(message.root_seed, incarnation)
                payload = bytes(dumps(tuple(message._replace(seed=seed))))
            self.fresh = False
        elif answer.reset_within and message.next_seed is not None:
            seed = message.next_seed
            payload = bytes(dumps(tuple(Reset(message.env, seed, None, None))))
        if seed is None:
            self._record_message(request.kind, payload, request.call_id, answer.check)
        else:
            self._start_anew(payload, request.call_id, answer.check, incarnation)

    def _record_state(self, request: CallRequest, answer: Answer, incarnation: int) -> None:
        """Begin with the state that an env was in when it was saved, or was put into."""
        if request.kind == Kind.SAVE and not answer.failed:
            check, state = loads(answer.content)
            payload = bytes(dumps(tuple(Restore(Save(*loads(request.payload)).env, check, state))))
            # What waits for an earlier process may run in one that is brought to the same point, as before.
            self._start_anew(payload, request.call_id, check, self.since if self.whole else incarnation, Kind.RESTORE)
        elif request.kind == Kind.RESTORE and answer.failed:
            self.forget()  # nobody knows the env's state
        elif request.kind == Kind.RESTORE:
            payload = bytes(request.payload)
            check = Restore(*loads(payload)).check
            self._start_anew(payload, request.call_id, check, incarnation, Kind.RESTORE)
            self.fresh = False

    def _start_anew(self, payload: bytes, call_id: int, check: int, incarnation: int, kind: Kind = Kind.RESET) -> None:
        """Begin with a seeded reset or a state: nothing before it is needed any more, but for attributes."""
        self.forget()
        self.whole, self.since, self._entries = True, incarnation, [(kind, payload)]
        self._check, self._last_call = check, call_id

    def forget(self) -> None:
        """Discard what was asked; attributes are kept."""
        for entry in self._entries:
            if not isinstance(entry, _StepColumns) and entry[0] == Kind.SET:
                self._set_attribute(entry[1])
        self._entries = []
        self._size = self.length = 0
        self._failed_at = None
        self.whole = False

    def save(self) -> SavedJournal:
        """Return it as it goes to disk."""
        return SavedJournal(self.whole, self._attributes, self._recorded_entries(), self._check)

    def load(self, saved: SavedJournal, incarnation: int) -> None:
        """Become one that was saved."""
        self.forget()
        self.whole, self.since, self._check, self._attributes = saved.whole, incarnation, saved.check, saved.attributes
        for entry in saved.entries:
            if isinstance(entry, RecordedSteps):
                columns = _StepColumns(entry.actions, entry.ops)
                self._entries.append(columns)
                self._count(len(columns), columns.row_size)
            else:
                self._entries.append(entry)
                self._count(1, len(entry[1]))

    def _recorded_entries(self) -> list[RecordedSteps | tuple[int, bytes]]:
        return [entry.recorded if isinstance(entry, _StepColumns) else entry for entry in self._entries]

    def _record_message(self, kind: int, payload: bytes, call_id: int, check: int) -> None:
        if self.whole:
            self._entries.append((kind, payload))
            self._grow(call_id, check, len(payload))
        elif kind == Kind.SET:
            self._set_attribute(payload)
        elif kind in (Kind.RESET, Kind.STEP):
            self.length += 1  # an env that was never seeded is brought back once its state was saved

    def record_row(self, rows: Slab, env: int, call_id: int, reset: bytes | None, incarnation: int) -> None:
        """Record a step in shared memory.

        Args:
            rows: The rows.
            env: The env's index.
            call_id: The number of the batch step.
            reset: The pickled `Reset` that began an episode with a seed of its own; None if none began.
            incarnation: The process that has run it.
        """
        if reset is None and not self.whole:
            self.length += 1
            return
        check = int(rows.checks[rows.asked[env] & 1, env])
        if reset is not None:
            self._start_anew(reset, call_id, check, incarnation)
            return
        columns = self._entries[-1]
        if not isinstance(columns, _StepColumns):
            columns = _StepColumns([np.empty((_FIRST_ROWS, *a.shape[1:]), a.dtype) for a in rows.actions])
            self._entries.append(columns)
        columns.add(rows, env)
        self._grow(call_id, check, columns.row_size)

    def _grow(self, call_id: int, check: int, size: int) -> None:
        self._last_call, self._check = call_id, check
        self._count(1, size)
        if self._size > self._limit:
            self.forget()

    def _count(self, steps: int, size: int) -> None:
        self.length += steps
        self._size += steps * (1 + size // _STEP_ROOM)

    @property
    def is_due(self) -> bool:
        """Whether the state of the env is to be saved now."""
        return self._save_every is not None and self.length > 0 and self.length % self._save_every == 0

    def _set_attribute(self, payload: bytes) -> None:
        self._attributes[Set(*loads(payload)).name] = payload

    def can_retry(self, request: StepRequest, error: BaseException | None = None) -> bool:
        """Return whether what has failed may be tried once more: the same inputs are not tried a third time.

        Args:
            request: What has failed; a seeded reset needs no journal.
            error: What it raised, if it did.
        """
        if not (self.whole or request.is_seeded_reset) or self._failed_at == self._size:
            return False
        # A result that cannot be read: the env has done the step, and would do it again.
        return not (isinstance(error, SerializationError) and error.call_id == self._last_call)

    def count_failure(self) -> None:
        """Count a failure against what comes next."""
        self._failed_at = self._size

    def replay(self, env: int, attach: Attach | None) -> Replay | None:
        """Return what brings the env in a new process to where it was; None if there is nothing to bring back."""
        attributes = list(self._attributes.values())
        if not self.whole and not attributes:
            return None
        action, autoreset = (None, False) if attach is None else (attach.layout.action, attach.autoreset)
        return Replay(env, attributes, action, autoreset, self._recorded_entries(), self._check)

    @property
    def begins_with_reset(self) -> bool:
        """Whether a reset is what comes first in it."""
        first = self._entries[0] if self._entries else None
        return isinstance(first, tuple) and first[0] == Kind.RESET

    def loses(self, request: Request, incarnation: int) -> bool:
        """Return whether a request is lost with an incarnation: no other is brought to the point that it was for."""
        bound = request.bound
        return bound is not None and bound <= incarnation and not (self.whole and bound >= self.since)

    def inputs(self, attach: Attach | None, last: StepRequest) -> list[tuple[Any, ...]] | None:
        """Return what reproduces a failure: all that was asked, and what was asked last; None if that is not known."""
        if not (self.whole or last.is_seeded_reset):
            return None
        asked = [_as_input(Kind.SET, Set(*loads(payload))) for payload in self._attributes.values()]
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


class Journals:
    """The journals of one actor's envs.

    Args:
        first_index: The index of the first env.
        count: How many envs there are.
        limit: How many steps each journal may hold; see `Journal`. None: envs are not brought back, and nothing is
            recorded.
        save_every: After how many steps and calls the state of an env is to be saved; None for never.
        save: Called with the index of an env whose state is to be saved.

    Attributes:
        replays: Whether envs are brought back.
        attach: How the actor's processes use the shared memory, if they do.
        journals: Those of all envs, in order.
    """

    def __init__(
        self, first_index: int, count: int, limit: int | None, save_every: int | None, save: Callable[[int], None]
    ) -> None:
        self.replays = limit is not None
        self.attach: Attach | None = None
        self._first_index = first_index
        self._save = save
        self.journals = [Journal(limit or 0, save_every) for _ in range(count)]

    def journal(self, index: int) -> Journal:
        """Return the journal of an env, from its index."""
        return self.journals[index - self._first_index]

    def load(self, saved: Sequence[SavedJournal], incarnation: int) -> None:
        """Have each journal become one that was saved."""
        for journal, one in zip(self.journals, saved, strict=True):
            journal.load(one, incarnation)

    def record(self, answer: Answer, incarnation: int) -> bool:
        """Record the end of a request; see `Journal.record`."""
        if not self.replays:
            return True
        index = answer.request.index
        journal = self.journal(index)
        before, same = journal.length, journal.record(answer, incarnation)
        if journal.length != before and journal.is_due:
            self._save(index)
        return same

    def record_rows(self, rows: Slab, infos: InfoReader, envs: Sequence[int], call_id: int, incarnation: int) -> None:
        """Record steps that have ended in shared memory, without those that have raised."""
        for env in envs if self.replays else ():
            if not infos.failed(env):
                reset = self._seeded_reset(rows, env) if rows.layout.seeded else None
                journal = self.journal(env)
                journal.record_row(rows, env, call_id, reset, incarnation)
                if journal.is_due:
                    self._save(env)

    def _seeded_reset(self, rows: Slab, env: int) -> bytes | None:
        """Return the pickled reset by which an env has begun an episode in its row; None if it has begun none."""
        assert self.attach is not None, "rows are attached"
        within = self.attach.autoreset and (rows.terminated[env] or rows.truncated[env])
        if not within and rows.ops[env] != RESET:
            return None
        return bytes(dumps((env - self._first_index, int(rows.seeds[env]), None, None)))

    def replay_requests(self, deadlines: Deadlines) -> list[CallRequest]:
        """Return what a new process is asked first."""
        requests = []
        for position, journal in enumerate(self.journals):
            journal.fresh = True
            message = journal.replay(position, self.attach)
            if message is not None:
                # The worker says on its page what it is at; each part has its own deadline, this is that of the first.
                resets = not message.attributes and journal.begins_with_reset
                timeout = deadlines.of("reset" if resets else "call")
                payload, index = dumps(tuple(message)), self._first_index + position
                requests.append(CallRequest("replay", index, timeout, kind=Kind.REPLAY, payload=payload))
        return requests
