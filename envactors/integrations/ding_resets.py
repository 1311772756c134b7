"""Resets of DI-engine's envs that are under way, each with as many tries as it may have."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, KeysView
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from typing import Any

from envactors.actor.states import ActorState
from envactors.errors import ActorError, RemoteTraceback, SerializationError
from envactors.integrations.inside_ding import Begun
from envactors.vector.facade import VectorEnv
from envactors.vector.slot import EnvFuture

_log = logging.getLogger("envactors")


class TriesSpentError(Exception):
    """A reset has failed as often as it may; its ``__cause__`` is why, the last time.

    Args:
        env_id: Which env's.
    """

    def __init__(self, env_id: int) -> None:
        super().__init__(env_id)
        self.env_id = env_id


@dataclasses.dataclass
class _Resetting:
    """A reset that is under way.

    Attributes:
        seed: Its seed, or None.
        failed: How many tries have failed.
        future: The try that runs; None between two of them.
        due: When the next one begins, where none runs (`time.monotonic`).
    """

    seed: int | None
    failed: int = 0
    future: EnvFuture | None = None
    due: float = 0.0


class Resets:
    """Begins resets, tries again those that fail, and gives what comes of the others.

    Args:
        actors: The envs.
        max_retry: How many tries a reset has in all.
        pause: How long it is between two, in seconds.
        revives: Whether a process that is not replaced any more is replaced all the same.
    """

    def __init__(self, actors: VectorEnv, max_retry: int, pause: float, revives: bool) -> None:
        self._actors = actors
        self._max_retry = max_retry
        self._pause = pause
        self._revives = revives
        self._under_way: dict[int, _Resetting] = {}

    @property
    def under_way(self) -> KeysView[int]:
        """The envs that are being reset."""
        return self._under_way.keys()

    def begin(self, env_id: int, seed: int | None, options: dict[str, Any]) -> None:
        """Begins a reset.

        Args:
            env_id: Which env's.
            seed: Its seed, or None.
            options: What the env is given.

        Raises:
            TriesSpentError: The options cannot be sent.
        """
        self._under_way[env_id] = resetting = _Resetting(seed)
        self._try(env_id, resetting, options)

    def settle(self, options: Callable[[int], dict[str, Any]], renews: bool) -> dict[int, Any]:
        """Gives the observations of the resets that have ended, by env id, and begins the tries that are due.

        Args:
            options: Gives what an env is given.
            renews: Whether the next try of one that failed runs in a new process.

        Raises:
            TriesSpentError: One has failed as often as it may.
        """
        begun = {}
        for env_id, resetting in list(self._under_way.items()):
            future = resetting.future
            if future is None:
                if time.monotonic() >= resetting.due:
                    self._try(env_id, resetting, options(env_id))
            elif future.done():
                error = future.exception()
                if error is None:
                    del self._under_way[env_id]
                    begun[env_id] = _first_observation(env_id, future)
                else:
                    self._retry(env_id, resetting, error, renews)
        return begun

    def wait(self) -> None:
        """Waits until there is something to settle."""
        running = [one.future for one in self._under_way.values() if one.future is not None]
        dues = [one.due for one in self._under_way.values() if one.future is None]
        pause = max(min(dues) - time.monotonic(), 0.0) if dues else None
        if running:
            wait_for(running, pause, FIRST_COMPLETED)
        else:
            time.sleep(pause or 0.0)

    def _try(self, env_id: int, resetting: _Resetting, options: dict[str, Any]) -> None:
        actors = self._actors
        if self._revives and actors[env_id].state is ActorState.DEAD:
            actors[env_id].renew()
        try:
            [resetting.future] = actors._begin_reset(
                [actors._slots[env_id]], [resetting.seed], [options], collected=False
            )
        except SerializationError as error:
            raise TriesSpentError(env_id) from error

    def _retry(self, env_id: int, resetting: _Resetting, error: BaseException, renews: bool) -> None:
        resetting.failed += 1
        if resetting.failed >= self._max_retry:
            raise TriesSpentError(env_id) from error
        if (renews and not is_lost(error)) or is_unreadable(error):
            self._actors[env_id].renew()
        resetting.future, resetting.due = None, time.monotonic() + self._pause


def _first_observation(env_id: int, future: EnvFuture) -> Any:
    step = future.result()
    begun: Begun = step.info
    if begun.complaint is not None:
        _log.warning("env %s was reset without its seed, since its seed method failed:\n%s", env_id, begun.complaint)
    [obs] = begun.misfit or (step.obs,)
    return obs


def is_lost(error: BaseException) -> bool:
    """Whether the env's process is gone."""
    return isinstance(error, ActorError) and not isinstance(error, SerializationError)


def is_unreadable(error: BaseException) -> bool:
    """Whether a reply came that could not be unpickled here; what the worker says has its traceback as a cause."""
    if not isinstance(error, SerializationError) or error.__cause__ is None:
        return False
    return not isinstance(error.__cause__.__cause__, RemoteTraceback)
