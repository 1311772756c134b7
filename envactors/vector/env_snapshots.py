"""States of envs that outlast them: snapshots in memory, and checkpoints on disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from envactors.actor.handle import ActorHandle, restore_state, save_state
from envactors.actor.slots import Slots
from envactors.errors import NothingPendingError, VectorInputError
from envactors.mailbox.factory import Factory
from envactors.vector.asking import Asker
from envactors.vector.build import results_of
from envactors.vector.checkpoints import Checkpoints, read_checkpoint
from envactors.vector.env_calls import EnvCalls
from envactors.vector.results import Batch, Batcher, EnvStep, RowReader

T = TypeVar("T", bound="EnvSnapshots")


@dataclasses.dataclass(frozen=True)
class EnvSnapshot:
    """The state of one env between two steps; it can be pickled.

    Attributes:
        env_id: The env that it was taken of.
        state: What the vector's ``snapshot.get`` has returned, pickled.
        check: The checksum over the observations before it.
        root_seed: The seed of the env's last seeded reset.
        episode: The number of its next episode, if episodes are seeded.
        ended: Whether its next step is a reset.
        last: Its last result; None if failures are raised.
    """

    env_id: int
    state: bytes = dataclasses.field(repr=False)
    check: int
    root_seed: int | None
    episode: int
    ended: bool
    last: EnvStep | None = dataclasses.field(repr=False)


class EnvSnapshots(EnvCalls):
    """States of envs, in memory and on disk: how they are taken and put back; a base of `VectorEnv`."""

    actors: list[ActorHandle]
    _asker: Asker
    _batcher: Batcher
    _checkpoints: Checkpoints
    _reader: RowReader
    _slots: Slots

    def snapshot(self, env_ids: Iterable[int] | None = None) -> list[EnvSnapshot]:
        """Take the state of envs, wrappers and random generators, as the ``snapshot`` of the vector does it.

        Args:
            env_ids: Which envs, in this order; None for all.

        Returns:
            One snapshot per env, for `restore`.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending.
            VectorInputError: An env needs a reset first, or wrong ids.
            Exception: What ``snapshot.get`` raised.
        """
        ids = self._select(env_ids)
        self._checkpoints.check_can_save(ids)
        self._asker.check_steppable(ids)
        states = results_of([save_state(self._handles[env_id]) for env_id in ids])
        return [self._describe(env_id, *state) for env_id, state in zip(ids, states, strict=True)]

    def _describe(self, env_id: int, check: int, state: bytes) -> EnvSnapshot:
        slot, ended = self._slots.of[env_id], bool(self._slots.ended[env_id])
        last = self._reader.last_kept(env_id)
        return EnvSnapshot(env_id, state, check, slot.root_seed, slot.episode, ended, last)

    def restore(self, snapshots: Sequence[EnvSnapshot], env_ids: Iterable[int] | None = None) -> None:
        """Put envs into states that `snapshot` has returned, of this vector or of one like it.

        Their next steps return what the steps after the snapshot returned, for the same actions. Counts of steps and
        episodes go on.

        Args:
            snapshots: The states.
            env_ids: The env that each is for, in their order; None for those that they were taken of.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending.
            VectorInputError: Wrong ids, or another number of them.
            Exception: What ``snapshot.set`` raised; the env needs a reset.
        """
        ids = self._select([one.env_id for one in snapshots] if env_ids is None else env_ids)
        if len(ids) != len(snapshots):
            raise VectorInputError(f"{len(ids)} env_ids for {len(snapshots)} snapshots: expected one each")
        self._checkpoints.check_can_save(ids)
        handles = [self._handles[env_id] for env_id in ids]
        futures = [restore_state(one, each.check, each.state) for one, each in zip(handles, snapshots, strict=True)]
        for env_id, future, one in zip(ids, futures, snapshots, strict=True):
            failed = future.exception() is not None
            self._slots.put_back(env_id, None if failed else future.incarnation)
            self._slots.restore(env_id, one.root_seed, one.episode, ended=one.ended and not failed)
            if one.last is not None and not failed:
                self._reader.keep(one.last._replace(env_id=env_id))
        results_of(futures)

    def last_batch(self) -> Batch:
        """Return the last result of each env again, with reward 0 after a reset; for ``on_failure`` other than "raise".

        Raises:
            NothingPendingError: An env has none yet.
        """
        steps = [self._reader.last_kept(env_id) for env_id in self._select(None)]
        if None in steps:
            raise NothingPendingError("last_batch of envs that have not been reset: reset them first")
        return self._batcher.batch([step for step in steps if step is not None])

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write everything that `resume` needs to a file, in place of the one that is there.

        With ``checkpoint_every`` that file is written again from now on.

        Args:
            path: The file.

        Raises:
            VectorEnvError: ``on_failure`` is not ``"replay"``, or an env cannot be brought back: it was never seeded,
                or was stepped more than ``max_journal`` times since, and there is no ``snapshot``.
            AlreadyPendingError: An env has a result pending.
            OSError: The file cannot be written; what was there before still is.
        """
        self._select(None)
        self._checkpoints.write(path)

    @classmethod
    def resume(cls: type[T], path: str | os.PathLike[str], factories: Iterable[Factory], **options: Any) -> T:
        """Return a vector as it was when a checkpoint was written: equal actions give equal observations from there.

        `stats` says after how many steps of each env that was, `last_batch` what their last results were. The file is
        read with pickle: resume from none that others may have written.

        Args:
            path: The file.
            factories: As for the vector that has written it.
            **options: As for `VectorEnv`; ``autoreset``, ``on_failure`` and ``seed_episodes`` are the written ones.

        Raises:
            VectorEnvError: The file is no whole checkpoint, is one of another kind of vector, or an env did not return
                the observations that it had returned.
            OSError: The file cannot be read.
        """
        saved, factories = read_checkpoint(path), list(factories)
        merged = saved.merge(path, options, len(factories))
        envs = cls(factories, **merged)  # type: ignore[call-arg] # it is that of `VectorEnv`
        try:
            envs._checkpoints.bring_back(path, saved, envs.actors)
        except BaseException:
            envs.close(0)  # type: ignore[attr-defined] # likewise
            raise
        return envs
