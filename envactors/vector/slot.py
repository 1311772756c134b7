"""One env of a vector: what it owes, where its episode stands; and the future of its next result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.errors import ActorDiedError, ActorError, SerializationError, twin
from envactors.vector.batch import EnvStep
from envactors.wire.messages import Kind, Reset, Step, Transition
from envactors.worker.host import NotResetError

Autoreset = Literal["next_step", "same_step", "disabled"]


class EnvFuture(ActorFuture):
    """The future of one env's reset or step; resolves to an `EnvStep`."""

    def __init__(self, slot: Slot, was_reset: bool, arrived: Callable[[EnvFuture], None] | None) -> None:
        super().__init__(slot.handle._supervisor, slot.handle._lifeline)
        self._slot = slot
        self._was_reset = was_reset
        self._arrived = arrived

    @property
    def env_id(self) -> int:
        """Which env."""
        return self._slot.env_id

    @property
    def collected(self) -> bool:
        """Whether the result is handed out by `VectorEnv.recv` rather than by this future."""
        return self._arrived is not None

    @property
    def failed(self) -> bool:
        """Whether it has ended with an exception."""
        return self.settled() and self.exception() is not None

    def settle(self, value: Any, error: BaseException | None, incarnation: int) -> None:
        slot = self._slot
        if not self.settled():
            step = None
            if error is None:
                step = EnvStep(slot.env_id, *Transition(*value), incarnation)
            elif isinstance(error, NotResetError):
                error = slot.loss_while_idle(incarnation)
            # The slot first: whoever sees the result may step on at once.
            slot.note(step, error, self._was_reset)
            if self._arrived is None:
                slot.owed = None
            super().settle(step, error, incarnation)
        if self._arrived is not None and slot.owed is self:
            self._arrived(self)

    def discard(self) -> None:
        self._slot.owed = None
        super().discard()


class Slot:
    """One env of a vector.

    Attributes:
        env_id: Its number.
        handle: Its actor's handle.
        owed: The future of a result that was asked for and not handed out yet.
        needs_reset: Whether it must be reset before it can step.
        ended: Whether the next step resets, by autoreset.
        root_seed: The seed of its last seeded reset.
        steps: How many steps it has made.
        episodes: How many episodes have ended.
    """

    def __init__(self, env_id: int, handle: ActorHandle, position: int, autoreset: Autoreset) -> None:
        self.env_id = env_id
        self.handle = handle
        self.owed: EnvFuture | None = None
        self.needs_reset = True
        self.ended = False
        self.root_seed: int | None = None
        self.steps = 0
        self.episodes = 0
        self._position = position
        self._autoreset = autoreset

    def reset(
        self, seed: int | None, options: dict[str, Any] | None, arrived: Callable[[EnvFuture], None] | None
    ) -> EnvFuture:
        """Starts a reset."""
        if seed is not None:
            self.root_seed = seed
        return self._ask(Kind.RESET, Reset(self._position, seed, options, self.root_seed), "reset", arrived)

    def step(self, action: Any, arrived: Callable[[EnvFuture], None] | None) -> EnvFuture:
        """Starts a step, or the reset that stands in for it after the end of an episode."""
        if self.ended and self._autoreset == "next_step":
            return self.reset(None, None, arrived)
        message = Step(self._position, action, self._autoreset == "same_step", self.root_seed)
        return self._ask(Kind.STEP, message, "step", arrived)

    def _ask(
        self, kind: Kind, message: tuple[Any, ...], method: str, arrived: Callable[[EnvFuture], None] | None
    ) -> EnvFuture:
        future = self.owed = EnvFuture(self, kind == Kind.RESET, arrived)
        try:
            self.handle._supervisor.ask(kind, message, future, method, self._position)
        except BaseException:
            self.owed = None
            raise
        return future

    def note(self, step: EnvStep | None, error: BaseException | None, was_reset: bool) -> None:
        """Takes in where the episode stands after an outcome."""
        if step is not None:
            over = step.terminated or step.truncated
            self.ended = over and self._autoreset != "same_step"
            self.needs_reset = over and self._autoreset == "disabled"
            self.steps += not was_reset
            self.episodes += over
        elif was_reset or (isinstance(error, ActorError) and not isinstance(error, SerializationError)):
            self.needs_reset, self.ended = True, False

    def loss_while_idle(self, incarnation: int) -> ActorError:
        """The error of a step whose env was lost since its last result."""
        last = self.handle.stats().last_failure
        if last is not None and last.incarnation == incarnation - 1:
            return twin(last)
        return ActorDiedError(
            f"env {self.env_id} of actor {self.handle.name!r} was replaced (incarnation {incarnation}) since its "
            "last result: reset it before the next step",
            actor=self.handle.name,
            index=self.env_id,
            incarnation=incarnation,
            method="step",
            aborted=True,
        )
