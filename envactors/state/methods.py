"""Methods of `VectorEnv` for states of envs: snapshots in memory, and checkpoints on disk."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from envactors.actor.future import ActorFuture, results_of
from envactors.actor.handle import ActorHandle, ActorView
from envactors.actor.slots import NO_EPISODE
from envactors.envs.core import VectorCore
from envactors.envs.results import Batch, EnvStep
from envactors.errors import NothingPendingError, VectorInputError
from envactors.mailbox.factory import Factory
from envactors.mailbox.messages import Kind, Restore
from envactors.state.checkpoints import Checkpoints, move, read_checkpoint, save_state

T = TypeVar("T", bound="SnapshotMethods")


@dataclasses.dataclass(frozen=True)
class EnvSnapshot:
    """State of one env between two steps. It can be pickled.

    Attributes:
        env_id: Id of the env.
        state: Pickled return value of ``snapshot.get``.
        check: Checksum over the observations before the snapshot.
        root_seed: Seed of the env's last seeded reset.
        episode: Index of its next episode, if episodes are seeded.
        ended: Whether its next step is a reset.
        last: Its last result; None under ``on_failure="raise"``.
    """

    env_id: int
    state: bytes = dataclasses.field(repr=False)
    check: int
    root_seed: int | None
    episode: int
    ended: bool
    last: EnvStep | None = dataclasses.field(repr=False)


class SnapshotMethods(abc.ABC):
    """Base class of `envactors.VectorEnv` with the methods that save and restore the states of envs."""

    actors: list[ActorHandle]
    _core: VectorCore
    _handles: list[ActorView]
    _checkpoints: Checkpoints

    @abc.abstractmethod
    def _select(self, env_ids: Iterable[int] | None) -> list[int]:
        """Check that the vector is open, and return the ids of some envs, or of all for None."""

    @abc.abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Close the envs; see `envactors.VectorEnv.close`."""

    def snapshot(self, env_ids: Iterable[int] | None = None) -> list[EnvSnapshot]:
        """Save the states of envs, including wrappers and random generators, with the vector's ``snapshot`` policy.

        Args:
            env_ids: Ids of the envs, in this order; None for all.

        Returns:
            One snapshot per env, for `restore`.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending.
            VectorInputError: An env needs a reset first, or ``env_ids`` is invalid.
            Exception: Raised by ``snapshot.get``.
        """
        ids = self._select(env_ids)
        self._checkpoints.check_can_save(ids)
        self._core.check_steppable(ids)
        states = results_of([save_state(self._handles[env_id]) for env_id in ids])
        return [self._describe(env_id, *state) for env_id, state in zip(ids, states, strict=True)]

    def _describe(self, env_id: int, check: int, state: bytes) -> EnvSnapshot:
        slot, ended = self._core.slots.of[env_id], bool(self._core.slots.ended[env_id])
        last = self._core.reader.last(env_id)
        return EnvSnapshot(env_id, state, check, slot.root_seed, slot.episode, ended, last)

    def restore(self, snapshots: Sequence[EnvSnapshot], env_ids: Iterable[int] | None = None) -> None:
        """Restore envs to states that `snapshot` of this vector, or of a similar one, has returned.

        From there, equal actions give the results that followed the snapshot. Steps and episodes continue to count.

        Args:
            snapshots: States to restore.
            env_ids: Id of the env for each state; None for the envs from which the states were taken.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending.
            VectorInputError: ``env_ids`` is invalid, or does not have one id per snapshot.
            Exception: Raised by ``snapshot.set``; the env needs a reset then.
        """
        ids = self._select([one.env_id for one in snapshots] if env_ids is None else env_ids)
        if len(ids) != len(snapshots):
            raise VectorInputError(f"{len(ids)} env_ids for {len(snapshots)} snapshots: expected one each")
        self._checkpoints.check_can_save(ids)
        handles = [self._handles[env_id] for env_id in ids]
        futures = [_restore_state(*pair) for pair in zip(handles, snapshots, strict=True)]
        for env_id, future, one in zip(ids, futures, snapshots, strict=True):
            failed = future.exception() is not None
            slot = self._core.slots.of[env_id]
            slot.needs_reset = slot.fresh = failed
            slot.holds = NO_EPISODE if failed or future.incarnation is None else future.incarnation
            move(self._core.slots, slot, one.root_seed, one.episode, ended=one.ended and not failed)
            if one.last is not None and not failed:
                self._core.reader.keep(one.last._replace(env_id=env_id))
        results_of(futures)

    def last_batch(self) -> Batch:
        """Return the last result of each env again, with reward 0 after a reset.

        Not available under ``on_failure="raise"``.

        Raises:
            NothingPendingError: An env has no result yet.
        """
        steps = [self._core.reader.last(env_id) for env_id in self._select(None)]
        if None in steps:
            raise NothingPendingError("last_batch of envs that have not been reset: reset them first")
        return self._core.batcher.batch([step for step in steps if step is not None])

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write a file from which `resume` can continue, and replace an earlier file at this path.

        With ``checkpoint_every``, the vector also writes this file again from now on.

        Args:
            path: Path of the file.

        Raises:
            VectorEnvError: ``on_failure`` is not ``"replay"``, or an env cannot be restored: it was never seeded, or
                made more than ``max_journal`` steps since, and the vector has no ``snapshot`` policy.
            AlreadyPendingError: An env has a result pending.
            OSError: The file cannot be written; the previous one is unchanged.
        """
        self._select(None)
        self._checkpoints.write(path)

    @classmethod
    def resume(cls: type[T], path: str | os.PathLike[str], factories: Iterable[Factory], **options: Any) -> T:
        """Return a vector in the state of a checkpoint. From there, equal actions give equal observations.

        `stats` returns the number of steps of each env at that point, and `last_batch` their last results. The file is
        read with pickle, which can run any code: only resume from files that you trust.

        Args:
            path: Path of the file.
            factories: Factories of the vector that has written it.
            **options: Options of `VectorEnv`; ``autoreset``, ``on_failure``, and ``seed_episodes`` are taken from the
                file.

        Raises:
            VectorEnvError: The file is not a complete checkpoint, was written by a vector with other options, or an
                env did not return the same observations as before.
            OSError: The file cannot be read.
        """
        saved, factories = read_checkpoint(path), list(factories)
        merged = saved.merge(path, options, len(factories))
        envs = cls(factories, **merged)  # type: ignore[call-arg] # it is that of `VectorEnv`
        try:
            envs._checkpoints.bring_back(path, saved, envs.actors)
        except BaseException:
            envs.close(0)
            raise
        return envs


def _restore_state(caller: ActorView, snapshot: EnvSnapshot) -> ActorFuture[Any]:
    """Put an env into the state of a snapshot."""
    return caller._submit(Kind.RESTORE, Restore(caller._env, snapshot.check, snapshot.state), "restore")
