"""A vector that outlives its caller: `VectorEnv.checkpoint` and `VectorEnv.resume`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from envactors.actor.handle import ActorHandle, bring_back, save_state
from envactors.actor.journal import SavedJournal
from envactors.errors import NothingPendingError, VectorEnvError
from envactors.state.files import read_file, write_file
from envactors.vector.build import results_of
from envactors.vector.env_snapshots import EnvSnapshots
from envactors.vector.env_state import EnvState
from envactors.vector.results import Batch, Batcher, EnvStep
from envactors.wire.pickling import dumps, loads

T = TypeVar("T", bound="EnvCheckpoints")


class EnvCheckpoint(NamedTuple):
    """What is on disk of one env: where it stands, and how to bring it there."""

    root_seed: int | None
    episode: int
    needs_reset: bool
    ended: bool
    steps: int
    episodes: int
    last: EnvStep | None
    journal: SavedJournal


@dataclasses.dataclass
class CheckpointFile:
    """The file that a vector is written to.

    Attributes:
        every: After how many steps of an env it is written again; None leaves that to the user.
        path: Where it is; None before the first.
        steps: The steps of each env when it was written last.
    """

    every: int | None
    path: str | os.PathLike[str] | None = None
    steps: Any = 0


class EnvCheckpoints(EnvSnapshots):
    """Writes all envs to a file, and makes a vector of one; a base of `VectorEnv`."""

    actors: list[ActorHandle]
    action_spec: Any
    _all_ids: list[int]
    _batcher: Batcher
    _file: CheckpointFile
    _options: dict[str, Any]

    def last_batch(self) -> Batch:
        """Return the last result of each env again, with reward 0 after a reset; for ``on_failure`` other than "raise".

        Raises:
            NothingPendingError: An env has none yet.
        """
        self._select(None)
        steps = [None if self._last is None else self._last.newest(env_id) for env_id in self._all_ids]
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
        self._pending.check_idle(self._select(None))
        if self._options["on_failure"] != "replay":
            raise VectorEnvError("a checkpoint of this vector env: expected one with on_failure='replay'")
        lost = self._not_whole()
        if lost and self._snapshot is not None:
            results_of([save_state(env.handle) for env in lost])
            lost = self._not_whole()
        if lost:
            ids = [env.env_id for env in lost]
            raise VectorEnvError(
                f"a checkpoint of envs {ids}, which cannot be brought back: seed their resets, or make the vector "
                "with seed_episodes=True or a snapshot"
            )
        steps = self._episodes.steps
        envs = [self._write_down(env, int(steps[env.env_id])) for env in self._envs]
        write_file(path, dumps((self._options, self.action_spec, envs)))
        self._file.path, self._file.steps = path, steps

    def _not_whole(self) -> list[EnvState]:
        return [env for env in self._envs if not (env.needs_reset or env.supervisor.journal(env.env_id).whole)]

    def _write_down(self, env: EnvState, steps: int) -> EnvCheckpoint:
        number, episodes = env.env_id, self._episodes
        last = None if self._last is None else self._last.newest(number)
        counts = bool(episodes.ended[number]), steps, int(episodes.episodes[number])
        journal = env.supervisor.journal(number).save()
        return EnvCheckpoint(env.root_seed, env.episode, env.needs_reset, *counts, last, journal)

    def _checkpoint_if_due(self) -> None:
        """Write the file again if ``checkpoint_every`` says so, and no result is pending."""
        file = self._file
        if file.path is None or any(self._pending.states):
            return
        if (self._episodes.steps - file.steps).max() >= file.every:
            self.checkpoint(file.path)

    @classmethod
    def resume(cls: type[T], path: str | os.PathLike[str], factories: Iterable[Callable[[], Any]], **options: Any) -> T:
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
        written, action_spec, saved = loads(read_file(path))
        factories, name = list(factories), os.fspath(path)
        if len(factories) != len(saved):
            raise VectorEnvError(f"{name!r} has {len(saved)} envs: expected as many factories, not {len(factories)}")
        other = {option: value for option, value in written.items() if options.get(option, value) != value}
        if other:
            raise VectorEnvError(f"{name!r} was written by a vector with {other}: expected the same here")
        envs = cls(factories, **{**options, **written})  # type: ignore[call-arg] # it is that of `VectorEnv`
        try:
            if envs.action_spec != action_spec:
                raise VectorEnvError(f"the actions of {name!r} are {action_spec}: expected {envs.action_spec}")
            envs._bring_back(saved)
        except BaseException:
            envs.close(0)  # type: ignore[attr-defined] # likewise
            raise
        envs._file.path, envs._file.steps = path, envs._episodes.steps
        return envs

    def _bring_back(self, saved: list[EnvCheckpoint]) -> None:
        """Bring new envs to where saved ones were."""
        journals = iter([one.journal for one in saved])
        groups = [[next(journals) for _ in actor._supervisor.config.start.factories] for actor in self.actors]
        results_of([bring_back(actor, group) for actor, group in zip(self.actors, groups, strict=True)])
        for env, one in zip(self._envs, saved, strict=True):
            if one.journal.whole and not env.supervisor.journal(env.env_id).whole:
                raise VectorEnvError(
                    f"env {env.env_id} returned other observations than before the checkpoint: expected its old factory"
                )
            env.needs_reset, env.root_seed, env.episode = one.needs_reset, one.root_seed, one.episode
            env.incarnation = None if one.needs_reset else env.supervisor.core.incarnation
            self._episodes.restore(env, ended=one.ended)
            self._episodes.resume(env, steps=one.steps, episodes=one.episodes)
            if self._last is not None and one.last is not None:
                self._last.keep_step(one.last)
