"""Methods of `VectorEnv` that save the states of envs and restore them.

Workers read and write the states with the functions of a `SnapshotPolicy`; see `envactors.worker.host`. The engine of
the vector knows the rest: the episode of each env and its last result.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

from envactors.actor.future import results_of
from envactors.actor.handle import ActorView
from envactors.errors import NothingPendingError, VectorEnvError, VectorInputError
from envactors.mailbox.messages import Kind, Restore, Save
from envactors.vector.base import Engine
from envactors.vector.results import Batch, EnvSnapshot
from envactors.vector.table import Selection


class SnapshotMethods(abc.ABC):
    """Base class of `envactors.VectorEnv` with the methods that save and restore the states of envs."""

    _engine: Engine
    _handles: list[ActorView]
    _has_snapshots: bool

    @abc.abstractmethod
    def _select(self, env_ids: Iterable[int] | None) -> Selection:
        """Check that the vector is open, and return some envs, or all for None."""

    def snapshot(self, env_ids: Iterable[int] | None = None) -> list[EnvSnapshot]:
        """Save the states of envs, including wrappers and random generators, with the vector's ``snapshot`` policy.

        Args:
            env_ids: Ids of the envs, in this order; None for all.

        Returns:
            One snapshot per env, for `restore`.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending, or a rollout is in flight.
            VectorInputError: An env needs a reset first, or ``env_ids`` is invalid.
            ActorError: The episode of an env was lost with its process.
            Exception: Raised by ``snapshot.get``.
        """
        engine, envs = self._engine, self._select(env_ids)
        self._check_snapshots(envs)
        engine.check_steppable(envs)
        processes = [engine.process_with_episode(env_id) for env_id in envs.ids]
        handles = [self._handles[env_id] for env_id in envs.ids]
        futures = [
            handle._submit(Kind.SAVE, Save(handle._env), "snapshot", incarnation=process)
            for handle, process in zip(handles, processes, strict=True)
        ]
        states = results_of(futures)
        return [engine.snapshot_of(env_id, *state) for env_id, state in zip(envs.ids, states, strict=True)]

    def restore(self, snapshots: Sequence[EnvSnapshot], env_ids: Iterable[int] | None = None) -> None:
        """Restore envs to states that `snapshot` of this vector, or of a similar one, has returned.

        From there, equal actions give the results that followed the snapshot. Steps and episodes continue to count.

        Args:
            snapshots: States to restore.
            env_ids: Id of the env for each state; None for the envs from which the states were taken.

        Raises:
            VectorEnvError: The vector was made without ``snapshot``.
            AlreadyPendingError: An env has a result pending, or a rollout is in flight.
            VectorInputError: ``env_ids`` is invalid, or does not have one id per snapshot.
            SpaceMismatchError: The snapshot belongs to an env with other spaces.
            Exception: Raised by ``snapshot.set``; the env needs a reset then.
        """
        envs = self._select([one.env_id for one in snapshots] if env_ids is None else env_ids)
        if len(envs.ids) != len(snapshots):
            raise VectorInputError(f"{len(envs.ids)} env_ids for {len(snapshots)} snapshots: expected one each")
        self._check_snapshots(envs)
        pairs = list(zip(envs.ids, snapshots, strict=True))
        restorers = [self._engine.restorer(env_id, one) for env_id, one in pairs]
        futures = []
        for (env_id, one), restorer in zip(pairs, restorers, strict=True):
            handle = self._handles[env_id]
            message = Restore(handle._env, one.check, one.state)
            futures.append(handle._submit(Kind.RESTORE, message, "restore", take_reply=restorer))
        results_of(futures)

    def last_batch(self) -> Batch:
        """Return the last result of each env again, with reward 0 after a reset.

        Not available under ``on_failure="raise"``.

        Raises:
            NothingPendingError: An env has no result yet.
        """
        self._select(None)
        batch = self._engine.last_batch()
        if batch is None:
            raise NothingPendingError("last_batch of envs that have not been reset: reset them first")
        return batch

    def _check_snapshots(self, envs: Selection) -> None:
        if not self._has_snapshots:
            raise VectorEnvError("this vector env was made without snapshot: expected VectorEnv(..., snapshot=...)")
        self._engine.check_idle(envs)
