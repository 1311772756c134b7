"""Write the state of a vector to a checkpoint, and restore it in another vector.

The file format is in `envactors.state.checkpoint_file`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from envactors.actor.future import ActorFuture, results_of
from envactors.actor.handle import ActorHandle, ActorView
from envactors.actor.journal import Journal, SavedJournal
from envactors.actor.slots import NO_EPISODE, Slot, Slots
from envactors.envs.core import VectorCore
from envactors.envs.results import EnvStep
from envactors.errors import VectorEnvError
from envactors.mailbox.messages import Describe, Kind, Save, episode_seed
from envactors.mailbox.pickling import dumps, loads
from envactors.mailbox.specs import Spec
from envactors.state.checkpoint_file import read_file, write_file


class SavedEnv(NamedTuple):
    """State of an env and how to restore it. For the fields see `Slot`, `Episodes`, and `RowReader`."""

    root_seed: int | None
    episode: int
    needs_reset: bool
    ended: bool
    steps: int
    episodes: int
    last: EnvStep | None
    journal: SavedJournal


class SavedVector(NamedTuple):
    """Contents of a checkpoint.

    Attributes:
        options: Options that the resumed vector must have as well.
        action: Spec of one env's action.
        envs: State of each env.
    """

    options: dict[str, Any]
    action: Spec | None
    envs: list[SavedEnv]

    def merge(self, path: object, options: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the options of the resumed vector.

        Raises:
            VectorEnvError: The options or the number of envs differ from those of the checkpoint.
        """
        if count != len(self.envs):
            raise VectorEnvError(f"{path!r} has {len(self.envs)} envs: expected as many factories, not {count}")
        other = {name: value for name, value in self.options.items() if options.get(name, value) != value}
        if other:
            raise VectorEnvError(f"{path!r} was written by a vector with {other}: expected the same here")
        return {**options, **self.options}


def read_checkpoint(path: str | os.PathLike[str]) -> SavedVector:
    """Return the contents of a checkpoint. For errors see `checkpoint_file.read_file`."""
    return SavedVector(*loads(read_file(path)))


class Checkpoints:
    """Writes checkpoints of a vector, and restores a vector from one.

    Args:
        vector: The vector.
        handles: The handle of each env.
        options: Options that a resumed vector must have as well.
        saves: Whether the vector has a snapshot policy.
        every: Number of steps of an env after which the file is written again; None for never.

    Attributes:
        saves: Whether the vector has a snapshot policy.
        every: Number of steps of an env after which the file is written again; None for never.
    """

    def __init__(
        self,
        vector: VectorCore,
        handles: Sequence[ActorView],
        options: dict[str, Any],
        *,
        saves: bool,
        every: int | None,
    ) -> None:
        self.saves = saves
        self.every = every
        self._vector = vector
        self._slots = vector.slots
        self._handles = handles
        self._options = options
        # Path of the file, and the steps of each env when it was last written.
        self._path: str | os.PathLike[str] | None = None
        self._steps: Any = 0

    def check_can_save(self, env_ids: list[int]) -> None:
        """Check that the states of some envs can be saved and restored.

        Raises:
            VectorEnvError: The vector has no snapshot policy.
            AlreadyPendingError: An env has a result pending.
        """
        if not self.saves:
            raise VectorEnvError("this vector env was made without snapshot: expected VectorEnv(..., snapshot=...)")
        self._vector.pending.check_idle(env_ids)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint; see `envactors.VectorEnv.checkpoint`."""
        self._vector.pending.check_idle(range(len(self._handles)))
        if self._slots.on_failure != "replay":
            raise VectorEnvError("a checkpoint of this vector env: expected one with on_failure='replay'")
        lost = self._not_whole()
        if lost and self.saves:
            results_of([save_state(self._handles[env_id]) for env_id in lost])
            lost = self._not_whole()
        if lost:
            raise VectorEnvError(
                f"a checkpoint of envs {lost}, which cannot be restored: seed their resets, or make the vector "
                "with seed_episodes=True or a snapshot"
            )
        steps = self._vector.episodes.steps.copy()
        envs = [self._describe(slot, int(steps[slot.index])) for slot in self._slots.of]
        write_file(path, dumps(tuple(SavedVector(self._options, self._vector.action_spec, envs))))
        self._path, self._steps = path, steps

    def write_if_due(self) -> None:
        """Write the file again after enough steps, if no result is pending."""
        path, every = self._path, self.every
        if path is None or every is None or any(self._slots.states):
            return
        if (self._vector.episodes.steps - self._steps).max() >= every:
            self.write(path)

    def _journal(self, env_id: int) -> Journal:
        """Return the journal of an env, up to its last completed request."""
        supervisor = self._vector.supervisors[env_id]
        core, rows = supervisor.core, supervisor.calls.rows
        with core.change, core.lock:
            if rows is not None:
                rows.arrive_for_others()
            return core.recovery.journal(env_id)

    def _not_whole(self) -> list[int]:
        """Return the envs that neither a replay nor a reset can restore."""
        return [slot.index for slot in self._slots.of if not (slot.needs_reset or self._journal(slot.index).whole)]

    def _describe(self, slot: Slot, steps: int) -> SavedEnv:
        index = slot.index
        counts = bool(self._slots.ended[index]), steps, int(self._vector.episodes.episodes[index])
        journal = self._journal(index).save()
        last = self._vector.reader.last(index)
        return SavedEnv(slot.root_seed, slot.episode, slot.needs_reset, *counts, last, journal)

    def bring_back(self, path: str | os.PathLike[str], saved: SavedVector, actors: Sequence[ActorHandle]) -> None:
        """Restore the envs to the state of a checkpoint.

        Raises:
            VectorEnvError: The action specs differ, or an env does not return the observations of the original.
        """
        if self._vector.action_spec != saved.action:
            raise VectorEnvError(f"the actions of {path!r} are {saved.action}: expected {self._vector.action_spec}")
        journals = iter([one.journal for one in saved.envs])
        groups = [[next(journals) for _ in actor._supervisor.config.start.factories] for actor in actors]
        results_of([_bring_back(actor, group) for actor, group in zip(actors, groups, strict=True)])
        for slot, one in zip(self._slots.of, saved.envs, strict=True):
            if one.journal.whole and not self._journal(slot.index).whole:
                raise VectorEnvError(
                    f"env {slot.index} returned other observations than before the checkpoint: expected its old factory"
                )
            incarnation = self._handles[slot.index].incarnation
            slot.needs_reset = one.needs_reset
            slot.holds = NO_EPISODE if one.needs_reset else incarnation
            slot.fresh = one.needs_reset
            slot.incarnation = incarnation
            move(self._slots, slot, one.root_seed, one.episode, ended=one.ended)
            self._vector.episodes.resume(slot, steps=one.steps, episodes=one.episodes)
            if one.last is not None:
                self._vector.reader.keep(one.last)
        self._path = path
        self._steps = self._vector.episodes.steps.copy()


def move(slots: Slots, slot: Slot, root_seed: int | None, episode: int, *, ended: bool) -> None:
    """Note that an env was put into a state in which ``episode`` is the number of its next episode."""
    slot.root_seed = root_seed
    slot.episode = episode
    if slot.next_seed is not None and root_seed is not None:
        slot.next_seed = episode_seed(root_seed, episode) if episode else root_seed
    slots.ended[slot.index] = ended
    slots.unusual.add(slot.index)
    slots.note_usual(slot.index)


def save_state(caller: ActorView) -> ActorFuture[Any]:
    """Return the future of an env's state: the checksum over its observations, and bytes."""
    return caller._submit(Kind.SAVE, Save(caller._env), "snapshot")


def _bring_back(actor: ActorHandle, saved: Sequence[SavedJournal]) -> ActorFuture[Any]:
    """Bring the envs of an actor to where saved journals end; return a future that is settled when that was tried."""
    core = actor._supervisor.core
    with core.change, core.lock:
        for journal, one in zip(core.recovery.journals, saved, strict=True):
            journal.load(one)
        for request in core.recovery.replay_requests():
            core.add(request)
        core.send_waiting()
    # Queued behind the replays, it runs in whichever process has done them.
    return actor.options(retries=sys.maxsize)._submit(Kind.DESCRIBE, Describe(0), "describe")
