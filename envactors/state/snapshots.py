"""Methods of `VectorEnv` that save the states of envs and restore them.

Workers read and write the states with the functions of a `SnapshotPolicy`; see `envactors.worker.host`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence

from envactors.actor.future import results_of
from envactors.actor.handle import ActorView
from envactors.actor.slots import NO_EPISODE
from envactors.envs.core import VectorCore
from envactors.envs.results import Batch, EnvStep
from envactors.errors import NothingPendingError, VectorEnvError, VectorInputError
from envactors.mailbox.messages import Kind, Restore, Save, episode_seed


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

    _core: VectorCore
    _handles: list[ActorView]
    _has_snapshots: bool

    @abc.abstractmethod
    def _select(self, env_ids: Iterable[int] | None) -> list[int]:
        """Check that the vector is open, and return the ids of some envs, or of all for None."""

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
        self._check_snapshots(ids)
        self._core.check_steppable(ids)
        handles = [self._handles[env_id] for env_id in ids]
        states = results_of([handle._submit(Kind.SAVE, Save(handle._env), "snapshot") for handle in handles])
        return [self._make_snapshot(env_id, *state) for env_id, state in zip(ids, states, strict=True)]

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
        self._check_snapshots(ids)
        pairs = [(self._handles[env_id], one) for env_id, one in zip(ids, snapshots, strict=True)]
        futures = [
            handle._submit(Kind.RESTORE, Restore(handle._env, one.check, one.state), "restore") for handle, one in pairs
        ]
        for env_id, one, future in zip(ids, snapshots, futures, strict=True):
            is_restored = future.exception() is None  # waits
            self._continue_from(env_id, one, future.incarnation if is_restored else None)
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

    def _check_snapshots(self, env_ids: list[int]) -> None:
        if not self._has_snapshots:
            raise VectorEnvError("this vector env was made without snapshot: expected VectorEnv(..., snapshot=...)")
        self._core.pending.check_idle(env_ids)

    def _make_snapshot(self, env_id: int, check: int, state: bytes) -> EnvSnapshot:
        slot, ended = self._core.slots.of[env_id], bool(self._core.slots.ended[env_id])
        last = self._core.reader.last(env_id)
        return EnvSnapshot(env_id, state, check, slot.root_seed, slot.episode, ended, last)

    def _continue_from(self, env_id: int, snapshot: EnvSnapshot, incarnation: int | None) -> None:
        """Continue the episode of a snapshot in the process that has restored it; None if restoring failed."""
        slots = self._core.slots
        slot, failed = slots.of[env_id], incarnation is None
        slot.needs_reset = slot.fresh = failed
        slot.holds = NO_EPISODE if incarnation is None else incarnation
        slot.root_seed, slot.episode = snapshot.root_seed, snapshot.episode
        if slot.next_seed is not None and slot.root_seed is not None:
            slot.next_seed = episode_seed(slot.root_seed, slot.episode) if slot.episode else slot.root_seed
        slots.ended[env_id] = snapshot.ended and not failed
        slots.unusual.add(env_id)
        slots.note_usual(env_id)
        if snapshot.last is not None and not failed:
            self._core.reader.keep(snapshot.last._replace(env_id=env_id))
