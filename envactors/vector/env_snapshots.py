"""States of envs that outlast them: `VectorEnv.snapshot` and `VectorEnv.restore`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from envactors.actor.handle import restore_state, save_state
from envactors.errors import VectorEnvError, VectorInputError
from envactors.options import Snapshot
from envactors.vector.build import results_of
from envactors.vector.env_calls import EnvCalls
from envactors.vector.env_state import EnvState, check_steppable
from envactors.vector.episodes import Episodes
from envactors.vector.pending import Pending
from envactors.vector.results import EnvStep, LastResults


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
    """Takes the states of envs and puts envs into them; a base of `VectorEnv`."""

    _snapshot: Snapshot | None
    _pending: Pending
    _episodes: Episodes
    _last: LastResults | None

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
        envs = self._idle_envs(self._select(env_ids))
        check_steppable(envs)
        states = results_of([save_state(env.handle) for env in envs])
        return [self._describe(env, *state) for env, state in zip(envs, states, strict=True)]

    def _describe(self, env: EnvState, check: int, state: bytes) -> EnvSnapshot:
        last = None if self._last is None else self._last.newest(env.env_id)
        ended = bool(self._episodes.ended[env.env_id])
        return EnvSnapshot(env.env_id, state, check, env.root_seed, env.episode, ended, last)

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
        envs = self._idle_envs(ids)
        futures = [restore_state(env.handle, one.check, one.state) for env, one in zip(envs, snapshots, strict=True)]
        for env, future, one in zip(envs, futures, snapshots, strict=True):
            failed = future.exception() is not None
            env.needs_reset, env.incarnation = failed, None if failed else future.incarnation
            env.root_seed, env.episode = one.root_seed, one.episode
            self._episodes.restore(env, ended=one.ended and not failed)
            if self._last is not None and one.last is not None and not failed:
                self._last.keep_step(one.last._replace(env_id=env.env_id))
        results_of(futures)

    def _idle_envs(self, ids: list[int]) -> list[EnvState]:
        if self._snapshot is None:
            raise VectorEnvError("this vector env was made without snapshot: expected VectorEnv(..., snapshot=...)")
        self._pending.check_idle(ids)
        return [self._envs[env_id] for env_id in ids]
