"""The requests of a vector's envs, as columns with one entry per env.

    IDLE ──▶ QUEUED ──▶ POSTED ──▶ DONE or FAILED ──delivered──▶ IDLE
                ▲          │
                └──────────┘  the process has ended or the env has raised, and the request runs again

A posted row is *complete* once the worker has written the call id of the request into it. That alone changes no status:
rows are delivered from this state, or `ActorEnvs.collect_completed` makes them `DONE`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.actor.actor import Actor
from envactors.actor.change import ChangeLock
from envactors.actor.future import ActorFuture, Outcome
from envactors.mailbox.info_codec import OVERFLOW, Infos
from envactors.mailbox.messages import Attach, Pickled
from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import HALF, NO_AUTORESET, PAYLOAD, RESET, RING, SEED, Slab
from envactors.replay import Journal, PostedRequest
from envactors.vector.episodes import RETIRING, SEEDED, Episodes
from envactors.vector.options import Autoreset, OnFailure
from envactors.vector.waiting import ResultWaiters

IDLE: Final = 0
QUEUED: Final = 1  # waits in the queue of its actor
POSTED: Final = 2  # in its row, complete or not
DONE: Final = 3  # the result is in `EnvTable.outcomes`, or else in the row
FAILED: Final = 4  # the failure is in `EnvTable.outcomes`

# Larger seeds do not fit into rows.
_LARGEST_SEED: Final = (1 << 64) - 1


@dataclasses.dataclass(slots=True, eq=False)
class EnvRequest:
    """The request of an env, if it is more than a plain step.

    Attributes:
        method: The method that the user called.
        resets: Whether the worker runs a reset.
        future: The future of the outcome; None if the vector delivers it.
        seed: The user's seed for a reset.
        payload: The action, or the options of a reset, pickled; None if the row has everything.
        failure: An earlier failure, which the result reports.
        ending: The outcome of the step that ended the episode, if the next process does the reset within that step.
    """

    method: Literal["step", "reset"]
    resets: bool = False
    future: ActorFuture | None = None
    seed: int | None = None
    payload: bytes | None = None
    failure: Outcome | None = None
    ending: Outcome | None = None


class Selection(NamedTuple):
    """Some envs of a vector.

    Attributes:
        ids: Their ids, in the user's order.
        at: The same as an index of arrays.
        is_all: Whether these are all envs in order; ``at`` is a slice then.
        groups: The same by actor: its `ActorEnvs`, and the ids in ascending order. Empty if only the table sees this.
        actors: The actors of the groups.
    """

    ids: list[int]
    at: Any
    is_all: bool = False
    groups: Sequence[tuple[Any, list[int]]] = ()
    actors: Sequence[Actor] = ()


class EnvTable:
    """The requests of all envs, and the parent's own copy of the facts about their rows.

    Everything but reads that tolerate a stale answer happens under the lock. Between changes this holds:

    - A `QUEUED` env is in a `QueuedRows` in the queue of its actor.
    - A `POSTED` env has its row posted to the current process of its actor, with its entry of ``call_ids``.
    - Only an env that is not `IDLE` has an entry in ``requests``, only a `DONE` or `FAILED` one in ``outcomes``.
    - A future of a request that is not in ``requests`` any more is done.

    Args:
        lock: The lock of all actors.
        slab: The rows.
        infos: Reads the parts of results that have no fixed size.
        episodes: The episodes of the envs.
        on_failure: What happens after a failure.

    Attributes:
        autoreset: What happens at the end of an episode.
        replays: Whether lost episodes are brought back by replay.
        status: The status of each env.
        version: Grows with each transition. Results that were copied without the lock are stale if it has changed.
        call_ids: int64, shape (n,): the call id of each env's last post. No worker can overwrite it.
        ops: uint8, shape (n,): each env's last posted operation, in the bits of `envactors.mailbox.slab`.
        seeds: The seed of that operation.
        buffer_index: uint8, shape (n,): the buffer with each env's last complete observation.
        incarnations: int64, shape (n,): the current process of each env.
        posted_in: int64, shape (n,): the process that each env was posted to last.
        rings_each: Whether the worker announces each env's result, rather than the end of all its rows.
        requests: The requests that are more than a plain step, by env.
        outcomes: The outcomes that are not in rows, by env.
        completed_at: When the outcomes came that are `DONE` or `FAILED` (`time.monotonic`), by env.
        overflow: The parts of results that did not fit into their rows, by env.
        overdue: The envs that have missed a deadline: their results do not count until their process has ended.
        last_infos: The info and the object leaves of each env's last result, not unpickled; None if they are empty.
            Kept only if failures are not raised, since they may have to be returned again.
        journals: The journal of each env.
        saves_due: The envs whose states are to be saved, for their journals to begin there.
        waiters: The threads that wait for results.
        rollouts: How many rollouts are in flight.
    """

    def __init__(self, lock: ChangeLock, slab: Slab, infos: Infos, episodes: Episodes, on_failure: OnFailure) -> None:
        count = slab.layout.envs
        self.lock = lock
        self.slab = slab
        self.infos = infos
        self.episodes = episodes
        self.autoreset: Autoreset = episodes.autoreset
        self.on_failure: OnFailure = on_failure
        self.replays: bool = on_failure == "replay"
        self.status: bytearray = bytearray(count)
        self.version: int = 0
        self.call_ids: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.ops: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.seeds: list[int | None] = [None] * count
        self.buffer_index: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.incarnations: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.posted_in: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        self.rings_each: bytearray = bytearray(count)
        self.requests: dict[int, EnvRequest] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.completed_at: dict[int, float] = {}
        self.overflow: dict[int, memoryview] = {}
        self.overdue: set[int] = set()
        self.last_infos: list[bytes | None] = [None] * count
        self.journals: list[Journal] = []
        self.saves_due: set[int] = set()
        self.waiters: ResultWaiters = ResultWaiters(slab, self.rings_each)
        self.rollouts: int = 0
        # A single number is read through a memoryview in a third of the time that an array takes.
        self.call_id_of: memoryview[int] = self.call_ids.data
        self.completed_of: memoryview[int] = slab.completed.data
        # Columns that have the same value for all envs, by value.
        self._columns = [bytes([value]) * count for value in range(FAILED + 1)]

    def add_journals(self, ids: range, max_journal: int, save_every: int | None) -> None:
        """Add the journals of an actor's envs; for the other arguments see `Journal`."""
        for position, index in enumerate(ids):
            on_save_due = functools.partial(self.saves_due.add, index)
            self.journals.append(Journal(position, max_journal, save_every, on_save_due))

    # Facts -----------------------------------------------------------------------------------------------

    @property
    def attach(self) -> Attach:
        """The message that has workers use the rows."""
        return Attach(self.slab.layout, self.autoreset == "same_step")

    @property
    def are_all_plain(self) -> bool:
        """Whether all envs only need an action, or have only needed one."""
        return not self.requests and not self.episodes.has_flags

    def are_plain(self, envs: Selection) -> bool:
        """Return whether some envs only need an action, or have only needed one."""
        if self.are_all_plain:
            return True
        flags, requests = self.episodes.flags, self.requests
        return not any(flags[index] or index in requests for index in envs.ids)

    def are_all(self, status: int) -> bool:
        """Return whether all envs have a status."""
        return self.status == self._columns[status]

    def is_complete(self, index: int) -> bool:
        """Return whether a posted env's whole result is there, and came before its deadline."""
        if self.completed_of[index] != self.call_id_of[index] or index in self.overdue:
            return False
        return self.infos.encodings[index] < OVERFLOW or index in self.overflow

    def has_outcome(self, index: int) -> bool:
        """Return whether an env has an outcome that was not delivered."""
        status = self.status[index]
        return status >= DONE or (status == POSTED and self.is_complete(index))

    def has_failed(self, index: int) -> bool:
        """Return whether an env has an outcome, and it is a failure."""
        status = self.status[index]
        return status == FAILED or (status == POSTED and self.infos.failed(index) and self.is_complete(index))

    def is_running(self, index: int) -> bool:
        """Return whether an env has a request without an outcome."""
        status = self.status[index]
        return status == QUEUED or (status == POSTED and not self.is_complete(index))

    def future_of(self, index: int) -> ActorFuture | None:
        """Return the future of an env's request; None if the vector delivers the outcome."""
        request = self.requests.get(index)
        return None if request is None else request.future

    def starts(self, at: Any) -> Any:
        """Return whether the last observation of envs is the first of an episode; ``at`` is an index of arrays."""
        starts = self.ops[at] & RESET != 0
        if self.autoreset == "same_step":
            starts |= self.slab.terminated[at] | self.slab.truncated[at]
        return starts

    def posted_seed(self, index: int) -> int | None:
        """Return the seed that an env was posted last; None if there was none."""
        seed, op = self.seeds[index], int(self.ops[index])
        return seed if op & SEED or (op & PAYLOAD and (seed or 0) > _LARGEST_SEED) else None

    def posted_request(self, index: int) -> PostedRequest:
        """Return the request that an env was posted last, as its journal takes it."""
        op, request = int(self.ops[index]), self.requests.get(index)
        payload = request.payload if request is not None and op & PAYLOAD else None
        autoreset = self.autoreset == "same_step" and not op & NO_AUTORESET
        return PostedRequest(op, self.posted_seed(index), payload, autoreset)

    def needs_episode(self, index: int) -> bool:
        """Return whether the request of an env needs the episode that was lost with its process."""
        request = self.requests.get(index)
        if request is not None and (request.method == "reset" or request.failure is not None or request.ending):
            return False
        # If failures are not raised, they are reported first, even between two episodes.
        is_retiring = self.episodes.flags[index] & RETIRING
        return not (self.episodes.resets_next_of[index] and (self.on_failure == "raise" or is_retiring))

    # The four transitions --------------------------------------------------------------------------------

    def queue(self, ids: list[int]) -> None:
        """Mark envs as queued. Their actor posts them later."""
        self.version += 1
        for index in ids:
            self.status[index] = QUEUED
            self.rings_each[index] = True

    def post(self, envs: Selection, call_id: int, rings_each: bool) -> dict[int, bytes]:
        """Write requests into the rows of envs, whose actions are there already.

        Args:
            envs: The envs.
            call_id: The call id of the requests.
            rings_each: Whether workers announce each result.

        Returns:
            The payloads that do not fit into rows, by env.
        """
        at, slab, payloads = envs.at, self.slab, {}
        ops = self.buffer_index[at] ^ HALF
        resets = self.episodes.resets_next[at]
        if True in resets.tobytes():
            ops |= resets * np.uint8(RESET)
        if not self.are_all_plain:
            for position, index in enumerate(envs.ids):
                if self.episodes.flags[index] or index in self.requests:
                    ops[position], payload = self._encode(index, int(ops[position]))
                    if payload is not None:
                        payloads[index] = payload
        if self.overflow:
            for index in envs.ids:
                self.overflow.pop(index, None)
        self.version += 1
        self.call_ids[at] = call_id
        self.ops[at] = slab.ops[at] = ops
        self.posted_in[at] = self.incarnations[at]
        self._set(self.status, envs, POSTED)
        self._set(self.rings_each, envs, rings_each)
        slab.posted[at] = call_id
        if self.waiters.count:
            self.waiters.ring()  # others wait for a number of complete rows, and now fewer are complete
        return payloads

    def complete(self, index: int, outcome: Outcome | None, when: float | None = None) -> None:
        """Record the outcome of an env; deliver it, if a future waits for it.

        Args:
            index: The env.
            outcome: The outcome; None if it is in the row.
            when: When it came (`time.monotonic`); None for now.
        """
        future = self.future_of(index)
        self.version += 1
        self.status[index] = FAILED if outcome is not None and outcome.is_failure else DONE
        self.completed_at[index] = time.monotonic() if when is None else when
        if outcome is not None:
            self.outcomes[index] = outcome
        if future is not None:
            assert outcome is not None, "rows are copied before a future gets their content"
            future.set_outcome(outcome)
            self.deliver(Selection([index], [index]))
        self.waiters.ring()

    def deliver(self, envs: Selection) -> None:
        """Make envs idle, whose outcomes the caller delivers or drops."""
        self.version += 1
        self._set(self.status, envs, IDLE)
        if self.requests or self.completed_at:
            for index in envs.ids:
                self.requests.pop(index, None)
                self.outcomes.pop(index, None)
                self.completed_at.pop(index, None)
        if self.waiters.count:
            self.waiters.ring()  # others may wait for these, such as the thread below a signal handler

    # Other changes ---------------------------------------------------------------------------------------

    def miss_deadline(self, index: int) -> None:
        """Ignore the result of a posted env, until its process has ended."""
        self.version += 1
        self.overdue.add(index)

    def end_process(self, ids: range) -> None:
        """Take the rows of an actor back from its ended process, and mark those that are posted as queued."""
        self.version += 1
        # The next worker runs all rows that are posted and not completed.
        mine = slice(ids.start, ids.stop)
        self.slab.posted[mine] = self.slab.completed[mine] = self.call_ids[mine]
        for index in ids:
            if self.status[index] == POSTED:
                self.status[index] = QUEUED
            self.overdue.discard(index)
            self.episodes.lose_process(index)

    def restore(self, index: int, incarnation: int, *, starts: bool) -> None:
        """Record that a process has restored the state of an idle env.

        Args:
            index: The env.
            incarnation: The process.
            starts: Whether the last observation is the first of an episode.
        """
        self.version += 1
        self.posted_in[index] = incarnation
        self.ops[index] = self.buffer_index[index] | (RESET if starts else 0)

    def clear(self, index: int) -> None:
        """Make an env idle from any state. It needs a reset then, in another process."""
        self.overdue.discard(index)
        self.deliver(Selection([index], [index]))
        self.episodes.lose(index)
        self.episodes.lose_process(index)
        self.journals[index].forget()

    def _set(self, column: bytearray, envs: Selection, value: int) -> None:
        if envs.is_all:
            column[:] = self._columns[value]
        else:
            for index in envs.ids:
                column[index] = value

    def _encode(self, index: int, op: int) -> tuple[int, bytes | None]:
        """Return the operation and the payload of an env that needs more than an action."""
        request, episodes, payload = self.requests.get(index), self.episodes, None
        seed = episodes.next_seeds[index] if episodes.flags[index] & SEEDED else None
        if request is not None:
            op |= (RESET if request.resets else 0) | (RING if request.future is not None else 0)
            if request.future is not None:
                request.future.set_running()
            # A reset that takes the place of a step ignores the action.
            payload = request.payload if request.method == "reset" or not op & RESET else None
        if op & RESET:
            is_given = request is not None and request.seed is not None
            given = request.seed if request is not None else None
            seed = given if is_given else episodes.seed_of_reset(index, int(self.incarnations[index]))
        elif episodes.flags[index] & RETIRING and self.autoreset == "same_step":
            op |= NO_AUTORESET  # the next process does the reset
        self.seeds[index] = seed
        if seed is not None and seed <= _LARGEST_SEED:
            self.slab.seeds[index] = seed
            op |= SEED
        if op & RESET and (payload is not None or (seed or 0) > _LARGEST_SEED):
            options = None if payload is None else Pickled(payload)
            payload = bytes(dumps((None if op & SEED else seed, options)))
        return (op, None) if payload is None else (op | PAYLOAD, payload)
