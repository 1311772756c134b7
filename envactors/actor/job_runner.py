"""The actor as its jobs see it, so that jobs do not import the actor that queues them."""

from __future__ import annotations

from typing import Any, Protocol

from envactors.actor.config import ActorConfig
from envactors.actor.error_factory import ErrorFactory
from envactors.actor.incarnation import Incarnation
from envactors.actor.states import EndReason
from envactors.actor.timers import DeadlineWatch
from envactors.errors import ActorError
from envactors.mailbox.control_page import ControlPage
from envactors.mailbox.messages import Frame, Kind
from envactors.runtime import Runtime


class CallRecorder(Protocol):
    """The tenant of an actor, as calls see it; see `envactors.actor.tenant.Tenant`."""

    def on_call(self, kind: Kind, index: int, payload: bytes | bytearray, frame: Frame) -> None:
        """Record a call that has returned or raised."""


class JobRunner(Protocol):
    """An actor, as its jobs see it; see `envactors.actor.actor.Actor`. Jobs use it under its lock."""

    config: ActorConfig
    errors: ErrorFactory
    incarnation: Incarnation
    runtime: Runtime
    deadline_watch: DeadlineWatch
    last_crash: ActorError | None
    replays: int
    longest_replay: float

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""

    @property
    def page(self) -> ControlPage | None:
        """The control page of the process; None while there is no process."""

    @property
    def is_usable(self) -> bool:
        """Whether it can run calls, now or once a process has started."""

    @property
    def tenant(self) -> CallRecorder:
        """Records calls."""

    def send(self, kind: Kind, call_id: int, payload: Any) -> None:
        """Send a message to the worker."""

    def begin_renewal(self, renewal: Any) -> None:
        """Remember a `Renewal` until the next process has started."""

    def end_process(self, reason: EndReason | None, *, kill_in: float | None = 0.0) -> None:
        """End the process; see `Actor.end_process`."""
