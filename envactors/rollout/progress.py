"""Count the steps that a worker has completed in a rollout, and update the state of its envs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envactors.actor.journal import Journal
from envactors.actor.slots import Slot, Slots
from envactors.actor.supervisor import Supervisor
from envactors.mailbox.info_codec import PLAIN, Infos
from envactors.mailbox.messages import Failure, Kind, Pickled, episode_seed
from envactors.mailbox.pickling import dumps
from envactors.mailbox.specs import unflatten
from envactors.rollout.books import Books
from envactors.rollout.trajectory import REPEAT, RESET, Trajectory


class Late(NamedTuple):
    """Progress of a worker at the moment when a deadline passed.

    Attributes:
        done: Number of complete steps of each env; int64, shape (n,); None if unknown.
        position: Position of the env that missed the deadline.
        in_policy: Whether the policy missed it instead.
    """

    done: npt.NDArray[np.int64] | None
    position: int
    in_policy: bool


class PartProgress:
    """Counts the steps that a worker has written into the trajectory.

    Args:
        supervisor: The actor.
        slots: All envs of the vector.
        books: Counts and last results of the envs.
        steps: Number of steps of the rollout.

    Attributes:
        trajectory: The trajectory.
        counted: Number of counted steps by env.
        objects: Leaves of observations without a place in the trajectory, by (step, env): those before the first step,
            and those of steps that were completed in rows.
        large_infos: Infos that did not fit into the trajectory, by row.
        late: Progress of the worker when a deadline passed, None if none has; later results do not count.
    """

    def __init__(self, supervisor: Supervisor, slots: Slots, books: Books, steps: int) -> None:
        self._supervisor = supervisor
        self._slots = slots
        self._books = books
        self._steps = steps
        self._first = supervisor.config.first_index
        self._stop = self._first + len(supervisor.config.start.factories)
        self._envs = range(self._first, self._stop)
        self.trajectory: Trajectory
        self.counted: dict[int, int] = dict.fromkeys(self._envs, 0)
        self.objects: dict[tuple[int, int], list[Any]] = {}
        self.large_infos: dict[int, memoryview] = {}
        self.late: Late | None = None

    @property
    def step(self) -> int:
        """First step that is not complete."""
        return min(self.counted.values())

    def left(self) -> list[int]:
        """Return the envs that have not taken this step."""
        step = self.step
        return [index for index in self._envs if self.counted[index] == step < self._steps]

    def repeats(self, index: int) -> bool:
        """Return whether an env's episode has ended and nothing resets it, so that its last observation is repeated."""
        return self._slots.autoreset == "disabled" and self._slots.of[index].needs_reset

    def complete(self, index: int, op: int, *, starts: bool) -> None:
        """Count a step that this half has written into the trajectory.

        Args:
            index: Index of the env.
            op: What happened in the step: one of the values of `Trajectory.ops`.
            starts: Whether an episode has begun.
        """
        trajectory, step = self.trajectory, self.counted[index]
        trajectory.ops[step, index] = op
        trajectory.starts[step + 1, index] = starts
        trajectory.info_encoding[step * trajectory.layout.envs + index] = PLAIN
        self.counted[index] = trajectory.done[index] = step + 1

    def write_observation(self, step: int, index: int, obs: Any) -> None:
        """Write an observation into the trajectory, and keep the leaves that have no place there."""
        self.trajectory.write_observation(step, index, obs)
        if not self.trajectory.is_whole:
            self.objects[step, index] = self.trajectory.objects_of(obs)

    def repeat_ended(self, indices: list[int], step: int) -> list[int]:
        """Complete the step of envs that repeat their last observation; return the others. Called under the lock."""
        trajectory = self.trajectory
        ended = [index for index in indices if self.repeats(index)]
        for index in ended:
            self.write_observation(step + 1, index, self._books.last_obs(index))
            trajectory.rewards[step, index] = 0
            trajectory.terminated[step, index] = trajectory.truncated[step, index] = False
            self.complete(index, REPEAT, starts=False)
        return [index for index in indices if index not in ended]

    def be_late(self, position: int, *, in_policy: bool, is_known: bool) -> None:
        """Record the progress of the worker, if known, because a deadline has passed."""
        done = self.trajectory.done[self._first : self._stop].copy() if is_known else None
        self.late = Late(done, position, in_policy)

    def count(self) -> None:
        """Count what the worker has completed. Called under the lock."""
        whole = self.trajectory.done[self._first : self._stop]
        if self.late is not None and self.late.done is not None:
            whole = self.late.done
        # Envs that took the same steps are counted together: in most rollouts these are all.
        together: dict[tuple[int, int], list[int]] = {}
        for index, claimed in zip(self._envs, whole.tolist(), strict=True):
            before = self.counted[index]
            done = min(claimed, self._steps)
            if done > before:
                together.setdefault((before, done), []).append(index)
        for (before, done), indices in together.items():
            self._count_steps(indices, before, done)

    def _count_steps(self, indices: list[int], before: int, done: int) -> None:
        """Count steps of some envs, from ``before`` to ``done``."""
        core, slots, trajectory = self._supervisor.core, self._slots, self.trajectory
        mine = self._columns_of(indices)
        ends = trajectory.terminated[before:done, mine] | trajectory.truncated[before:done, mine]
        # As bytes, env by env, which are searched in a tenth of the time that short arrays take.
        all_over = ends.T.tobytes()
        all_ops = trajectory.ops[before:done, mine].T.tobytes()
        count = done - before
        for index, at in zip(indices, range(0, len(all_ops), count), strict=True):
            ops = all_ops[at : at + count]
            over = all_over[at : at + count]
            slot = slots.of[index]
            slot.holds = slot.incarnation
            if core.recovery.replays:
                self._record(index, before, done)
            core.completed += count
            slot.fresh = slot.fresh and RESET not in ops
            if REPEAT in ops:
                over = bytes([end for end, op in zip(over, ops, strict=True) if op != REPEAT])
                ops = ops.replace(bytes([REPEAT]), b"")
            if ops:
                self._books.record(index, over, ops)
            self.counted[index] = done
        self._keep(indices, done)

    def _columns_of(self, indices: list[int]) -> slice | list[int]:
        """Return an index of the columns of some envs: a slice, which is faster, if these are all."""
        return slice(self._first, self._stop) if len(indices) == len(self._envs) else indices

    def tries_again(self, index: int, *, counts: bool) -> bool:
        """Return whether a replay can restore an env, so that its step is tried again.

        Args:
            index: Index of the env.
            counts: Whether the failure counts: the same inputs are not tried a third time.
        """
        recovery = self._supervisor.core.recovery
        journal = recovery.journal(index)
        if not counts:
            return recovery.replays and journal.whole
        if not recovery.replays or not journal.can_retry(self._slots, index):
            return False
        journal.count_failure()
        return True

    def forget_later(self) -> None:
        """Discard what the process wrote after its deadline. It has ended by now."""
        self.late = None
        for index in self._envs:
            self.trajectory.done[index] = self.counted[index]
        chosen = self.trajectory.chosen
        chosen[self._first] = min(chosen[self._first], self.step + 1)

    def _keep(self, indices: list[int], done: int) -> None:
        """Store the last results of some envs, which have all taken ``done`` steps."""
        trajectory, spec = self.trajectory, self.trajectory.layout.observation
        mine = self._columns_of(indices)
        batches = [None if array is None else array[done, mine].copy() for array in trajectory.observations]
        rewards = trajectory.rewards[done - 1, mine].copy()
        terminated = trajectory.terminated[done - 1, mine].tolist()
        truncated = trajectory.truncated[done - 1, mine].tolist()
        reader = None if trajectory.is_whole else Infos(trajectory)
        for number, index in enumerate(indices):
            objects: Iterator[Any] = iter(())
            if reader is not None:
                row = (done - 1) * trajectory.layout.envs + index
                objects = iter(reader.decode(row, self.large_infos.get(row))[1])
            obs = unflatten(spec, (next(objects) if batch is None else batch[number] for batch in batches))
            self._books.keep(index, obs, rewards[number], terminated=terminated[number], truncated=truncated[number])

    def _record(self, index: int, before: int, done: int) -> None:
        """Record the steps of an env in its journal, which a seeded reset restarts."""
        core, slots, trajectory = self._supervisor.core, self._slots, self.trajectory
        slot, journal, seed = slots.of[index], core.recovery.journal(index), slots.of[index].seed
        seeds = slot.next_seed is not None
        over = trajectory.terminated[:, index] | trajectory.truncated[:, index]
        start = before
        episode = slot.episode
        for step in range(before, done) if seeds or seed is not None else ():
            is_reset = trajectory.ops[step, index] == RESET
            if is_reset or (slots.autoreset == "same_step" and over[step]):
                if seed is not None:
                    journal.start_seeded(index - self._first, seed, int(trajectory.checks[step, index]))
                    start = step + 1
                episode += 1
                seed = episode_seed(slot.root_seed, episode) if seeds and slot.root_seed is not None else None
        if start < done:
            ran = trajectory.ops[start:done, index] != REPEAT
            actions = [array[start:done, index][ran] for array in trajectory.actions]
            resets = trajectory.ops[start:done, index][ran] == RESET
            _record_steps(slots, journal, slot, actions, resets, int(trajectory.checks[done - 1, index]))


def _record_steps(
    slots: Slots,
    journal: Journal,
    slot: Slot,
    actions: Sequence[npt.NDArray[Any]],
    resets: npt.NDArray[np.bool_],
    check: int,
) -> None:
    """Record consecutive steps of an env in its journal, as if they had been taken one by one."""
    if slots.slab.actions:
        count, size = len(resets), 0
        if not journal.whole:
            journal.lengthen(count)
            return
        steps = journal.last_steps(len(actions))
        for column, added, array in zip(steps.columns, actions, slots.slab.actions, strict=True):
            column.extend(added.astype(array.dtype, copy=False).tobytes())
            size += array[0].nbytes
        steps.resets.extend(resets.tobytes())
        journal.grow(check, size, count)
        return
    for action, is_reset in zip(actions[0], resets.tolist(), strict=True):
        message: tuple[Any, ...] = slot.position, None, None
        if not is_reset:
            message = slot.position, Pickled(bytes(dumps(action))), slots.autoreset == "same_step", None
        journal.record_message(Kind.RESET if is_reset else Kind.STEP, bytes(dumps(message)), check)


def next_seed(slots: Slots, index: int, incarnation: int) -> int | None:
    """Return the seed of an env's next reset, by autoreset; None to let the env choose."""
    slot = slots.of[index]
    return slots.seed_of_reset(slot, incarnation) if slots.ended[index] else slot.next_seed


def write_failure(slots: Slots, index: int, failure: Failure) -> None:
    """Write into the row of an env that what it was posted has failed, as its worker does elsewhere."""
    content = slots.infos.fail(index, failure)
    if content is not None:
        slots.overflow[index] = memoryview(content)
    slots.slab.completed[index] = slots.numbers[index]
