"""What the parts of one vector share."""

from __future__ import annotations

from collections.abc import Iterable

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorView
from envactors.actor.reactor import Reactor
from envactors.actor.slots import Slots
from envactors.actor.supervisor import Supervisor
from envactors.envs.episodes import Episodes
from envactors.envs.pending import Pending
from envactors.envs.results import Batcher, EnvStep, RowReader
from envactors.errors import VectorInputError
from envactors.mailbox.messages import Description
from envactors.mailbox.specs import Spec
from envactors.options import RecyclePolicy


class EnvFuture(ActorFuture[EnvStep]):
    """Future of one env's step or reset, which resolves to an `EnvStep`.

    Attributes:
        env_id: Id of the env.
    """

    def __init__(self, supervisor: Supervisor, keep_alive: object, env_id: int) -> None:
        super().__init__(supervisor, keep_alive)
        self.env_id = env_id


class VectorCore:
    """The state of one vector. Its actors refer to it, so it refers to no handles, which keep actors alive.

    Args:
        supervisors: The actor of each env.
        slots: All envs.
        description: Specs of the envs.
        copy: Whether batches of all envs are copied out of the rows.
        recycle: Policy that replaces processes between episodes; None for never.

    Attributes:
        supervisors: The actor of each env.
        actors: All actors, in their order.
        reactor: Reads the replies of the actors when no other thread does.
        slots: All envs.
        pending: Results that were not delivered yet.
        episodes: Counts steps and episodes.
        reader: Reads results out of rows.
        batcher: Makes batches of single results.
        action_spec: Spec of one env's action; None to send actions unchecked.
    """

    def __init__(
        self,
        supervisors: list[Supervisor],
        slots: Slots,
        description: Description,
        *,
        copy: bool,
        recycle: RecyclePolicy | None,
    ) -> None:
        self.supervisors = supervisors
        self.actors: list[Supervisor] = list(dict.fromkeys(supervisors))
        self.reactor: Reactor = supervisors[0].reactor
        self.slots = slots
        self.pending: Pending = Pending(slots)
        self.episodes: Episodes = Episodes(slots, supervisors, recycle)
        self.reader: RowReader = RowReader(slots, description.reward, copy=copy)
        self.batcher: Batcher = Batcher(description.observation, description.reward)
        self.action_spec: Spec | None = description.action

    def make_future(self, handle: ActorView, env_id: int) -> EnvFuture:
        """Return a future for the next request of an env."""
        return EnvFuture(handle._supervisor, handle._lifeline, env_id)

    def check_steppable(self, env_ids: Iterable[int]) -> None:
        """Check that envs can step.

        Raises:
            VectorInputError: An env needs a reset first.
        """
        unusual = self.slots.unusual
        for env_id in env_ids if unusual else ():
            if env_id in unusual and self.slots.of[env_id].needs_reset:
                raise VectorInputError(f"env {env_id} needs a reset first: call reset(env_ids=[{env_id}])")
