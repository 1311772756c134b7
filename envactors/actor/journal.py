"""What the envs of an actor were asked, so that a new process can bring them to where they were lost.

    begin     a seeded reset                                          ──▶ the journal of an env starts
    note      a call, an attribute, a reset, a step (through the channel, or in a turn) that has come to its end
    replays   a new process has started                               ──▶ one request an env, before all that waits
    may_retry a step or a reset was lost, or has raised               ──▶ once more, from where the journal ends

All of it happens under the actor's lock, and in the order in which the worker did it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.actor.future import ActorFuture
from envactors.actor.requests import Request
from envactors.actor.turn import Turn
from envactors.arrays.slab import FAILED, Slab
from envactors.arrays.specs import unflatten
from envactors.errors import SerializationError
from envactors.options import Deadlines
from envactors.wire.messages import REQUESTS, Attach, Frame, Kind, Replay, Reset, Set, Turns
from envactors.wire.pickling import dumps, loads
from envactors.worker.host import renewed_seed

_FIRST_ROWS = 64
# What takes more than this counts as several steps, so that the limit is one of memory too. In bytes.
_STEP_ROOM = 1024


class _Run:
    """Steps in shared memory, one after the other, in arrays that grow."""

    def __init__(self, slab: Slab) -> None:
        self._columns = [np.empty((_FIRST_ROWS, *array.shape[1:]), array.dtype) for array in slab.actions]
        self._what = bytearray()
        self.row_size = sum(column[0].nbytes for column in self._columns)

    def add(self, slab: Slab, env: int) -> None:
        row = len(self._what)
        for number, array in enumerate(slab.actions):
            column = self._columns[number]
            if row == len(column):
                column = self._columns[number] = np.concatenate([column, np.empty_like(column)])
            column[row] = array[env]
        self._what.append(slab.what[env])

    @property
    def turns(self) -> Turns:
        actions: list[npt.NDArray[Any]] = [column[: len(self._what)] for column in self._columns]
        return Turns(actions, bytes(self._what))


class Journal:
    """What one env was asked since its last seeded reset.

    Args:
        limit: How many steps it may hold; a call counts as one, too, and so does each further KiB of either.

    Attributes:
        whole: Whether it leads from a seeded reset to where the env stands.
        since: The incarnation in which it begins.
    """

    def __init__(self, limit: int) -> None:
        self.whole = False
        self.since = 0
        self._limit = limit
        self._check = 0
        self._size = 0
        self._attributes: dict[str, bytes] = {}
        self._entries: list[_Run | tuple[int, bytes]] = []
        # What has failed from here already: the length of the journal then.
        self._failed_at: int | None = None
        self._length = 0
        self._last_call = 0
        self._replays_lost = 0

    def begin(self, payload: bytes, incarnation: int, call_id: int, check: int) -> None:
        """Starts anew with a seeded reset."""
        self.drop()
        self.whole, self.since = True, incarnation
        self._entries = [(Kind.RESET, payload)]
        self._length, self._last_call, self._check = 1, call_id, check

    def drop(self) -> None:
        """Gives up what was asked; attributes are kept."""
        for entry in self._entries:
            if isinstance(entry, tuple) and entry[0] == Kind.SET:
                self._keep(entry[1])
        self._entries = []
        self._size = self._length = self._replays_lost = 0
        self._failed_at = None
        self.whole = False

    def note(self, kind: int, payload: bytes, call_id: int, check: int | None = None) -> None:
        """Takes down what came to its end through the channel; resets and steps with the checksum after them."""
        if not self.whole:
            if kind == Kind.SET:
                self._keep(payload)
            return
        self._entries.append((kind, payload))
        self._grow(call_id, check, len(payload))

    def play(self, slab: Slab, env: int, call_id: int) -> None:
        """Takes down a step in shared memory."""
        if not self.whole:
            return
        if not self._entries or not isinstance(run := self._entries[-1], _Run):
            run = _Run(slab)
            self._entries.append(run)
        run.add(slab, env)
        self._grow(call_id, int(slab.checks[slab.asked[env] & 1, env]), run.row_size)

    def _grow(self, call_id: int, check: int | None, size: int) -> None:
        self._last_call = call_id
        if check is not None:
            self._check = check
        self._length += 1
        self._replays_lost = 0
        self._size += 1 + size // _STEP_ROOM
        if self._size > self._limit:
            self.drop()

    def _keep(self, payload: bytes) -> None:
        self._attributes[Set(*loads(payload)).name] = payload

    def may_retry(self, seeded: bool, error: BaseException | None = None) -> bool:
        """Whether what has failed may be tried once more; the same inputs are not tried a third time.

        Args:
            seeded: Whether it is a seeded reset, which needs no journal.
            error: What it has raised, where it did.
        """
        if not (self.whole or seeded) or self._failed_at == self._length:
            return False
        if isinstance(error, SerializationError) and error.call_id == self._last_call:
            return False  # the env has done it, and it is the result that cannot be read
        self._failed_at = self._length
        return True

    def lose_replay(self) -> None:
        """Takes in that a process was lost in the middle of the replay; the second time it is given up."""
        self._replays_lost += 1
        if self._replays_lost > 1:
            self.drop()

    def replay(self, env: int, attach: Attach | None) -> Replay | None:
        """What brings the env in a new process to where it was; None where there is nothing to bring back."""
        attributes = list(self._attributes.values())
        if not self.whole and not attributes:
            return None
        entries = [entry.turns if isinstance(entry, _Run) else entry for entry in self._entries]
        action, autoreset = (None, False) if attach is None else (attach.layout.action, attach.autoreset)
        return Replay(env, attributes, action, autoreset, entries, self._check)

    def inputs(self, attach: Attach | None, last: Request) -> list[tuple[Any, ...]]:
        """What reproduces a failure: everything that was asked, and what was asked last."""
        asked: list[tuple[Any, ...]] = [("set", *Set(*loads(payload))[1:]) for payload in self._attributes.values()]
        assert last.kind is not None, "a renewal is no input"
        for entry in [*self._entries, (last.kind, bytes(last.payload))]:
            if isinstance(entry, _Run):
                assert attach is not None, "steps in shared memory have a layout"
                columns, what = entry.turns
                for row, reset in enumerate(what):
                    action = unflatten(attach.layout.action, iter([column[row] for column in columns]))
                    asked.append(("reset", None, None) if reset else ("step", action))
            else:
                message = REQUESTS[entry[0]](*loads(entry[1]))
                if entry[0] == Kind.RESET:
                    asked.append(("reset", message.seed, message.options))
                elif entry[0] == Kind.STEP:
                    asked.append(("step", message.action))
                else:
                    asked.append((Kind(entry[0]).name.lower(), *message[1:]))
        return asked


class Journals:
    """The journals of one actor's envs.

    Args:
        first: The index of the first env.
        count: How many there are.
        limit: How many steps each may hold; see `Journal`.

    Attributes:
        attach: How the actor's processes use the shared slab, where there is one.
    """

    def __init__(self, first: int, count: int, limit: int) -> None:
        self._first = first
        self._journals = [Journal(limit) for _ in range(count)]
        self._fresh = [True] * count
        self.attach: Attach | None = None

    def of(self, index: int) -> Journal:
        """That of an env."""
        return self._journals[index - self._first]

    def record(self, request: Request, frame: Frame) -> None:
        """Takes down a call that was answered."""
        journal, position = self.of(request.index), request.index - self._first
        payload, answered = bytes(request.payload), frame.kind == Kind.RESULT
        if request.kind == Kind.RESET and answered:
            message = Reset(*loads(payload))
            seed = message.seed
            if seed is None and self._fresh[position] and frame.incarnation > 0 and message.root_seed is not None:
                seed = renewed_seed(message.root_seed, frame.incarnation)
                payload = bytes(dumps(tuple(message._replace(seed=seed))))
            self._fresh[position] = False
            if seed is None:
                journal.note(Kind.RESET, payload, request.call_id, frame.check)
            else:
                journal.begin(payload, frame.incarnation, request.call_id, frame.check)
        elif request.kind == Kind.STEP and answered:
            journal.note(Kind.STEP, payload, request.call_id, frame.check)
        elif request.kind == Kind.CALL or (request.kind == Kind.SET and answered):
            journal.note(request.kind, payload, request.call_id)

    def record_turn(self, turn: Turn) -> None:
        """Takes down the steps of a turn that is over, but for those that were lost or have raised."""
        slab = turn.slab
        for env in turn.envs:
            if env not in turn.lost and slab.extras[env] != FAILED:
                self.of(env).play(slab, env, turn.call_id)

    def replays(self, deadlines: Deadlines, future: ActorFuture) -> list[Request]:
        """What a new process is asked first."""
        self._fresh = [True] * len(self._journals)
        return [
            # It tells what comes next as it goes on, and each part has its own deadline; this is that of the first.
            Request(
                Kind.REPLAY,
                dumps(tuple(message)),
                "replay",
                self._first + env,
                deadlines.of("call" if message.attributes else "reset"),
                0,
                future,
            )
            for env, journal in enumerate(self._journals)
            if (message := journal.replay(env, self.attach)) is not None
        ]

    def replayed(self, request: Request, frame: Frame) -> bool:
        """Takes in how a replay has ended; False where the env is not where it was."""
        journal = self.of(request.index)
        same = frame.kind == Kind.RESULT and bool(loads(frame.payload))
        if same and journal.whole:
            self._fresh[request.index - self._first] = False
        else:
            journal.drop()
        return same

    def is_seeded(self, request: Request) -> bool:
        """Whether it is a reset that says where the episode begins."""
        return request.kind == Kind.RESET and Reset(*loads(request.payload)).seed is not None

    def holds(self, request: Request) -> bool:
        """Whether a call that was meant for a lost process can be made on one that was brought to the same point."""
        journal = self.of(request.index)
        return journal.whole and request.bound is not None and request.bound >= journal.since

    def forget(self) -> None:
        """Begins anew with a process that was wanted fresh; attributes are set again all the same."""
        for journal in self._journals:
            journal.drop()
