"""Results that were not delivered yet, also those of requests that an exception has interrupted.

That may be a signal handler's, an asynchronous one, or a `RecursionError`. The next request then finds out in
`Asker.settle_interrupted` which envs have requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from envactors.actor.slots import IDLE, READY, ROLLING, Slots
from envactors.envs.results import EnvStep
from envactors.errors import ActorClosedError, AlreadyPendingError, EnvActorsError

_Class = TypeVar("_Class", bound=type)


class ReadyResult(NamedTuple):
    """A result that was not delivered yet.

    Attributes:
        step: The result; None if it is in the rows of shared memory.
        error: The error of the request; None if it has a result.
    """

    step: EnvStep | None = None
    error: BaseException | None = None


class Pending:
    """Results that were not delivered yet. Actors pass this object to `Reactor.wake` when an outcome has arrived.

    Args:
        slots: All envs.

    Attributes:
        slots: All envs.
        ready: Results of envs that are `READY`, by env, in the order of their completion, without those that a thread
            is delivering; an interrupt may leave more, of other envs.
        is_disturbed: Whether an exception has interrupted a request, so that envs may be marked as asked without having
            been posted or queued.
        was_disturbed: Whether results of an interrupted request may be pending.
        waiting: At how many complete rows workers ring for each thread that waits in `Collector`; 0 if they need not.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.ready: dict[int, ReadyResult] = {}
        self.is_disturbed: bool = False
        self.was_disturbed: bool = False
        self.waiting: dict[object, int] = {}

    def check_idle(self, env_ids: Iterable[int]) -> None:
        """Check that the envs have no results pending.

        Raises:
            AlreadyPendingError: An env has a result pending.
        """
        states = self.slots.states
        busy = [env_id for env_id in env_ids if states[env_id] != IDLE]
        if busy:
            raise AlreadyPendingError(
                f"the envs {busy} have results pending: receive them with recv (or from "
                "their futures) before the next request"
            )

    def note_failure(self, error: BaseException, before: bytes) -> None:
        """Record that an exception has interrupted a request.

        The library's errors come before or after a request, except that of an actor that was closed: the envs of other
        actors may have been posted by then.

        Args:
            error: The exception.
            before: States of the envs before the request.
        """
        if isinstance(error, ActorClosedError) or not isinstance(error, EnvActorsError):
            self.is_disturbed = True
            self.was_disturbed |= self.slots.states != before

    def add(self, env_id: int, result: ReadyResult) -> None:
        """Add the result of an env."""
        self.ready.pop(env_id, None)
        self.ready[env_id] = result
        self.slots.states[env_id] = READY

    def take(self, env_ids: Iterable[int]) -> None:
        """Remove results that were delivered."""
        for env_id in env_ids:
            self.slots.states[env_id] = IDLE
            self.ready.pop(env_id, None)

    def ready_ids(self) -> list[int]:
        """Return the envs that are `READY`, in the order of the completion of their results."""
        return [env_id for env_id in tuple(self.ready) if self.slots.states[env_id] == READY]

    def in_flight(self, env_ids: Iterable[int]) -> list[int]:
        """Return the envs that have a request whose result is not ready."""
        return [env_id for env_id in env_ids if self.slots.states[env_id] not in (IDLE, READY)]

    @property
    def receivable(self) -> list[int]:
        """The envs whose results `recv` can deliver: those of all requests without futures."""
        all_states = zip(self.slots.of, self.slots.states, strict=True)
        asked = [slot for slot, state in all_states if state not in (IDLE, ROLLING)]
        return [slot.index for slot in asked if slot.op is None or slot.op.future is None]


def notes_interrupts(*names: str) -> Callable[[_Class], _Class]:
    """Make methods of a class record in what is pending that they were interrupted."""

    def change(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, _noting(getattr(cls, name)))
        return cls

    return change


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        core = self._core
        before = None if core is None else bytes(core.slots.states)
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if core is not None:  # else the vector is closed
                core.pending.note_failure(error, before)
            raise

    return noting
