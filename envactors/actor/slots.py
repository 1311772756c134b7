"""The envs of a vector: the state, the request, and the episode of each. Changed under a lock only.

    IDLE ──asked──▶ ASKED ──posted──▶ POSTED ──complete──▶ ARRIVED ──▶ READING ──▶ READY ──delivered──▶ IDLE
                      ▲                  │                    │           │
                      └── runs again ────┴────────────────────┴───────────┘   a future gets its result from ARRIVED

This is the one place that says whether an env is idle, in flight, or ready. The rows of shared memory, in which envs
exchange actions and results, are `envactors.actor.rows`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.mailbox.info_codec import Infos
from envactors.mailbox.messages import Pickled, episode_seed, renewed_seed
from envactors.mailbox.pickling import dumps
from envactors.mailbox.slab import HALF, NO_AUTORESET, PAYLOAD, RESET, RING, SEED, Slab

if TYPE_CHECKING:
    from envactors.actor.future import ActorFuture

# The states of an env.
IDLE: Final = 0
ASKED: Final = 1  # waits in the queue of its actor
POSTED: Final = 2  # posted in its row, and not yet completed by the worker
ARRIVED: Final = 3  # the outcome is certain and was taken into account; it is to be read
READING: Final = 4  # a thread reads the outcome, and no other one does; code of users may run meanwhile
READY: Final = 5  # the result waits to be delivered
ROLLING: Final = 6  # in a rollout; while one of its steps is finished in its row, it has one of the states above

# Values of `Slot.holds`.
NO_EPISODE: Final = -1
LOST: Final = -2

Autoreset = Literal["next_step", "same_step", "disabled"]
OnFailure = Literal["raise", "renew", "replay"]

# Seeds beyond this have no place in rows.
_LARGEST_SEED = (1 << 64) - 1


@dataclasses.dataclass(slots=True, eq=False)
class Op:
    """The request of an env, if it is more than a plain step or an autoreset.

    Attributes:
        method: What the user called.
        resets: Whether the worker runs a reset.
        future: Gets the result; None if the vector delivers it.
        seed: The seed of a reset; None for the one that follows from those before.
        payload: The action, or the options of a reset, as they travel; None if the row has all.
        failure: The failure of an earlier try, of which the result tells.
        ending: The step that ended an episode whose reset the next process does.
        outcome: What the future gets: the result, the error, and the incarnation. Kept, since an interrupt may end the
            thread that reads it; another thread then settles the future.
    """

    method: Literal["step", "reset"]
    resets: bool = False
    future: ActorFuture | None = None
    seed: int | None = None
    payload: Any = None
    failure: BaseException | None = None
    ending: Any = None
    outcome: tuple[Any, BaseException | None, int] | None = None


class Outcome(NamedTuple):
    """The outcome of a request that has no result.

    Attributes:
        error: The failure.
        truncates: Whether the last complete result is returned again, truncated; otherwise the failure is raised.
    """

    error: BaseException
    truncates: bool


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """One env.

    Attributes:
        index: Its index in the vector.
        position: Its position in its actor.
        op: Its request; None for a plain step, and while it is idle.
        holds: The incarnation that holds its episode; `NO_EPISODE`, or `LOST` until somebody was told.
        fresh: Whether it was not reset yet in the present process, where its first reset may get a derived seed.
        seed: The seed that it was posted last; None if there was none.
        incarnation: The process that it was posted to last.
        counted_in: The process that its last result was counted in.
        needs_reset: Whether it must be reset before it can step.
        strict: Whether an env that was never reset, or whose episode is over, must be reset before it can step;
            otherwise only one that was lost.
        root_seed: The seed of its last seeded reset.
        episode: The number of its next episode since that reset, which was number 0; if episodes are seeded.
        next_seed: The seed of that episode; None if episodes are not seeded.
        retiring: Whether its process is to be replaced before its next episode.
        steps_before: How many steps it had made when its present process began.
    """

    index: int
    position: int
    op: Op | None = None
    holds: int = NO_EPISODE
    fresh: bool = True
    seed: int | None = None
    incarnation: int = 0
    counted_in: int = 0
    needs_reset: bool = True
    strict: bool = True
    root_seed: int | None = None
    episode: int = 0
    next_seed: int | None = None
    retiring: bool = False
    steps_before: int = 0

    def seed_with(self, seed: int) -> None:
        """Note that the env is reset with a seed of the user's: that is episode 0."""
        self.root_seed = seed
        self.episode = 0
        if self.next_seed is not None:
            self.next_seed = seed

    def count_episode(self) -> None:
        """Count an episode that has begun, or could not: the next one has another seed, if episodes are seeded."""
        if self.next_seed is not None and self.root_seed is not None:
            self.episode += 1
            self.next_seed = episode_seed(self.root_seed, self.episode)


class Slots:
    """All envs of a vector.

    Args:
        slots: One per env.
        slab: Their rows.
        infos: Reads what comes beside the arrays.
        autoreset: What happens at the end of an episode.
        on_failure: What happens after a failure.
        pickles: Whether payloads are pickled.

    Attributes:
        of: One slot per env.
        states: The state of each env.
        numbers: int64: the call id of each env's last post, which no worker can overwrite.
        ops: What each env was posted last, in the bits of `envactors.mailbox.slab`.
        halves: The half of each env's last complete observation.
        zeros: What ``states`` is if all envs are idle, and any column of flags if none is set.
        ended: bool, shape (n,): whether the next step of an env resets it, by autoreset.
        streams: Whether the worker writes the time of completion into each env's row.
        has_last: Whether each env has a complete result.
        unusual: The envs that need more than to be posted: they have no result of their
            process yet, need a reset, or are to leave it.
        outcomes: The outcomes of envs whose requests have no result.
        overflow: What has come beside the rows, by env.
        at_rest: The state of an env without a request: `IDLE`, or `ROLLING`.
    """

    def __init__(
        self,
        slots: list[Slot],
        slab: Slab,
        infos: Infos,
        autoreset: Autoreset,
        on_failure: OnFailure,
        *,
        pickles: bool,
    ) -> None:
        count = len(slots)
        self.of = slots
        self.slab = slab
        # The shared column of what `ops` has, in whole batches written at once.
        self.posted_ops: memoryview[int] = slab.ops.data
        self.infos = infos
        self.pickles = pickles
        self.autoreset: Autoreset = autoreset
        self.on_failure: OnFailure = on_failure
        self.states: bytearray = bytearray(count)
        self.numbers: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        # The same, of which a single one is read in a third of the time.
        self.numbers_of: memoryview[int] = self.numbers.data
        self.ops: bytearray = bytearray(count)
        self.halves: bytearray = bytearray(count)
        self.zeros: bytes = bytes(count)
        self.ended: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.streams: bytearray = bytearray(count)
        self.has_last: bytearray = bytearray(count)
        self.unusual: set[int] = set(range(count))
        self.outcomes: dict[int, Outcome] = {}
        self.overflow: dict[int, memoryview] = {}
        self.at_rest: int = IDLE

    def plan(self, index: int, incarnation: int) -> Any:
        """Decide what an env is posted, and write it into its row; return its payload, None without any."""
        slot, op = self.of[index], self.of[index].op
        resets = bool(self.ended[index]) if op is None or not op.resets else True
        bits = self.halves[index] ^ HALF
        seed = slot.next_seed
        if resets:
            bits |= RESET
            seed = self.seed_of_reset(slot, incarnation)
        elif slot.retiring and self.autoreset == "same_step":
            bits |= NO_AUTORESET
        slot.seed = seed
        if seed is not None and seed <= _LARGEST_SEED:
            self.slab.seeds[index] = seed
            bits |= SEED
        payload = None
        if op is not None:
            bits |= RING if op.future is not None else 0
            # A reset in place of a step ignores the action.
            payload = op.payload if op.method == "reset" or not resets else None
        if resets and (payload is not None or (seed or 0) > _LARGEST_SEED):
            options = payload if payload is None or not self.pickles else Pickled(payload)
            content = (None if bits & SEED else seed), options
            payload = bytes(dumps(content)) if self.pickles else content
        if payload is not None:
            bits |= PAYLOAD
        self.ops[index] = bits
        return payload

    def seed_of_reset(self, slot: Slot, incarnation: int) -> int | None:
        """Return the seed of an env's next reset; None to let the env choose."""
        if slot.op is not None and slot.op.seed is not None:
            return slot.op.seed
        if slot.next_seed is not None:
            return slot.next_seed
        if slot.fresh and incarnation > 0 and slot.root_seed is not None:
            return renewed_seed(slot.root_seed, incarnation)
        return None

    def seed_posted(self, index: int) -> int | None:
        """Return the seed that an env was posted last; None if there was none."""
        # The short way of steps of all envs leaves the seed of the post before, and has none of these bits.
        seed, bits = self.of[index].seed, self.ops[index]
        return seed if bits & SEED or (bits & PAYLOAD and (seed or 0) > _LARGEST_SEED) else None

    def align_halves(self, half: int) -> None:
        """Copy last observations so that those of all envs are in the same half; all envs are idle."""
        for index, other in enumerate(self.halves):
            if other != half:
                for array in (self.slab.checks, *self.slab.observations):
                    if array is not None:
                        array[half, index] = array[other, index]
                self.halves[index] = half

    def is_bound(self, index: int) -> bool:
        """Return whether the request of an env needs the episode that the env had."""
        slot = self.of[index]
        op = slot.op
        if op is not None and (op.method == "reset" or op.failure is not None or op.ending is not None):
            return False
        resets = self.ended[index]
        # If failures do not raise they are reported first, also one between two episodes.
        return not (resets and (self.on_failure == "raise" or slot.retiring))

    def lose_episodes(self, first: int, stop: int) -> None:
        """Note that the process of some envs has ended."""
        for slot in self.of[first:stop]:
            slot.fresh = True
            if slot.holds >= 0:
                slot.holds = LOST
        self.unusual.update(range(first, stop))

    def lose_episode(self, index: int, *, resets_next: bool) -> None:
        """Note that an env has no episode any more, and whether its next step resets it; otherwise the user has to."""
        slot = self.of[index]
        slot.holds = NO_EPISODE
        slot.needs_reset = not resets_next
        self.ended[index] = resets_next
        self.unusual.add(index)

    def unread(self) -> list[int]:
        """Return the envs whose outcomes have arrived for the vector, not for a future."""
        return [
            slot.index
            for slot in (self.of if ARRIVED in self.states else ())
            if self.states[slot.index] == ARRIVED and (slot.op is None or slot.op.future is None)
        ]

    def make_idle(self, index: int) -> None:
        """Forget the request of an env.

        After an interrupt between the two, the env is known by its request: without one, it might be a plain step.
        """
        self.states[index] = self.at_rest
        self.of[index].op = None
        self.note_usual(index)

    def make_all_idle(self) -> None:
        """Forget the requests of all envs."""
        self.states[:] = bytes([self.at_rest]) * len(self.states)
        for slot in self.of:
            slot.op = None
        for index in tuple(self.unusual):
            self.note_usual(index)

    def note_usual(self, index: int) -> None:
        """Note that an env needs no more than to be posted, if that is so."""
        slot = self.of[index]
        is_known = slot.holds == slot.incarnation == slot.counted_in and bool(self.has_last[index])
        if is_known and not slot.needs_reset and not slot.retiring and slot.op is None:
            self.unusual.discard(index)
