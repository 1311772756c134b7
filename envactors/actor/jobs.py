"""Jobs: the entries of an actor's queue. The worker runs one job at a time."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from envactors.actor import recording
from envactors.actor.error_factory import ErrorFactory
from envactors.actor.exits import Exit, Next, Step, runs_again
from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.job_runner import JobRunner
from envactors.actor.states import EndReason
from envactors.errors import ActorError
from envactors.mailbox.control_page import METHOD_NAMES
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import dumps, load_plain

# Makes the error of a step that no process will run.
ErrorOf: TypeAlias = Callable[[Step], ActorError]
# Before Python 3.12 looking up a member of an enum takes as long as a function call.
_FAILED = Kind.FAILED


class Job:
    """An entry of an actor's queue. The actor calls every method under its lock.

    Attributes:
        future: The future of its outcome; None if nobody waits for it.
        call_id: Its call id; 0 as long as the worker has received nothing of it.
        started: When it was sent (`time.monotonic`); 0.0 until then.
        deadline: How long it may run, in seconds; None for no limit.
        age: Its age, for permits; the older a job is, the lower. Jobs that go first have 0.
        needs_permit: Whether it steps or resets envs, so that it counts for ``max_running``.
        is_of_process: Whether it ends with the process, since the next process gets another one.
        survives_interrupt: Whether it stays in the queue when an interrupted change is repaired.
    """

    future: ActorFuture | None = None
    call_id: int = 0
    started: float = 0.0
    deadline: float | None = None
    age: int = 0
    needs_permit: bool = False
    is_of_process: bool = False
    survives_interrupt: bool = True

    def can_join(self, running: Job) -> bool:
        """Return whether it may start before the running job has ended."""
        del running
        return False

    def start(self, actor: JobRunner) -> bool:
        """Send it to the worker, which is free for it; return False if nothing of it is left to run."""
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Return whether the worker has ended it without a reply."""
        return False

    def call_when_finished(self) -> None:
        """Have the actor notice that it is finished, since another job waits for that."""

    def step(self, actor: JobRunner) -> Step | None:
        """Return the step that the worker runs, or begins next; None if it is finished."""
        raise NotImplementedError

    def culprit(self, actor: JobRunner) -> Step | None:
        """Return the step that an ended process was running, or missed its deadline in; None if it had not begun."""
        worker, step = actor.incarnation.worker, self.step(actor)
        is_blamed = actor.incarnation.end_reason in (EndReason.TIMEOUT, EndReason.ABORT)
        has_begun = worker is None or worker.page.progress().call_id == self.call_id
        return step if has_begun or is_blamed else None

    def on_late(self, step: Step) -> None:
        """Ignore all later progress of the worker: a step has missed its deadline."""
        self.deadline = step.deadline

    def on_part(self, frame: Frame) -> None:
        """Take a part of the reply."""

    def on_reply(self, actor: JobRunner, frame: Frame) -> bool:
        """Take the reply; return whether the job has ended."""
        del actor, frame
        return True

    def count_completed(self) -> None:
        """Count the steps that an ended process has completed, before anything is decided about its envs."""

    def after_exit(self, exit: Exit) -> bool:  # noqa: A002
        """End after the exit of the process that it was sent to; return whether it goes on in the next one instead."""
        del exit
        return False

    def fail(self, actor: JobRunner, error_of: ErrorOf) -> None:
        """End with an error: no process will run it."""


@dataclasses.dataclass(eq=False)
class Call(Job):
    """A call of a method, or another request with one reply.

    Attributes:
        method: The method, for deadlines and errors.
        index: The index of the env.
        kind: The kind of its message.
        future: The future of its outcome.
        deadline: Its own deadline; None for that of `Deadlines`.
        retries: How many crashes and missed deadlines it survives.
        payload: Its message, pickled.
        incarnation: The index of the only process that may run it; None for any.
        take_reply: Called with the reply, under the lock, before the future has it; None for nothing.
    """

    method: str
    index: int
    kind: Kind
    future: ActorFuture
    deadline: float | None = None
    retries: int = 0
    payload: bytes | bytearray = b""
    incarnation: int | None = None
    take_reply: Callable[[Frame], object] | None = None

    def __post_init__(self) -> None:
        self.needs_permit = self.kind == Kind.CALL and self.method in ("step", "reset")

    def start(self, actor: JobRunner) -> bool:
        """Send the message."""
        if self.incarnation not in (None, actor.incarnation.index):
            self.fail(actor, actor.errors.lost_process(actor.last_crash, self.incarnation))
            return False
        self.future.set_running()
        actor.deadline_watch.watch(self.started, self.deadline)
        actor.send(self.kind, self.call_id, self.payload)
        return True

    def step(self, actor: JobRunner) -> Step:
        """Return the call."""
        del actor
        return Step(self.method, self.index, self.call_id, self.started, self.deadline)

    def on_reply(self, actor: JobRunner, frame: Frame) -> bool:
        """Pass the reply to the future."""
        recording.recorder.on_span(actor, self.method, self.started)
        actor.tenant.on_call(self.kind, self.index, self.payload, frame)
        if self.take_reply is not None:
            self.take_reply(frame)
        self.future.set_outcome(UnreadReply(actor.errors, self.step(actor), frame, actor.pid))
        return True

    def after_exit(self, exit: Exit) -> bool:  # noqa: A002
        """Run again if the worker had not begun it, or if it has retries."""
        has_begun, is_discard = exit.culprit is not None, exit.reason is EndReason.DISCARD
        is_requested = exit.plan.next in (Next.CLOSE, Next.START)
        is_again = runs_again(
            has_begun=has_begun, retries=self.retries, is_discard=is_discard, is_requested=is_requested
        )
        if not is_again:
            self.future.set_error(exit.error)
        elif has_begun:
            self.retries -= 1
        return is_again

    def fail(self, actor: JobRunner, error_of: ErrorOf) -> None:
        """End with an error."""
        self.future.set_error(error_of(self.step(actor)))


class SharedQueue:
    """The calls that wait for any of several equal actors, which share a lock. Use it under that lock.

    An idle actor takes the next call; the last actor that can run calls fails those that are left.

    Args:
        actors: The actors.

    Attributes:
        calls: The calls, the next one first.
    """

    def __init__(self, actors: Sequence[JobRunner]) -> None:
        self.calls: deque[Call] = deque()
        self._actors = actors

    @property
    def is_served(self) -> bool:
        """Whether an actor can run calls, now or later."""
        return any(actor.is_usable for actor in self._actors)

    def take(self) -> Call | None:
        """Remove and return the next call that was not canceled; None if there is none."""
        while self.calls:
            call = self.calls.popleft()
            if not call.future.done():
                return call
        return None


class UnreadReply:
    """The reply to a call, not read yet; see `envactors.actor.future.Outcome`."""

    __slots__ = ("_errors", "_frame", "_pid", "_step", "is_failure")

    def __init__(self, errors: ErrorFactory, step: Step, frame: Frame, pid: int | None) -> None:
        self.is_failure: bool = frame.kind == _FAILED
        self._errors, self._step, self._frame, self._pid = errors, step, frame, pid

    def read(self) -> tuple[Any, BaseException | None]:
        """Unpickle the reply, which runs code of users."""
        return self._errors.outcome(self._step, self._frame, self._pid)


class Replay(Job):
    """Repeats the journal of an env in a new process.

    Args:
        index: The index of the env.
        payload: A pickled `envactors.mailbox.messages.Replay`.
        on_end: Called with whether the env is where it was.
    """

    needs_permit = True
    is_of_process = True

    def __init__(self, index: int, payload: bytes | bytearray, on_end: Callable[[bool], object]) -> None:
        self.index = index
        self._payload = payload
        self._on_end = on_end

    def start(self, actor: JobRunner) -> bool:
        """Send the journal."""
        actor.deadline_watch.watch(self.started)
        actor.send(Kind.REPLAY, self.call_id, self._payload)
        return True

    def step(self, actor: JobRunner) -> Step:
        """Return the request that is repeated now: each one has its own deadline."""
        worker = actor.incarnation.worker
        progress = None if worker is None else worker.page.progress()
        if progress is None or progress.call_id != self.call_id:
            return Step("reset", self.index, self.call_id, self.started, actor.config.deadlines.of("reset"))
        method = METHOD_NAMES.get(progress.method, "call")
        return Step(method, self.index, self.call_id, progress.since, actor.config.deadlines.of(method))

    def on_reply(self, actor: JobRunner, frame: Frame) -> bool:
        """Pass the result on."""
        actor.replays += 1
        actor.longest_replay = max(actor.longest_replay, time.monotonic() - self.started)
        self._on_end(frame.kind != _FAILED and load_plain(frame.payload) is True)
        return True


class Close(Job):
    """Closes the envs; then the process ends."""

    method = "close"

    def start(self, actor: JobRunner) -> bool:
        """Ask the worker to close its envs and to exit."""
        actor.end_process(EndReason.CLOSE, kill_in=None)
        actor.send(Kind.CLOSE, self.call_id, dumps(()))
        return True

    def step(self, actor: JobRunner) -> Step:
        """Return the closing."""
        return Step(self.method, actor.config.first_index, self.call_id, self.started)

    def culprit(self, actor: JobRunner) -> Step:
        """Return this: the worker ends because of it."""
        return self.step(actor)


class Renewal(Close):
    """Replaces the process. It ends when the next one has started.

    Args:
        future: Its result is the index of the new incarnation; None if nobody waits for it.
    """

    method = "renew"

    def __init__(self, future: ActorFuture | None = None) -> None:
        self.future = future

    def start(self, actor: JobRunner) -> bool:
        """Ask the worker to close its envs and to exit."""
        actor.begin_renewal(self)
        actor.end_process(EndReason.RENEW, kill_in=actor.config.deadlines.close)
        actor.send(Kind.CLOSE, self.call_id, dumps(()))
        return True

    def end(self, incarnation: int) -> None:
        """End with the new incarnation."""
        if self.future is not None:
            self.future.set_outcome(ReadyOutcome(incarnation))

    def fail(self, actor: JobRunner, error_of: ErrorOf) -> None:
        """End with an error."""
        if self.future is not None:
            self.future.set_error(error_of(self.step(actor)))
