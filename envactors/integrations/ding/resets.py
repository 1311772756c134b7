"""Pending resets of DI-engine's envs, each with a limited number of attempts.

The states that follow from them live in `envactors.integrations.ding.states`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, KeysView
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from typing import Any

from envactors.actor.states import ActorState
from envactors.errors import ActorDiedError, ActorError, RemoteTraceback, SerializationError, cause_of
from envactors.integrations.access import VectorAccess
from envactors.integrations.ding.adapter import ResetInfo
from envactors.mailbox.pickling import safe_str
from envactors.vector_env import EnvFuture, VectorEnv

_log = logging.getLogger("envactors")


class TriesSpentError(Exception):
    """A reset has no attempts left; ``__cause__`` is the last error."""


@dataclasses.dataclass
class _Resetting:
    """A pending reset.

    Attributes:
        seed: Seed, or None.
        failed: Number of failed attempts.
        future: The future of the current attempt; None between two attempts.
        due: When the next attempt starts, if none is running (`time.monotonic`).
    """

    seed: int | None
    failed: int = 0
    future: EnvFuture | None = None
    due: float = 0.0


class Resets:
    """Starts resets, retries those that fail, and collects the results of the others.

    Args:
        actors: Vector env with one env per actor.
        max_retry: How often a reset is attempted.
        pause: Time between two attempts, in seconds.
        revives: True to renew an actor even if it has no restarts left.

    Attributes:
        seeds: The seed of the last reset of each env, by env id; None without one.
    """

    def __init__(self, actors: VectorEnv, max_retry: int, pause: float, revives: bool) -> None:
        self._actors = actors.actors
        self._access = VectorAccess(actors)
        self._max_retry = max_retry
        self._pause = pause
        self._revives = revives
        self._pending: dict[int, _Resetting] = {}
        self.seeds: dict[int, int | None] = {}

    @property
    def pending(self) -> KeysView[int]:
        """Ids of the envs with a pending reset."""
        return self._pending.keys()

    def begin(self, env_id: int, seed: int | None, options: dict[str, Any]) -> None:
        """Start a reset.

        Args:
            env_id: Index of the env.
            seed: Seed, or None.
            options: Options passed to the env.

        Raises:
            TriesSpentError: The options cannot be pickled.
        """
        self._pending[env_id] = resetting = _Resetting(seed)
        self._try(env_id, resetting, options)

    def settle(self, options: Callable[[int], dict[str, Any]], renews: bool) -> dict[int, Any]:
        """Return the observations of finished resets by env id, and start the attempts that are due.

        Args:
            options: Returns the options for an env.
            renews: True to run the next attempt after a failure in a new process.

        Raises:
            TriesSpentError: A reset has no attempts left.
        """
        begun = {}
        for env_id, resetting in list(self._pending.items()):
            future = resetting.future
            if future is None:
                if time.monotonic() >= resetting.due:
                    self._try(env_id, resetting, options(env_id))
            elif future.done():
                error = future.exception()
                if error is None:
                    del self._pending[env_id]
                    begun[env_id] = _first_observation(env_id, future)
                    info: Any = future.result().info  # a ResetInfo
                    self.seeds[env_id] = info.seed
                else:
                    self._retry(env_id, resetting, error, renews)
        return begun

    def wait(self) -> None:
        """Wait until an attempt has ended or is due."""
        running = [one.future for one in self._pending.values() if one.future is not None]
        dues = [one.due for one in self._pending.values() if one.future is None]
        pause = max(min(dues) - time.monotonic(), 0.0) if dues else None
        if running:
            wait_for(running, pause, FIRST_COMPLETED)
        else:
            time.sleep(pause or 0.0)

    def _try(self, env_id: int, resetting: _Resetting, options: dict[str, Any]) -> None:
        actor = self._actors[env_id]
        if self._revives and actor.state is ActorState.DEAD:
            actor.renew()
        try:
            resetting.future = self._access.submit_reset(env_id, resetting.seed, options)
        except SerializationError as error:
            raise self._spent(env_id, error) from error

    def _retry(self, env_id: int, resetting: _Resetting, error: BaseException, renews: bool) -> None:
        resetting.failed += not (self._revives and had_ended_before(error))
        if resetting.failed >= self._max_retry:
            raise self._spent(env_id, error) from error
        if (renews and not is_lost(error)) or is_unreadable(error):
            self._actors[env_id].renew()
        resetting.future, resetting.due = None, time.monotonic() + self._pause

    def _spent(self, env_id: int, error: BaseException) -> TriesSpentError:
        tries = f"failed {self._max_retry} times (max_retry={self._max_retry})"
        return TriesSpentError(f"the reset of env {env_id} {tries}, the last time with {safe_str(error)}")


def _first_observation(env_id: int, future: EnvFuture) -> Any:
    step = future.result()
    info: Any = step.info
    begun: ResetInfo = info
    if begun.complaint is not None:
        _log.warning("env %s was reset without its seed, since its seed method failed:\n%s", env_id, begun.complaint)
    [obs] = begun.misfit or (step.obs,)
    return obs


def had_ended_before(error: BaseException) -> bool:
    """Return whether an error means that the process of the env had ended before it could begin the request."""
    return isinstance(error, ActorDiedError) and getattr(error.__cause__, "method", "") is None


def is_lost(error: BaseException) -> bool:
    """Return whether an error means that the process of the env is gone."""
    return isinstance(error, ActorError) and not isinstance(error, SerializationError)


def is_unreadable(error: BaseException) -> bool:
    """Return whether an error means that a reply could not be unpickled in this process."""
    if not isinstance(error, SerializationError) or error.__cause__ is None:
        return False
    # Errors from the worker carry its traceback as the cause.
    return not isinstance(cause_of(error.__cause__), RemoteTraceback)
