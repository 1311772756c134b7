"""One env of a vector: where its episode stands, and which handle reaches it."""

from __future__ import annotations

from collections.abc import Iterable

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorView
from envactors.actor.states import ActorState
from envactors.actor.supervisor import Supervisor
from envactors.errors import VectorInputError


class EnvState:
    """One env of a vector.

    Args:
        env_id: Its index.
        handle: Its handle.
        supervisor: Its actor.
        position: Its position within its actor.

    Attributes:
        needs_reset: Whether it must be reset before it can step.
        strict: Whether an env that was never reset, or whose episode is over, must be reset before it can step;
            otherwise only one that was lost.
        incarnation: The process that holds its episode; None without an episode.
        root_seed: The seed of its last seeded reset.
        retiring: Whether its process is to be replaced before its next episode.
        steps_before: How many steps it had made when its present process began.
    """

    def __init__(self, env_id: int, handle: ActorView, supervisor: Supervisor, position: int) -> None:
        self.env_id = env_id
        self.handle = handle
        self.supervisor = supervisor
        self.position = position
        self.needs_reset = self.strict = True
        self.incarnation: int | None = None
        self.root_seed: int | None = None
        self.retiring = False
        self.steps_before = 0

    @property
    def actor_lives(self) -> bool:
        """Whether its actor can have another process."""
        return self.handle.state not in (ActorState.DEAD, ActorState.CLOSED)

    def lose_episode(self) -> None:
        """Note that its episode is lost with its process."""
        self.needs_reset, self.incarnation = True, None

    def retire_process(self) -> None:
        """Replace the process before what is asked next, if that is due."""
        if self.retiring:
            self.retiring = False
            if self.actor_lives:
                self.supervisor.renew(ActorFuture(self.supervisor, None))


def check_steppable(envs: Iterable[EnvState]) -> None:
    """Refuse to step an env that needs a reset.

    Raises:
        VectorInputError: There is one.
    """
    for env in envs:
        if env.needs_reset:
            raise VectorInputError(f"env {env.env_id} was asked to step: it needs a reset first")
