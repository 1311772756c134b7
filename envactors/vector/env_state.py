"""One env of a vector: where its episode stands, and which handle reaches it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorView, Caller
from envactors.actor.states import ActorState
from envactors.errors import VectorInputError
from envactors.wire.messages import Reset


class EnvState:
    """One env of a vector.

    Args:
        env_id: Its index.
        handle: Its handle.

    Attributes:
        supervisor: Its actor.
        position: Its position within its actor.
        needs_reset: Whether it must be reset before it can step.
        strict: Whether an env that was never reset, or whose episode is over, must be reset before it can step;
            otherwise only one that was lost.
        incarnation: The process that holds its episode; None without an episode.
        root_seed: The seed of its last seeded reset.
        episode: The number of its next episode since that reset, which was number 0; if episodes are seeded.
        retiring: Whether its process is to be replaced before its next episode.
        steps_before: How many steps it had made when its present process began.
    """

    def __init__(self, env_id: int, handle: ActorView) -> None:
        self.env_id = env_id
        self.handle = handle
        self.supervisor = handle._supervisor
        self.position = handle._env
        self.needs_reset = self.strict = True
        self.incarnation: int | None = None
        self.root_seed: int | None = None
        self.episode = 0
        self.retiring = False
        self.steps_before = 0

    @property
    def is_alone(self) -> bool:
        """Whether no other env shares its actor."""
        return len(self.supervisor.config.start.factories) == 1

    @property
    def actor_lives(self) -> bool:
        """Whether its actor can have another process."""
        return self.handle.state not in (ActorState.DEAD, ActorState.CLOSED)

    def retire_process(self) -> None:
        """Replace the process before what is asked next, if that is due."""
        due, self.retiring = self.retiring and self.actor_lives, False
        if due:
            self.supervisor.renew(ActorFuture(self.supervisor, None))

    def reset_message(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Return what the worker is asked to reset it."""
        return Reset(self.position, seed, options, self.root_seed)


def check_steppable(envs: Iterable[EnvState]) -> None:
    """Refuse to step an env that needs a reset.

    Raises:
        VectorInputError: There is one.
    """
    for env in envs:
        if env.needs_reset:
            raise VectorInputError(f"env {env.env_id} was asked to step: it needs a reset first")


class EnvCaller(Caller):
    """Calls one env of several that share a process; its episodes are the facade's."""

    __slots__ = ()

    def _check_method(self, method: str) -> None:
        if method in ("step", "reset"):
            raise VectorInputError(
                f"{method} through the handle of an env that shares its process: the facade keeps account of its "
                f"episodes; use envs.{method}(..., env_ids=[i])"
            )


class EnvHandle(EnvCaller, ActorView):
    """An env of several that share a process: its methods and attributes, and what concerns it alone."""

    __slots__ = ()
    _caller_type = EnvCaller

    def renew(self) -> NoReturn:
        """Raise: it would take the other envs of the process with it."""
        self._refuse("renew()")

    def kill(self, *, restart: bool = False) -> NoReturn:
        """Raise: it would take the other envs of the process with it."""
        self._refuse(f"kill(restart={restart})")

    def close(self, timeout: float | None = None) -> NoReturn:
        """Raise: it would take the other envs of the process with it."""
        self._refuse(f"close({timeout})")

    def _refuse(self, call: str) -> NoReturn:
        raise VectorInputError(
            f"{call} through the handle of env {self._supervisor.config.first_index + self._env}, which shares its "
            f"process with other envs: use envs.actors[j].{call} for all of {self.name!r}, or make the vector with "
            "envs_per_actor=1"
        )
