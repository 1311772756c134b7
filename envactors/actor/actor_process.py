"""One process of an actor, from its launch to its exit."""

from __future__ import annotations

import dataclasses

from envactors.actor.evidence import order_fatal_error
from envactors.actor.states import EndReason, is_counted
from envactors.backends.base import ExitStatus, Stacks, Worker
from envactors.mailbox.messages import Failure

# The call id of the first message to a process; those of jobs begin with 1.
START_CALL_ID = 0


@dataclasses.dataclass(eq=False, slots=True)
class ActorProcess:
    """One process of an actor. The next process is another object, so no field outlives its process.

    Attributes:
        incarnation: 0 for the first process of the actor, one more for each next one.
        worker: The worker; None before it is launched, and after its exit.
        is_launching: Whether its launch is pending: it waits for the certain end of the last process, waits for the
            launcher, or has begun and has not returned the worker.
        launched_at: When the launch began (`time.monotonic`).
        envs_made: How many envs it is known to have made, as long as it starts. The last one is not reported by itself.
        failure: The failure of a factory; None if none has failed.
        failed_at: When it came (`time.monotonic`). The other envs are closed after that.
        was_standby: Whether the process was a standby, whose envs were made before.
        has_started: Whether all envs were made.
        close_id: The call id of the request to close the envs; None before it.
        end_reason: Why it ends, other than by itself; None until there is a reason. See `record_end_reason`.
        counts: Whether the next process counts as a restart, and waits for the backoff. It does not if any of the
            reasons to end this one does not count.
        cause: The exception for which it is ended, once it was unpickled: that of the factory, or an error that says
            which env raised.
        has_ended: Whether it has ended, or could not be started. The facts about its end follow.
        pid: Its process id; None if there was no process.
        status: How it ended.
        stderr_tail: The last lines of its stderr; stacks of a fatal error begin with the frames of env code.
        stacks: The stacks that it wrote before it was killed for a deadline.
        corruption: How it has corrupted shared memory, for which it was killed; empty if it has not.
    """

    incarnation: int
    worker: Worker | None = None
    is_launching: bool = False
    launched_at: float = 0.0
    envs_made: int = 0
    failure: Failure | None = None
    failed_at: float = 0.0
    was_standby: bool = False
    has_started: bool = False
    close_id: int | None = None
    end_reason: EndReason | None = None
    counts: bool = True
    cause: BaseException | None = None
    has_ended: bool = False
    pid: int | None = None
    status: ExitStatus = ExitStatus()  # noqa: RUF009 # immutable
    stderr_tail: str = ""
    stacks: str = ""
    corruption: str = ""
    _stacks: Stacks | None = dataclasses.field(default=None, init=False)

    def record_end_reason(self, reason: EndReason) -> None:
        """Record why the process ends. The first reason stays; a kill replaces a renewal, and any a failed factory."""
        is_kill = reason in (EndReason.ABORT, EndReason.CLOSE)
        is_first = self.end_reason in (None, EndReason.FACTORY_RAISED)
        if is_first or (self.end_reason is EndReason.RENEW and is_kill):
            self.end_reason = reason
        self.counts &= is_counted(reason)

    def kill(self) -> None:
        """Kill the process if there is one."""
        if self.worker is not None:
            self.worker.kill()

    def request_stacks(self) -> None:
        """Have the process write its stacks, for the report of its exit."""
        if self.worker is not None:
            self._stacks = self.worker.ask_stacks()

    def reap(self, worker: Worker) -> None:
        """Reap the ended process, and record the facts about its end."""
        self.has_ended = True  # first: if a bug ends this method, no other exit comes
        self.pid, self.corruption = worker.pid, worker.corruption
        if self._stacks is not None:
            self.stacks, self._stacks = self._stacks.read(), None  # it holds a descriptor
        self.status = worker.reap()
        if self.status.is_helper_lost:
            self.record_end_reason(EndReason.HELPER_LOST)
        self.stderr_tail = order_fatal_error(worker.stderr_tail)
