"""The start of a process: a launch by the backend, or the adoption of a standby's process.

`envactors.actor.actor` decides when a process starts, and handles its replies and its exit.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections.abc import Callable
from typing import Protocol

from envactors.actor.actor_process import START_CALL_ID, ActorProcess, EndReason
from envactors.actor.config import ActorConfig
from envactors.actor.tenant import Tenant
from envactors.actor.timers import Timers
from envactors.backends.base import ExitStatus, Use, Worker, WorkerEvents
from envactors.mailbox.messages import Adopt, Frame, Kind
from envactors.mailbox.pickling import dumps

# How long a standby may take to switch to another actor, in seconds. It only records its new identity.
_ADOPTION_GRACE = 1.0


class StartingActor(WorkerEvents, Protocol):
    """An actor, as its starter uses it."""

    config: ActorConfig
    process: ActorProcess
    tenant: Tenant
    timers: Timers

    def run_as_change(self, event: Callable[..., object], *args: object) -> None:
        """Run an event as a change of the actor."""

    def end_after_stacks(self) -> None:
        """End the process, since it has passed its deadline."""

    def finish_process(self) -> None:
        """Handle the end of the process, or of its launch."""


class ProcessStarter:
    """Starts the processes of one actor.

    The actor makes an `ActorProcess`, sets its phase to STARTING, and calls `begin`. If the process has the worker of a
    standby, its envs exist: the worker is told its new identity, and replies. Otherwise it is launched:

    1. *Wait.* Code of the actor's last worker may still be running, as on a node that is unreachable. Two processes of
       one actor must not run at a time, so the launch is submitted once the backend says that it has ended
       (`on_certain_end`). The launcher then queues it while as many launches as the backend allows are unfinished.
    2. *Launch.* The start deadline begins, and the backend starts a worker, in the launcher's thread and without the
       lock.
    3. *Greet.* Under the lock again, the worker gets its first message, which has it make the envs. If it could not be
       started, the actor handles that as an exit. If the actor has meanwhile ended the process, the worker is killed.
    4. *End.* When the worker has started, or has exited, the actor calls `end_start`, which lets other launches begin.

    Until step 2, the actor may `withdraw` the launch. Except for step 2, `open`, and `close`, everything happens within
    changes of the actor.

    Args:
        actor: The actor.
    """

    def __init__(self, actor: StartingActor) -> None:
        self._actor = actor
        self._backend_use: Use | None = None
        # The last worker, if it counts as ended, and nobody has confirmed yet that none of its code is running.
        self._unconfirmed_worker: Worker | None = None

    def open(self) -> None:
        """Begin to use the backend.

        Raises:
            Exception: The backend cannot be used.
        """
        config = self._actor.config
        self._backend_use = config.backend.use(config.env_vars, self._actor.runtime)
        self._backend_use.open()

    def close(self) -> None:
        """End the use of the backend, which may take long."""
        if self._backend_use is not None:
            with contextlib.suppress(OSError):
                self._backend_use.close()

    # The start -------------------------------------------------------------------------------------------

    def begin(self, process: ActorProcess) -> None:
        """Start the actor's current process, which has the worker of a standby or none yet."""
        process.launched_at = time.monotonic()
        if process.worker is not None:
            self._adopt(process.worker)
            return
        process.is_launching = True
        if self._unconfirmed_worker is None:
            self._submit_launch()

    def _adopt(self, worker: Worker) -> None:
        """Have the worker of a standby serve this actor."""
        config = self._actor.config
        worker.report_to(self._actor)
        self._limit_start(_ADOPTION_GRACE)
        message = Adopt(config.name, config.first_index, config.env_count, self._actor.tenant.attach)
        self._greet(worker, Kind.ADOPT, message)

    def _submit_launch(self) -> None:
        self._actor.runtime.launcher.submit(self._launch, self._actor.config.backend.traits.max_starting)

    def _launch(self) -> None:
        """Launch a worker, in the launcher's thread."""
        actor, worker, refusal = self._actor, None, None
        actor.run_as_change(self._begin_launch)
        if actor.process.end_reason is None and self._backend_use is not None:  # else nobody needs the process
            try:
                worker = self._backend_use.start(actor.name, actor.config.memory, actor.config.env_count)
            except Exception as error:
                refusal = error
        actor.run_as_change(self._on_launched, worker, refusal)

    def _begin_launch(self) -> None:
        self._actor.process.launched_at = time.monotonic()
        if (limit := self._actor.config.deadlines.start) is not None:
            self._limit_start(limit)

    def _on_launched(self, worker: Worker | None, refusal: BaseException | None) -> None:
        """Greet the worker, kill it if nobody needs it any more, or handle the failure of its launch."""
        actor, process = self._actor, self._actor.process
        process.is_launching = False
        if worker is not None:
            try:
                worker.report_to(actor)
            except Exception as error:
                worker, refusal = None, error
        process.worker = worker
        if worker is None:
            if refusal is not None and process.end_reason is EndReason.TIMEOUT:
                process.end_reason = None  # it did not fail because of its deadline, even if that has passed
            process.status = ExitStatus(refusal=refusal)
            actor.finish_process()
        elif process.end_reason is None:
            # The key is for managers of `multiprocessing`, which workers on other machines cannot reach.
            is_remote = actor.config.backend.traits.is_remote
            key = None if is_remote else bytes(multiprocessing.current_process().authkey)
            self._greet(worker, Kind.START, actor.config.start._replace(attach=actor.tenant.attach, authkey=key))
        else:
            worker.kill()

    def _greet(self, worker: Worker, kind: Kind, message: tuple[object, ...]) -> None:
        """Send a worker the first message of this actor."""
        worker.send(Frame(kind, self._actor.process.incarnation, START_CALL_ID, dumps(tuple(message))))

    def _limit_start(self, seconds: float) -> None:
        """Set the timer of the start, or end the process if its time is over.

        The time begins with the launch. On another machine it begins again, once a node has room for the worker.
        """
        actor, worker = self._actor, self._actor.process.worker
        due = max(actor.process.launched_at, 0.0 if worker is None else worker.launched_at) + seconds
        if due > time.monotonic():
            actor.timers.set("start", due, functools.partial(self._limit_start, seconds))
        elif actor.process.end_reason in (None, EndReason.FACTORY_RAISED):
            actor.end_after_stacks()

    # Its end ---------------------------------------------------------------------------------------------

    def end_start(self) -> None:
        """Cancel the start deadline, and let other launches begin: the process has started, or has ended."""
        self._actor.timers.cancel("start")
        self._actor.runtime.launcher.finish(self._launch)

    def withdraw(self) -> bool:
        """Withdraw the launch; return False if it has begun, so that a worker or a failure follows."""
        # A launch that waits for a certain end was never submitted; `on_certain_end` does so only while it is wanted.
        return self._unconfirmed_worker is not None or self._actor.runtime.launcher.withdraw(self._launch)

    def record_end(self, worker: Worker, *, is_certain: bool) -> None:
        """Record that a worker counts as ended, and whether it is certain that none of its code is running."""
        self._unconfirmed_worker = None if is_certain else worker

    def on_certain_end(self, worker: Worker) -> None:
        """Launch the process that has waited for the certain end of this worker, if there is one."""
        if worker is self._unconfirmed_worker:
            self._unconfirmed_worker = None
            if self._actor.process.is_launching:
                self._submit_launch()

    # Standbys --------------------------------------------------------------------------------------------

    def take_standby(self, delay: float) -> Worker | None:
        """Take the worker of the first standby that is ready.

        Args:
            delay: How long that standby waits before it starts another process, in seconds.

        Returns:
            The worker; None if no standby is ready, or while code of this actor's last worker may still be running.
        """
        standbys = self._actor.config.standbys if self._unconfirmed_worker is None else ()
        return next(filter(None, (give_process(delay) for give_process in standbys)), None)
