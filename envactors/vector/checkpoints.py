"""A vector on disk: what is written of each env, and how the envs of another vector are brought there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from envactors.actor.handle import ActorHandle, bring_back, save_state
from envactors.actor.journal import SavedJournal
from envactors.arrays.specs import Spec
from envactors.errors import VectorEnvError
from envactors.vector.build import results_of
from envactors.vector.checkpoint_file import read_file, write_file
from envactors.vector.env_state import EnvState
from envactors.vector.results import EnvStep
from envactors.vector.transitions import Transitions
from envactors.wire.pickling import dumps, loads


class SavedEnv(NamedTuple):
    """Where an env stands, and how to bring it there; for the fields see `EnvState`, `Episodes` and `LastResults`."""

    root_seed: int | None
    episode: int
    needs_reset: bool
    ended: bool
    steps: int
    episodes: int
    last: EnvStep | None
    journal: SavedJournal


class SavedVector(NamedTuple):
    """A vector on disk.

    Attributes:
        options: The options that must be the same in the vector that goes on.
        action: One env's action.
        envs: All envs.
    """

    options: dict[str, Any]
    action: Spec | None
    envs: list[SavedEnv]

    def merge(self, path: object, options: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the options of the vector that goes on.

        Raises:
            VectorEnvError: It is to have other ones than the vector on disk, or another number of envs.
        """
        if count != len(self.envs):
            raise VectorEnvError(f"{path!r} has {len(self.envs)} envs: expected as many factories, not {count}")
        other = {name: value for name, value in self.options.items() if options.get(name, value) != value}
        if other:
            raise VectorEnvError(f"{path!r} was written by a vector with {other}: expected the same here")
        return {**options, **self.options}


def read_checkpoint(path: str | os.PathLike[str]) -> SavedVector:
    """Return what was written; for errors see `checkpoint_file.read_file`."""
    return SavedVector(*loads(read_file(path)))


class Checkpoints:
    """Writes a vector to a file, and brings it to where one on disk stood.

    Args:
        transitions: The envs, and where they stand.
        options: The options that must be the same in a vector that goes on.
        action: One env's action.
        saves: Whether states of envs can be saved.
        every: After how many steps of an env the file is written again; None leaves that to the user.

    Attributes:
        saves: Whether states of envs can be saved.
        every: After how many steps of an env the file is written again; None for never.
    """

    def __init__(
        self, transitions: Transitions, options: dict[str, Any], action: Spec | None, *, saves: bool, every: int | None
    ) -> None:
        self.saves, self.every = saves, every
        self._transitions = transitions
        self._options = options
        self._action = action
        # The file, and the steps of each env when it was written last.
        self._path: str | os.PathLike[str] | None = None
        self._steps: Any = 0

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the vector; see `envactors.vector.facade.VectorEnv.checkpoint`."""
        transitions = self._transitions
        transitions.pending.check_idle(range(len(transitions.envs)))
        if transitions.on_failure != "replay":
            raise VectorEnvError("a checkpoint of this vector env: expected one with on_failure='replay'")
        lost = self._not_whole()
        if lost and self.saves:
            results_of([save_state(env.handle) for env in lost])
            lost = self._not_whole()
        if lost:
            ids = [env.env_id for env in lost]
            raise VectorEnvError(
                f"a checkpoint of envs {ids}, which cannot be brought back: seed their resets, or make the vector "
                "with seed_episodes=True or a snapshot"
            )
        steps = transitions.episodes.steps
        envs = [self._describe(env, int(steps[env.env_id])) for env in transitions.envs]
        write_file(path, dumps(tuple(SavedVector(self._options, self._action, envs))))
        self._path, self._steps = path, steps

    def write_if_due(self) -> None:
        """Write the file again after enough steps, if no result is pending."""
        path, every = self._path, self.every
        if path is None or every is None or any(self._transitions.pending.states):
            return
        if (self._transitions.episodes.steps - self._steps).max() >= every:
            self.write(path)

    def _not_whole(self) -> list[EnvState]:
        envs = self._transitions.envs
        return [env for env in envs if not (env.needs_reset or env.supervisor.journal(env.env_id).whole)]

    def _describe(self, env: EnvState, steps: int) -> SavedEnv:
        number, episodes, last = env.env_id, self._transitions.episodes, self._transitions.last
        counts = bool(episodes.ended[number]), steps, int(episodes.episodes[number])
        journal = env.supervisor.journal(number).save()
        newest = None if last is None else last.newest(number)
        return SavedEnv(env.root_seed, env.episode, env.needs_reset, *counts, newest, journal)

    def bring_back(self, path: str | os.PathLike[str], saved: SavedVector, actors: Sequence[ActorHandle]) -> None:
        """Bring the envs to where those on disk stood.

        Raises:
            VectorEnvError: Their actions are others, or they do not return what those had returned.
        """
        transitions = self._transitions
        if self._action != saved.action:
            raise VectorEnvError(f"the actions of {path!r} are {saved.action}: expected {self._action}")
        journals = iter([one.journal for one in saved.envs])
        groups = [[next(journals) for _ in actor._supervisor.config.start.factories] for actor in actors]
        results_of([bring_back(actor, group) for actor, group in zip(actors, groups, strict=True)])
        for env, one in zip(transitions.envs, saved.envs, strict=True):
            if one.journal.whole and not env.supervisor.journal(env.env_id).whole:
                raise VectorEnvError(
                    f"env {env.env_id} returned other observations than before the checkpoint: expected its old factory"
                )
            env.needs_reset, env.root_seed, env.episode = one.needs_reset, one.root_seed, one.episode
            env.incarnation = None if one.needs_reset else env.supervisor.core.incarnation
            transitions.episodes.restore(env, ended=one.ended)
            transitions.episodes.resume(env, steps=one.steps, episodes=one.episodes)
            if transitions.last is not None and one.last is not None:
                transitions.last.keep_step(one.last)
        self._path, self._steps = path, transitions.episodes.steps
