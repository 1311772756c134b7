"""Journals: all requests of each env since its last seeded reset, from which a new process restores it.

    record ... what has ended is recorded, in the order in which the worker ran it
    replays    a new process has started: one request per env, before all that waits
    can_retry  a step was lost, or has raised: once more, from where the journal ends

With snapshots, a journal begins at the last saved state instead. States are saved at intervals of steps.

All of it happens under the actor's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from envactors.actor.requests import CallRequest
from envactors.actor.slots import Slots
from envactors.mailbox.messages import (
    Attach,
    Frame,
    Kind,
    Pickled,
    RecordedSteps,
    Replay,
    Restore,
    Save,
    Set,
)
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.recorded import inputs_of
from envactors.mailbox.slab import HALF, NO_AUTORESET, PAYLOAD, RESET, SEED, Slab
from envactors.mailbox.specs import reader

# Entries larger than this, in bytes, count as several steps, so that the limit on steps bounds memory too.
_STEP_ROOM = 1024


# Consecutive steps in rows, or the kind and the payload of another request, which is repeated as it was.
Entry = RecordedSteps | tuple[int, bytes]


class Journal:
    """The requests of one env since its last seeded reset.

    Args:
        limit: How many steps it may hold; a call counts as one, and so does each further KiB of either.
        save_every: After how many steps and calls the state of the env is to be saved; None for never.
        save: Called when that is due.

    Attributes:
        whole: Whether it leads from a seeded reset, or a saved state, to where the env stands.
        length: How many steps and calls it has, or would have if it were whole.
    """

    def __init__(self, limit: int, save_every: int | None, save: Callable[[], None]) -> None:
        self.whole: bool = False
        self.length: int = 0
        self._limit = limit
        self._save_every = save_every
        self._save = save
        # The checksum over all observations so far, as the worker computed it.
        self._check = 0
        # What the limit is compared with: it grows with every entry.
        self._size = 0
        # Attributes set before the journal began, pickled `Set` messages by name.
        self._attributes: dict[str, bytes] = {}
        self._entries: list[Entry] = []
        # The size when the request after its end ended a process.
        self._failed_at: int | None = None

    def record(self, call: CallRequest, reply: Frame) -> bool:
        """Record a call with this reply; return False if it is a replay after which the env is not where it was."""
        failed = reply.kind == Kind.FAILED
        if call.kind == Kind.REPLAY:
            same = not failed and bool(loads(reply.payload))
            if not same or not self.whole:
                self.forget()
            return same
        if call.kind in (Kind.SAVE, Kind.RESTORE):
            self._record_state(call, reply)
        if call.kind == Kind.CALL or (call.kind == Kind.SET and not failed):
            self.record_message(call.kind, bytes(call.payload), self._check)
        return True

    def record_row(self, slots: Slots, index: int) -> None:
        """Record a step or reset from its row; a seeded reset starts a new journal.

        Args:
            slots: All envs.
            index: The env.
        """
        autoreset = slots.autoreset == "same_step"
        slab, slot, bits = slots.slab, slots.of[index], slots.ops[index]
        check = int(slab.checks[bits & HALF, index])
        payload = slot.op.payload if slot.op is not None and bits & PAYLOAD else None
        over = bool(slab.terminated[index]) or bool(slab.truncated[index])
        within = autoreset and over and not bits & (NO_AUTORESET | RESET)
        seed = slots.seed_posted(index)
        if seed is not None and (within or bits & RESET):
            options = None if within or payload is None else Pickled(payload)
            self.start_seeded(slot.position, seed, check, options)
        elif payload is not None:
            message: tuple[Any, ...] = slot.position, None, Pickled(payload)
            if not bits & RESET:
                message = (slot.position, Pickled(payload), autoreset and not bits & NO_AUTORESET, None)
            kind = Kind.RESET if bits & RESET else Kind.STEP
            self.record_message(kind, bytes(dumps(message)), check)
        else:
            self.record_step(slab, index, check, resets=bool(bits & RESET))

    def record_step(self, slab: Slab, index: int, check: int, *, resets: bool) -> None:
        """Record a step, or an autoreset without a seed, from its row."""
        if not self.whole:
            self.lengthen(1)  # an env that was never seeded is brought back once its state was saved
            return
        steps, size = self.last_steps(len(slab.actions)), 0
        for column, array in zip(steps.columns, slab.actions):  # noqa: B905 # `strict` takes time, and the counts are equal
            action = array[index].tobytes()
            column.extend(action)
            size += len(action)
        steps.resets.append(resets)
        self.grow(check, size)

    def last_steps(self, columns: int) -> RecordedSteps:
        """Return the entry that the next step is added to, before `grow`."""
        last = self._entries[-1]
        if not isinstance(last, RecordedSteps):
            last = RecordedSteps([bytearray() for _ in range(columns)], bytearray())
            self._entries.append(last)
        return last

    def start_seeded(self, position: int, seed: int, check: int, options: Pickled | None = None) -> None:
        """Begin with a seeded reset."""
        self._start_anew(bytes(dumps((position, seed, options))), check)

    def _record_state(self, request: CallRequest, reply: Frame) -> None:
        """Begin with the state that an env was in when it was saved, or was put into."""
        if reply.kind != Kind.FAILED:
            content = loads(request.payload)
            saved = request.kind == Kind.SAVE
            state = Restore(Save(*content).env, *loads(reply.payload)) if saved else Restore(*content)
            self._start_anew(bytes(dumps(tuple(state))), state.check, Kind.RESTORE)
        elif request.kind == Kind.RESTORE:
            self.forget()  # nobody knows the env's state

    def _start_anew(self, payload: bytes, check: int, kind: Kind = Kind.RESET) -> None:
        """Begin with a seeded reset or a state: nothing before it is needed any more, but for attributes."""
        self.forget()
        self.whole, self._entries, self._check = True, [(kind, payload)], check

    def forget(self) -> None:
        """Discard all requests; attributes are kept."""
        for entry in self._entries:
            if not isinstance(entry, RecordedSteps) and entry[0] == Kind.SET:
                self._set_attribute(entry[1])
        self._entries = []
        self._size = self.length = 0
        self._failed_at = None
        self.whole = False

    def record_message(self, kind: int, payload: bytes, check: int) -> None:
        """Record a request as it was sent."""
        if self.whole:
            self._entries.append((kind, payload))
            self.grow(check, len(payload))
        elif kind == Kind.SET:
            self._set_attribute(payload)
        elif kind in (Kind.RESET, Kind.STEP):
            self.lengthen(1)  # as in `record_step`

    def grow(self, check: int, size: int, steps: int = 1) -> None:
        """Note that steps or another request were added, each of ``size`` bytes; the last one had this checksum."""
        self._check = check
        self._size += steps * (1 + size // _STEP_ROOM)
        self.lengthen(steps)
        if self._size > self._limit:
            self.forget()

    def lengthen(self, steps: int) -> None:
        """Count steps; the state of the env is saved after some number of them."""
        before, every = self.length, self._save_every
        self.length += steps
        if every is not None and self.length // every > before // every:
            self._save()

    def _set_attribute(self, payload: bytes) -> None:
        self._attributes[Set(*loads(payload)).name] = payload

    def can_retry(self, slots: Slots, index: int) -> bool:
        """Return whether what has failed may be tried once more: the same inputs are not tried a third time.

        Args:
            slots: All envs.
            index: The env whose step or reset has failed; a seeded reset needs no journal.
        """
        return (self.whole or _is_seeded_reset(slots, index)) and self._failed_at != self._size

    def count_failure(self) -> None:
        """Count a failure against what comes next."""
        self._failed_at = self._size

    def replay(self, env: int, attach: Attach | None) -> Replay | None:
        """Return what brings the env in a new process to where it was; None if there is nothing to bring back."""
        attributes = list(self._attributes.values())
        if not self.whole and not attributes:
            return None
        action, autoreset = (None, False) if attach is None else (attach.layout.action, attach.autoreset)
        return Replay(env, attributes, action, autoreset, self._entries, self._check)

    def inputs(self, attach: Attach | None, slots: Slots, index: int) -> Callable[[], list[tuple[Any, ...]]] | None:
        """Return a function that returns the requests that reproduce a failure; None if they are not known.

        The failed one is the last. The function runs code of users, and so never under the lock.
        """
        if not (self.whole or _is_seeded_reset(slots, index)):
            return None
        return functools.partial(inputs_of, self.replay(0, attach), _last_input(slots, index))


def _is_seeded_reset(slots: Slots, index: int) -> bool:
    return bool(slots.ops[index] & RESET) and slots.seed_posted(index) is not None


def _last_input(slots: Slots, index: int) -> tuple[Any, ...]:
    slot, bits, layout = slots.of[index], slots.ops[index], slots.slab.layout
    payload = slot.op.payload if slot.op is not None and bits & PAYLOAD else None
    content = None if payload is None else Pickled(payload)  # a reset has one for a large seed alone, too
    if bits & RESET:
        return "reset", slots.seed_posted(index), content
    if content is not None or layout.action is None:
        return "step", content
    return "step", reader(layout.action, slots.slab.actions, index)()


class Journals:
    """The journals of one actor's envs.

    Args:
        first_index: The index of the first env.
        count: How many envs there are.
        limit: How many steps each journal may hold; see `Journal`. None: envs are not replayed, and nothing is
            recorded.
        save_every: After how many steps and calls the state of an env is to be saved; None for never.
        save: Called with the index of an env whose state is to be saved.

    Attributes:
        replays: Whether envs are replayed.
        attach: How the actor's processes use the shared memory, if they do.
        journals: Those of all envs, in order.
    """

    def __init__(
        self, first_index: int, count: int, limit: int | None, save_every: int | None, save: Callable[[int], None]
    ) -> None:
        self.replays: bool = limit is not None
        self.attach: Attach | None = None
        self._first_index = first_index
        self.journals: list[Journal] = [
            Journal(limit or 0, save_every, functools.partial(save, first_index + position))
            for position in range(count)
        ]

    def journal(self, index: int) -> Journal:
        """Return the journal of an env, from its index."""
        return self.journals[index - self._first_index]

    def record_all(self, slots: Slots, indices: Sequence[int]) -> None:
        """Record a step or an autoreset of several envs, whose actions are in their rows."""
        slab, checks = slots.slab, slots.slab.checks.data
        for index in indices:
            journal, bits = self.journals[index - self._first_index], slots.ops[index]
            if bits & SEED:
                journal.record_row(slots, index)
                continue
            check = checks[bits & HALF, index]
            journal.record_step(slab, index, check, resets=bool(bits & RESET))

    def replay_requests(self) -> list[CallRequest]:
        """Return the first requests for a new process; each part of them has its own deadline."""
        requests = []
        for position, journal in enumerate(self.journals):
            message = journal.replay(position, self.attach)
            if message is not None:
                payload, index = dumps(tuple(message)), self._first_index + position
                requests.append(CallRequest("replay", index, kind=Kind.REPLAY, payload=payload))
        return requests
