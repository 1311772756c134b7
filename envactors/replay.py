"""Journals: the requests of an env since its last seeded reset, which bring it back in a new process.

A seeded reset begins a journal, and so does a saved state of the env. Later steps, resets, calls, and attributes are
added in the order in which the worker ran them. A new process repeats them (`envactors.mailbox.messages.Replay`); a
checksum over all observations tells whether the env is at the same point again. Everything here happens under the lock
of the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from envactors.mailbox.messages import Attach, Kind, Pickled, RecordedSteps, Replay, Set
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.slab import BUFFER, RESET, Slab
from envactors.mailbox.specs import reader

# A larger entry, in bytes, counts as several steps, so that the limit on steps bounds the memory, too.
_STEP_SIZE = 1024


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
        limit: How many steps it may hold. A call counts as one, and so does each further KiB of either.
        save_every: After how many steps and calls the state of the env is to be saved; None for never.
        on_save_due: Called when that is due.

    Attributes:
        can_replay: Whether it leads from a seeded reset, or a saved state, to where the env is now.
        length: How many steps and calls it contains; while it cannot replay, how many steps came since it could.
    """

    def __init__(
        self, position: int, limit: int, save_every: int | None = None, on_save_due: Callable[[], object] = lambda: None
    ) -> None:
        self.can_replay: bool = False
        self.length: int = 0
        self._position = position
        self._limit = limit
        self._save_every = save_every
        self._on_save_due = on_save_due
        self._size = 0
        # The checksum over all observations, as the worker has computed it.
        self._check = 0
        # Consecutive steps in rows, or the kind and the payload of another request.
        self._entries: list[RecordedSteps | tuple[int, bytes]] = []
        # Attributes that were set before the journal began: pickled `Set` messages by name.
        self._attributes: dict[str, bytes] = {}
        # The size of the journal at the last crash.
        self._crashed_at: int | None = None
        # Whether the last replay has ended its process.
        self._has_crashed_in_replay = False

    # Recording -------------------------------------------------------------------------------------------

    def record_call(self, kind: int, payload: bytes, *, failed: bool) -> None:
        """Record a call, or an attribute that was set."""
        if kind == Kind.CALL or (kind == Kind.SET and not failed):
            self._record_message(kind, payload, self._check)

    def record_row(self, slab: Slab, index: int, posted: PostedRequest) -> None:
        """Record a step or a reset from its complete row."""
        op, seed, payload, resets_within_step, _ = posted
        is_reset = posted.is_reset
        check = int(slab.checks[op & BUFFER, index])
        was_reset = resets_within_step and not is_reset and slab.ends_episode(index, op)
        if seed is not None and (was_reset or is_reset):
            self.begin(seed, check, None if was_reset or payload is None else Pickled(payload))
        elif payload is not None:
            self._record_message(*self._message_of(posted, Pickled(payload)), check)
        else:
            self.record_step(slab, index, check, is_reset=is_reset)

    def begin(self, seed: int, check: int, options: Pickled | None = None) -> None:
        """Begin anew with a seeded reset."""
        self._begin(Kind.RESET, (self._position, seed, options), check)

    def begin_with_state(self, check: int, state: bytes) -> None:
        """Begin anew with a state of the env, which a worker has saved or restored."""
        self._begin(Kind.RESTORE, (self._position, check, state), check)

    def _begin(self, kind: Kind, message: tuple[Any, ...], check: int) -> None:
        self.forget()
        self.can_replay, self._check = True, check
        self._entries = [(kind, bytes(dumps(message)))]

    def record_step(self, slab: Slab, index: int, check: int, *, is_reset: bool) -> None:
        """Record a step whose action is in its row, or a reset without a seed."""
        if self.can_replay:
            self.record_steps([array[index].tobytes() for array in slab.actions], bytes([is_reset]), check)
        else:
            self._lengthen(1)

    def record_steps(self, actions: Sequence[bytes], resets: bytes, check: int) -> None:
        """Record consecutive steps and resets without a seed.

        Args:
            actions: Their actions, for each leaf of the action.
            resets: Whether each of them is a reset.
            check: The checksum after the last one.
        """
        if not self.can_replay:
            self._lengthen(len(resets))
            return
        steps = self._entries[-1]
        if not isinstance(steps, RecordedSteps):
            steps = RecordedSteps([bytearray() for _ in actions], bytearray())
            self._entries.append(steps)
        for column, content in zip(steps.columns, actions, strict=True):
            column.extend(content)
        steps.resets.extend(resets)
        self._grow(check, sum(map(len, actions)), len(resets))

    def record_failed(self, request: tuple[int, bytes]) -> None:
        """Record a step that has raised in an env whose episode continues."""
        self._record_message(*request, self._check)

    def record_action(self, action: bytes, *, resets_within_step: bool, check: int) -> None:
        """Record a step whose action, which is pickled, does not fit into rows."""
        message = self._position, Pickled(action), resets_within_step, None
        self._record_message(Kind.STEP, bytes(dumps(message)), check)

    def record_reset(self, check: int) -> None:
        """Record a reset without a seed of an env whose actions do not fit into rows."""
        self._record_message(Kind.RESET, bytes(dumps((self._position, None, None))), check)

    def _record_message(self, kind: int, payload: bytes, check: int) -> None:
        if self.can_replay:
            self._entries.append((kind, payload))
            self._grow(check, len(payload))
        elif kind == Kind.SET:
            self._attributes[Set(*loads(payload)).name] = payload
        elif kind in (Kind.RESET, Kind.STEP):
            self._lengthen(1)

    def _grow(self, check: int, size: int, count: int = 1) -> None:
        self._check = check
        self._size += count + size // count // _STEP_SIZE * count
        self._lengthen(count)
        if self._size > self._limit:
            self.forget()

    def _lengthen(self, count: int) -> None:
        """Count steps, also of an env that cannot be replayed before its state is saved."""
        before, every = self.length, self._save_every
        self.length += count
        if every is not None and self.length // every > before // every:
            self._on_save_due()

    def forget_all(self) -> None:
        """Discard the attributes, too: a new process has none of them."""
        self.forget()
        self._attributes = {}

    def forget(self) -> None:
        """Discard all requests but the attributes. Only a seeded reset or a saved state begins the journal again."""
        for entry in self._entries:
            if not isinstance(entry, RecordedSteps) and entry[0] == Kind.SET:
                self._attributes[Set(*loads(entry[1])).name] = entry[1]
        self._entries = []
        self._size = self.length = 0
        self._crashed_at = None
        self._has_crashed_in_replay = False
        self.can_replay = False

    # Replaying -------------------------------------------------------------------------------------------

    def replay(self, attach: Attach) -> Replay | None:
        """Return the message that brings the env to where it was; None if there is nothing to repeat."""
        attributes = list(self._attributes.values())
        if not self.can_replay and not attributes:
            return None
        action, resets_within_step = attach.layout.action, attach.resets_within_step
        return Replay(self._position, attributes, action, resets_within_step, self._entries, self._check)

    def can_retry(self, failed: PostedRequest) -> bool:
        """Return whether a request that has failed may run once more. The same inputs are not tried a third time."""
        return (self.can_replay or failed.is_seeded_reset) and self._crashed_at != self._size

    def count_crash(self) -> None:
        """Record that the request after the last one that is recorded has failed."""
        self._crashed_at = self._size

    def forget_crash(self) -> None:
        """Forget the failure of the next request, since another request may take its place."""
        self._crashed_at = None

    def record_replay(self, *, crashed: bool, is_same: bool = True) -> None:
        """Record the end of a replay. If it cannot succeed, forget the requests, but not that the next one has failed.

        Args:
            crashed: Whether it has ended its process. The second one in a row that has done so is the last.
            is_same: Whether it has reached the same point.
        """
        if (crashed and self._has_crashed_in_replay) or not is_same:
            has_failed = self._crashed_at == self._size
            self.forget()
            self._crashed_at = self._size if has_failed else None
        self._has_crashed_in_replay = crashed and self.can_replay

    def is_poison(self, failed: PostedRequest) -> bool:
        """Return whether a failed request has failed before, at the same point of the same inputs."""
        return (self.can_replay or failed.is_seeded_reset) and not self.can_retry(failed)

    def request(self, attach: Attach, index: int, posted: PostedRequest) -> tuple[int, bytes]:
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
