"""The jobs that run requests: calls, and replays of the requests to an earlier process."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

from envactors.actor import recording
from envactors.actor.actor import Actor
from envactors.actor.actor_process import EndReason
from envactors.actor.future import ActorFuture, Outcome
from envactors.actor.job import Activity, ErrorOf, Job, ProcessExit
from envactors.crashes.inputs import Inputs
from envactors.mailbox import messages
from envactors.mailbox.control_page import METHOD_NAMES
from envactors.mailbox.messages import Failure, Frame, Kind
from envactors.mailbox.pickling import load_message, loads


@dataclasses.dataclass(eq=False)
class Call(Job):
    """A call of a method, or another request with one reply.

    Attributes:
        method: The method, for deadlines and errors.
        index: The index of the env.
        kind: The kind of its message.
        future: The future of its outcome.
        deadline: How long it may run, in seconds. Before its start, None stands for that of `Deadlines`; later, for no
            limit.
        retries: How many crashes and missed deadlines it survives.
        payload: Its message, pickled.
        incarnation: The index of the only process that may run it; None for any.
        before_outcome: Called with the reply under the lock, just before the future gets its outcome; or None.
    """

    actor: Actor = dataclasses.field(init=False, repr=False)
    method: str
    index: int
    kind: Kind
    future: ActorFuture
    deadline: float | None = None
    retries: int = 0
    payload: bytes | bytearray = b""
    incarnation: int | None = None
    before_outcome: Callable[[Frame], object] | None = None

    @property
    def needs_permit(self) -> bool:  # type: ignore[override] # nobody sets it
        """Whether it steps or resets the env: itself, or through an adapter, whose methods have a prefix."""
        return self.kind == Kind.CALL and self.method.removeprefix("envactors_") in ("step", "reset")

    def start(self) -> Job | None:
        """Send the message."""
        actor = self.actor
        if self.incarnation not in (None, actor.process.incarnation):
            unsent = self.activity()._replace(call_id=0, started_at=0.0)
            actor.jobs.fail(self, lambda _: actor.errors.process_gone(unsent, self.incarnation, actor.last_exit_error))
            return None
        if self.deadline is None or not actor.config.backend.traits.can_kill:
            self.deadline = actor.config.deadlines.of(self.method)
        self.future.set_running()
        actor.deadline_watch.watch(self.started_at, self.deadline)
        actor.send(self.kind, self.call_id, self.payload)
        return self

    def activity(self) -> Activity:
        """Return the call."""
        return Activity(self.method, self.index, self.call_id, self.started_at, self.deadline)

    def on_reply(self, frame: Frame) -> bool:
        """Pass the reply to the future."""
        actor = self.actor
        recording.recorder.on_span(actor, self.method, self.started_at)
        outcome: Outcome = actor.errors.outcome(self.activity(), frame, actor.pid)
        if actor.config.crashes is not None and frame.kind == Kind.FAILED and self.kind == Kind.CALL:
            failure, get_inputs = load_message(Failure, frame.payload), functools.partial(self.inputs, self.activity())
            place = self.activity(), frame.incarnation, actor.pid
            outcome = actor.config.crashes.name(outcome, failure, get_inputs, *place)
        actor.tenant.on_call(self.kind, self.index, self.payload, frame)
        if self.before_outcome is not None:
            self.before_outcome(frame)
        self.future.set_outcome(outcome)
        return True

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the call, and the requests before it as far as they are known."""
        return self.actor.tenant.inputs_of_call(culprit.index, (self.kind, bytes(self.payload)))

    def handle_exit(self, process_exit: ProcessExit) -> bool:
        """Let it run again if the worker had not begun it, or if it has retries."""
        if process_exit.culprit is None:
            return False
        if not (self.retries > 0 and process_exit.allows_retry):
            self.future.set_exception(process_exit.error)
            return True
        if process_exit.reason is not EndReason.HELPER_LOST:
            self.retries -= 1
        return False

    def fail(self, error_of: ErrorOf) -> None:
        """End with an error."""
        self.future.set_exception(error_of(self.activity()))


class ReplayJob(Job):
    """Repeats the journal of an env in a new process.

    Args:
        index: The index of the env.
        payload: A pickled `envactors.mailbox.messages.Replay`.
        on_end: Called with whether the env is where it was.
    """

    actor: Actor
    needs_permit = True
    dies_with_process = True
    runs_first = True

    def __init__(self, index: int, payload: bytes | bytearray, on_end: Callable[[bool], object]) -> None:
        self.index = index
        self._payload = payload
        self._on_end = on_end

    def start(self) -> Job:
        """Send the journal."""
        actor = self.actor
        actor.deadline_watch.watch(self.started_at)
        actor.send(Kind.REPLAY, self.call_id, self._payload)
        return self

    def activity(self) -> Activity:
        """Return the request that is repeated now: each one has its own deadline."""
        worker = self.actor.process.worker
        deadlines = self.actor.config.deadlines
        progress = None if worker is None else worker.page.progress()
        if progress is None or progress.call_id != self.call_id:
            return Activity("reset", self.index, self.call_id, self.started_at, deadlines.of("reset"))
        method = METHOD_NAMES[progress.method]
        return Activity(method, self.index, self.call_id, progress.since, deadlines.of(method))

    def inputs(self, culprit: Activity) -> Inputs:
        """Return the journal, one of whose requests has ended the process."""
        return Inputs(messages.Replay(*loads(self._payload)))

    def on_reply(self, frame: Frame) -> bool:
        """Pass the result on."""
        is_same = frame.kind != Kind.FAILED and load_message(bool, frame.payload)
        jobs = self.actor.jobs
        jobs.replays += 1
        jobs.longest_replay = max(jobs.longest_replay, time.monotonic() - self.started_at)
        self._on_end(is_same)
        return True
