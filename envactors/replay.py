"""Journals: the requests of an env since its last seeded reset, which bring it back in a new process.

A seeded reset begins a journal, and so does a saved state of the env. Later steps, resets, calls, and attributes are
added in the order in which the worker ran them. A new process repeats them, as the message
`envactors.mailbox.messages.Replay` tells it. The worker computes a checksum over all observations, and compares it with
that of the journal: if they are equal, the env is at the same point again.

Two requests before the crash, for example, make this journal:

    reset(seed=7)   begins it: can_replay is True, and the first entry is the message of the reset
    step(1)         the second entry has the bytes of the action; further steps lengthen this entry
    step(2)         crashes, so it is not recorded, and `count_crash` notes that the request after the entries crashed
    (the replay)    repeats the reset and step(1), and finds the same checksum
    step(2)         runs again. If it crashes again, `can_retry` is False, and `is_poison` is True

Everything here happens under the lock of the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from envactors.mailbox.messages import Attach, Kind, Pickled, RecordedSteps, Replay, Set
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.slab import BUFFER, RESET, Slab
from envactors.mailbox.specs import reader

# In bytes. A larger entry costs more than one step, so that the limit of the cost bounds the memory, too.
_SIZE_PER_COST = 1024


class PostedRequest(NamedTuple):
    """A step or reset that was posted in a row.

    Attributes:
        op: The operation, in the bits of `envactors.mailbox.slab`.
        seed: The seed; None if there was none.
        payload: The action, or the options of a reset, pickled; None if the row had everything.
        resets_within_step: Whether a step that ends the episode also resets the env.
        actions: The array of all envs' actions, for each leaf of the action.
    """

    op: int
    seed: int | None
    payload: bytes | None
    resets_within_step: bool
    actions: Sequence[npt.NDArray[Any]]

    @property
    def is_reset(self) -> bool:
        """Whether it is a reset."""
        return bool(self.op & RESET)

    @property
    def is_seeded_reset(self) -> bool:
        """Whether it is a reset with a seed."""
        return self.is_reset and self.seed is not None


class Journal:
    """The requests of one env since its last seeded reset.

    Args:
        position: The position of the env in its actor.
        limit: The largest cost of all entries. A step or a call costs 1, and 1 more for each KiB that it takes.
        save_every: At which multiples of ``age`` the state of the env is to be saved; None for never.
        on_save_due: Called when that is due.

    Attributes:
        can_replay: Whether it leads from a seeded reset, or a saved state, to where the env is now.
        age: How many steps and calls have come since the journal last began, or was last forgotten. Calls count only
            while ``can_replay``: a journal without a start does not record them.
    """

    def __init__(
        self, position: int, limit: int, save_every: int | None = None, on_save_due: Callable[[], object] = lambda: None
    ) -> None:
        self.can_replay: bool = False
        self.age: int = 0
        self._position = position
        self._limit = limit
        self._save_every = save_every
        self._on_save_due = on_save_due
        self._cost = 0
        # The worker's checksum over all observations since the journal began.
        self._checksum = 0
        # Consecutive steps in rows, or the kind and the payload of another request.
        self._entries: list[RecordedSteps | tuple[int, bytes]] = []
        # Attributes that were set before the journal began: pickled `Set` messages by name.
        self._attributes: dict[str, bytes] = {}
        # The cost of all entries when the request after them crashed; None if it did not. While the cost is the same,
        # the next request is a retry of that one.
        self._cost_at_crash: int | None = None
        # Whether the last replay has ended its process.
        self._has_crashed_in_replay = False

    # Recording -------------------------------------------------------------------------------------------

    def record_call(self, kind: int, payload: bytes, *, failed: bool) -> None:
        """Record a call, or an attribute that was set."""
        if kind == Kind.CALL or (kind == Kind.SET and not failed):
            self._record_message(kind, payload, self._checksum)

    def record_row(self, slab: Slab, index: int, posted: PostedRequest) -> None:
        """Record a step or a reset from its complete row."""
        op, seed, payload, resets_within_step, _ = posted
        is_reset = posted.is_reset
        checksum = int(slab.checksums[op & BUFFER, index])
        was_reset = resets_within_step and not is_reset and slab.ends_episode(index, op)
        if seed is not None and (was_reset or is_reset):
            self.begin(seed, checksum, None if was_reset or payload is None else Pickled(payload))
        elif payload is not None:
            self.record_request(posted, checksum)
        else:
            self.record_steps([array[index].tobytes() for array in slab.actions], bytes([is_reset]), checksum)

    def record_request(self, posted: PostedRequest, checksum: int) -> None:
        """Record a step whose action is a payload, or a reset without a seed."""
        content = None if posted.payload is None else Pickled(posted.payload)
        self._record_message(*self._message_of(posted, content), checksum)

    def begin(self, seed: int, checksum: int, options: Pickled | None = None) -> None:
        """Begin anew with a seeded reset."""
        self._begin(Kind.RESET, (self._position, seed, options), checksum)

    def begin_with_state(self, checksum: int, state: bytes) -> None:
        """Begin anew with a state of the env, which a worker has saved or restored."""
        self._begin(Kind.RESTORE, (self._position, checksum, state), checksum)

    def _begin(self, kind: Kind, message: tuple[Any, ...], checksum: int) -> None:
        self.forget()
        self.can_replay, self._checksum = True, checksum
        self._entries = [(kind, bytes(dumps(message)))]

    def record_steps(self, actions: Sequence[bytes], resets: bytes, checksum: int) -> None:
        """Record one or more consecutive steps, whose actions have a place in rows, and resets without a seed.

        Args:
            actions: Their actions, for each leaf of the action.
            resets: Whether each of them is a reset.
            checksum: The checksum after the last one.
        """
        if not self.can_replay:
            self._add_age(len(resets))
            return
        steps = self._entries[-1]
        if not isinstance(steps, RecordedSteps):
            steps = RecordedSteps([bytearray() for _ in actions], bytearray())
            self._entries.append(steps)
        for column, content in zip(steps.columns, actions, strict=True):
            column.extend(content)
        steps.resets.extend(resets)
        self._grow(checksum, sum(map(len, actions)), len(resets))

    def record_failed(self, request: tuple[int, bytes]) -> None:
        """Record a step that has raised in an env whose episode continues."""
        self._record_message(*request, self._checksum)

    def _record_message(self, kind: int, payload: bytes, checksum: int) -> None:
        if self.can_replay:
            self._entries.append((kind, payload))
            self._grow(checksum, len(payload))
        elif kind == Kind.SET:
            self._attributes[Set(*loads(payload)).name] = payload
        elif kind in (Kind.RESET, Kind.STEP):
            self._add_age(1)

    def _grow(self, checksum: int, size: int, count: int = 1) -> None:
        """Add entries of this size in bytes to the cost and the age; forget everything if the cost is too high."""
        self._checksum = checksum
        self._cost += count + size // count // _SIZE_PER_COST * count
        self._add_age(count)
        if self._cost > self._limit:
            self.forget()

    def _add_age(self, count: int) -> None:
        """Add to the age. At multiples of ``save_every`` a save is due, which also gives a new journal its start."""
        before, every = self.age, self._save_every
        self.age += count
        if every is not None and self.age // every > before // every:
            self._on_save_due()

    def forget_all(self) -> None:
        """Discard requests and attributes: a new process has none of them."""
        self.forget()
        self._attributes = {}

    def forget(self) -> None:
        """Discard all requests, but keep the attributes that they set.

        Only a seeded reset or a saved state begins the journal again.
        """
        for entry in self._entries:
            if not isinstance(entry, RecordedSteps) and entry[0] == Kind.SET:
                self._attributes[Set(*loads(entry[1])).name] = entry[1]
        self._entries = []
        self._cost = self.age = 0
        self._cost_at_crash = None
        self._has_crashed_in_replay = False
        self.can_replay = False

    # Replaying -------------------------------------------------------------------------------------------

    def replay_message(self, attach: Attach) -> Replay | None:
        """Return the message that brings the env to where it was; None if there is nothing to repeat.

        If requests cannot be replayed, it only sets the attributes.
        """
        attributes = list(self._attributes.values())
        if not self.can_replay and not attributes:
            return None
        action, resets_within_step = attach.layout.action, attach.resets_within_step
        return Replay(self._position, attributes, action, resets_within_step, self._entries, self._checksum)

    def can_retry(self, failed: PostedRequest) -> bool:
        """Return whether a request that has failed may run once more: its first attempt has failed, not its second."""
        return (self.can_replay or failed.is_seeded_reset) and self._cost_at_crash != self._cost

    def count_crash(self) -> None:
        """Record that the request after the recorded ones has failed for the first time."""
        self._cost_at_crash = self._cost

    def forget_crash(self) -> None:
        """Forget that the next request has failed before: it was withdrawn, and the next one may be another."""
        self._cost_at_crash = None

    def record_replay(self, *, crashed: bool, is_same: bool = True) -> None:
        """Record the end of a replay.

        A replay that has crashed is tried once more. After a second crash in a row, or if the env has reached another
        point, the journal forgets its requests. It keeps that the request after them has failed: if that is a seeded
        reset, it needs no replay, and is still tried only twice.

        Args:
            crashed: Whether the replay has ended its process.
            is_same: Whether the env has reached the same point.
        """
        if (crashed and self._has_crashed_in_replay) or not is_same:
            is_retry = self._cost_at_crash == self._cost
            self.forget()
            self._cost_at_crash = self._cost if is_retry else None
        self._has_crashed_in_replay = crashed and self.can_replay

    def is_poison(self, failed: PostedRequest) -> bool:
        """Return whether this is the second attempt of a request to fail after the same inputs."""
        return (self.can_replay or failed.is_seeded_reset) and not self.can_retry(failed)

    def request_message(self, attach: Attach, index: int, posted: PostedRequest) -> tuple[int, bytes]:
        """Return the message that repeats a step or a reset: its kind, and its fields, pickled.

        Args:
            attach: The message that has workers use the rows.
            index: The env.
            posted: The request.
        """
        content = posted.payload
        if content is None and not posted.is_reset and attach.layout.action is not None:
            content = bytes(dumps(reader(attach.layout.action, posted.actions, index)()))
        return self._message_of(posted, None if content is None else Pickled(content))

    def _message_of(self, posted: PostedRequest, content: Pickled | None) -> tuple[int, bytes]:
        if posted.is_reset:
            return Kind.RESET, bytes(dumps((self._position, posted.seed, content)))
        return Kind.STEP, bytes(dumps((self._position, content, posted.resets_within_step, posted.seed)))
