"""Starting the processes of one actor: by its backend, or by taking a standby's."""

from __future__ import annotations

import time
from collections.abc import Callable

from envactors.actor.core import ActorCore
from envactors.actor.future import ActorFuture
from envactors.actor.launcher import Launcher
from envactors.actor.process import ActorProcess, ExitReport
from envactors.actor.requests import CallRequest
from envactors.actor.states import BACKOFF, ENDING, LAUNCHING, LIVE
from envactors.system import READABLE
from envactors.wire.control_page import ASLEEP
from envactors.wire.messages import Adopt, Frame, Kind
from envactors.wire.pickling import dumps, loads

# The call id of the first message of a process; requests begin with 1.
START_CALL_ID = 0
# How long a standby may take to become this actor's, in seconds; all it does is take note.
_ADOPTION_GRACE = 1.0


class Launching:
    """Starts the processes of one actor.

    Args:
        core: The actor's state.
        launcher: Starts workers in a thread that outlives them.
        make_future: Makes a future for what the actor asks of itself.

    Attributes:
        start: The first message of each worker; with the shared memory, once there is some.
        adopting: Whether the present process is a standby that is becoming this actor's.
        launched: When the present start began (`time.monotonic`).
        envs_made: How many envs it has made.
        failure: The reply of a worker whose factory raised.
        on_channel: Called when a channel has something; set by `Lifecycle`, like the next ones.
        on_exit: Called when a process has ended.
        on_refused: Called when no process came to be.
        dispatch: Sends what waits.
        answer: Ends a renewal with a value.
    """

    on_channel: Callable[[int], None]
    on_exit: Callable[[ActorProcess], None]
    on_refused: Callable[[ExitReport], None]
    dispatch: Callable[[], None]
    answer: Callable[[CallRequest, object], None]

    def __init__(self, core: ActorCore, launcher: Launcher, make_future: Callable[[], ActorFuture]) -> None:
        self.start = core.config.start
        self.adopting = False
        self.launched, self.envs_made = 0.0, 0
        self.failure: Frame | None = None
        self._core = core
        self._launcher = launcher
        self._make_future = make_future
        # Whether an in-line worker is to be started by the thread that leaves the lock.
        self._launch_due = False

    def begin_launch(self, spare: ActorProcess | None = None) -> None:
        """Start a process for the present incarnation, or make a standby's the actor's own."""
        core = self._core
        core.phase, core.started, self.adopting = LAUNCHING, False, spare is not None
        self.launched, self.envs_made = time.monotonic(), 0
        if spare is not None:
            self._adopt(spare)
        elif core.config.backend.inline:
            self._launch_due = True
        else:
            self._launcher.submit(self, self.launch, core.config.backend.max_starting)

    def waits_to_launch(self) -> bool:
        """Return whether its turn to start has not come yet."""
        return self._launcher.waits(self)

    def _adopt(self, spare: ActorProcess) -> None:
        core = self._core
        core.process = spare
        spare.move(core.config.name, self.on_channel, self.on_exit)
        limit = core.config.deadlines.start
        grace = _ADOPTION_GRACE if limit is None else min(_ADOPTION_GRACE, limit)
        core.timers.set("call", time.monotonic() + grace)
        message = Adopt(self.start.name, self.start.first, len(self.start.factories), self.start.attach)
        spare.send(Frame(Kind.ADOPT, core.incarnation, START_CALL_ID, dumps(tuple(message))), ASLEEP)

    def give_process(self, delay: float) -> ActorProcess | None:
        """Return a standby's process if it is ready; another one starts after ``delay`` seconds.

        Called under the taker's lock. From here on nothing that comes from the process changes anything here; its new
        owner gets all of it.
        """
        core = self._core
        with core.lock:
            process = core.process
            if core.phase is not LIVE or process is None or process.at_end:
                return None
            core.process = None
            core.phase = BACKOFF
            core.timers.set("backoff", time.monotonic() + delay)
            return process

    def launch(self) -> None:
        """Start a worker; runs in the launcher's thread (in line: in the caller's), once per `begin_launch`."""
        core, config = self._core, self._core.config
        worker, refusal = None, None
        with core.lock:
            due = core.phase is LAUNCHING
            self.launched = time.monotonic()  # not when it was queued behind others
            if due and config.deadlines.start is not None and config.backend.kills:
                core.timers.set("call", self.launched + config.deadlines.start)
        if due:
            try:
                worker = config.backend.launch(config.name, config.env_vars, config.memory)
            except Exception as error:
                refusal = error
        with core.change:
            if worker is None:
                self.on_refused(ExitReport(refusal=refusal))
                return
            core.process = ActorProcess(worker, config.name, core.reactor, self.on_channel, self.on_exit)
            if core.phase is LAUNCHING:
                payload = dumps(tuple(self.start))
                core.process.send(Frame(Kind.START, core.incarnation, START_CALL_ID, payload), ASLEEP)
            else:
                core.process.kill()

    def on_start_reply(self, frame: Frame) -> None:
        core = self._core
        if frame.kind == Kind.ENV_MADE:
            self.envs_made = loads(frame.payload)
            return
        if frame.kind == Kind.FAILED:
            self.failure = frame
            core.phase = ENDING
            if core.process is not None:
                core.process.kill()
            return
        core.timers.cancel("call")
        core.phase, core.started = LIVE, True
        self._launcher.finish(self)
        renewals = [entry for entry in core.table.interrupt() if isinstance(entry, CallRequest)]
        for renewal in renewals:
            self.answer(renewal, core.incarnation)
        if renewals:
            core.recovery.forget_all()  # a fresh process was asked for
        for request in reversed(core.recovery.replay_requests(core.config.deadlines, self._make_future())):
            core.table.add(request, at_front=True)
        self.dispatch()

    def relaunch(self, spare: ActorProcess | None = None) -> None:
        """Start the next incarnation."""
        self._core.timers.cancel("backoff")
        self._core.incarnation += 1
        self.begin_launch(spare or self.take_standby(0.0))

    def launch_inline(self) -> None:
        """Start an in-line worker if one is due; without the lock, since its factory runs in here."""
        with self._core.lock:
            due, self._launch_due = self._launch_due, False
        if due:
            self.launch()

    def run_inline(self) -> None:
        """Run what in-line workers were asked; without the lock."""
        if self._launch_due:
            self.launch_inline()
        while (process := self._core.process) is not None and process.work():
            self.on_channel(READABLE)

    def finish(self) -> None:
        """Note that the present start has ended, one way or the other."""
        self._launcher.finish(self)

    def withdraw(self) -> bool:
        """Withdraw a start whose turn has not come yet; return False if it has, or none waits."""
        return self._launcher.withdraw(self)

    def take_standby(self, delay: float) -> ActorProcess | None:
        """Return a standby's process, if there is one; the standby starts another after ``delay`` seconds."""
        take = self._core.config.take_standby
        return None if take is None else take(delay)
