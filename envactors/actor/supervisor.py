"""One actor as the parent sees it: what it was asked, what became of its processes, what follows.

Events come in from four sides: callers' threads (`ask`, `cancel`, `kill` ...), the launcher (`_launch`), whoever
reads replies (`_on_channel`) and the reactor's thread (`_on_death`, `on_timer`). Each takes the lock, changes
the state, and leaves what follows to `Outcomes`, which settle futures without the lock (`_Change`).

    LAUNCHING ──started──▶ LIVE ──CLOSE sent──▶ STOPPING ─┐
        ▲                   │ deadline, abort, kill       │
        │                   ▼                             ▼
     BACKOFF ◀──crash─── ENDING ────────death──────▶ DEAD, CLOSED or LAUNCHING
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from envactors.actor import engine as engines
from envactors.actor.failures import Failures
from envactors.actor.future import ActorFuture
from envactors.actor.incarnation import Incarnation, Obituary
from envactors.actor.interrupts import SHIELD
from envactors.actor.journal import Journals
from envactors.actor.outcomes import Outcomes
from envactors.actor.policy import Losses
from envactors.actor.requests import Request, RequestTable
from envactors.actor.states import (
    BACKOFF,
    CLOSED,
    DEAD,
    ENDING,
    LAUNCHING,
    LIVE,
    STOPPING,
    ActorState,
    ActorStats,
    Plan,
    Verdict,
)
from envactors.actor.turn import Turn
from envactors.actor.waiting import SHORT_PAUSE, Waiting
from envactors.errors import ActorClosedError, ActorError, twin
from envactors.system import LONGEST_WAIT, READABLE, look_out
from envactors.wire.board import ASLEEP, FINISHED, FRAMES_UP, LOOKING, MAILED, Board
from envactors.wire.messages import Adopt, Attach, Frame, Kind
from envactors.wire.pickling import dumps, loads
from envactors.worker.replay import PULSE

# How long a worker may take to tell its stacks before it is ended for a deadline, in seconds.
_STACKS_GRACE = 0.2
# How long a worker that has closed its env, or its channel, may take to end by itself, in seconds.
_EXIT_GRACE = 1.0
# How long a killed worker may take to be gone, in seconds.
_KILL_GRACE = 0.9
# How long a standby may take to become this actor's, in seconds; it has nothing to do but to note it.
_ADOPTION_GRACE = 1.0
_START_CALL_ID = 0
# Looked up once, see `envactors.actor.states`.
_CLOSE, _RESULT, _PROGRESS, _RESETTING = Kind.CLOSE, Kind.RESULT, Kind.PROGRESS, Kind.RESETTING


def _is_renewal(running: Request | Turn | None) -> bool:
    return isinstance(running, Request) and running.kind is None


class _Change:
    """A change of an actor's state: with its lock, with signals held back, and what follows from it delivered."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._lock = supervisor._lock

    def __enter__(self) -> None:
        SHIELD.__enter__()
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        supervisor = self._supervisor
        try:
            if kind is not None and not issubclass(kind, ActorError):
                supervisor.torn()
        finally:
            self._lock.release()
            try:
                if supervisor._outcomes:
                    supervisor._outcomes.deliver()
            finally:
                SHIELD.__exit__()
        if supervisor.plan.backend.inline:
            supervisor.work()


class Supervisor:
    """The parent's half of one actor."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.owner_pid = os.getpid()
        self._forks = engines.forks
        self.incarnation = 0
        self._start = plan.start
        self._start_payload = dumps(tuple(plan.start))
        self._failures = Failures(plan)
        self._journals: Journals | None = None
        if plan.max_journal is not None:
            self._journals = Journals(plan.start.first, len(plan.start.factories), plan.max_journal)
        self._lock = threading.RLock()
        self._change = _Change(self)
        self._table = RequestTable()
        self._phase = LAUNCHING
        self._process: Incarnation | None = None
        self._started = False
        self._adopting = False
        self._verdict: Verdict | None = None
        self._start_failure: Frame | None = None
        self._launched, self._made = 0.0, 0
        self._condemned_for: ActorError | None = None
        self._loss: ActorError | None = None
        self._launch_due = False
        self._working: set[int] = set()
        self._warned = False
        self._final: ActorError | None = None
        self._closing = False
        self._closed = threading.Event()
        self._timers: dict[str, float] = {}
        self._losses = Losses(plan.restart)
        limit = Turn.first_look(plan.deadlines)
        self._waiting = Waiting(plan.spin)
        self._answered = 0.0
        self._turn_limit = None if limit == float("inf") else limit
        self._completed = self._failed = self._restarts = self._stale = 0
        plan.backend.retain()
        self._engine = engines.join(self)
        self.reactor = self._engine.reactor
        self._outcomes = Outcomes(self.reactor.post)
        with self._change:
            self._begin_launch()

    # Looking ---------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def state(self) -> ActorState:
        with self._change:
            self._look_at_turn()
            phase, running = self._phase, self._table.running
            if phase is CLOSED or (phase is ENDING and self._verdict is Verdict.CLOSE):
                return ActorState.CLOSED
            if phase is DEAD:
                return ActorState.DEAD
            if phase is LAUNCHING and self.incarnation == 0:
                return ActorState.STARTING
            if phase in (LAUNCHING, BACKOFF) or _is_renewal(running):
                return ActorState.RENEWING
            return ActorState.IDLE if running is None else ActorState.BUSY

    def stats(self) -> ActorStats:
        with self._change:
            self._look_at_turn()
            return ActorStats(
                self._completed, self._failed, self._restarts, self._stale, len(self._table.queue), self._losses.last
            )

    @property
    def board(self) -> Board | None:
        """What it shares with its present process."""
        process = self._process
        return None if process is None else process.board

    def spin_for(self, future: ActorFuture) -> bool:
        """Looks out with open eyes for the reply to a running call, and takes it in; says whether one came."""
        running, process = self._table.running, self._process
        if process is None or process.board is None or not self._waiting.way.all_look:
            return False
        if not isinstance(running, Request) or running.future is not future:
            return False
        self.reactor.count_wait()
        words, received = process.board.words, process.received
        if not look_out(lambda: words[FRAMES_UP] > received):
            return False
        self._on_channel(READABLE)
        return True

    def attach(self, attach: Attach) -> ActorFuture:
        """Has the present process, and each one that follows it, use the shared slab."""
        self._start = self.plan.start._replace(attach=attach)
        self._start_payload = dumps(tuple(self._start))
        if self._journals is not None:
            self._journals.attach = attach
        future = ActorFuture(self, None)
        # As often as it takes: what limits that is the restart policy.
        self.ask(Kind.ATTACH, attach, future, "attach", retries=sys.maxsize)
        return future

    # Asking ----------------------------------------------------------------------------------------------

    def ask(
        self,
        kind: Kind,
        message: tuple[Any, ...],
        future: ActorFuture,
        method: str,
        env: int = 0,
        timeout: float | None = None,
        retries: int = 0,
        bound: int | None = None,
        first: bool = False,
    ) -> None:
        """Queues a call.

        Args:
            kind: The kind of the message.
            message: One of `envactors.wire.messages`.
            future: Gets the outcome.
            method: What the call is, for deadlines and errors.
            env: The position of the env within the actor.
            timeout: A deadline in seconds in place of the actor's own.
            retries: How many deaths and deadlines the call survives.
            bound: The only incarnation that may run it; if that is lost, the call is too, unless a new process can be
                brought to the same point.
            first: Whether it comes before all that waits.

        Raises:
            ActorClosedError: The actor was closed, or belongs to another process.
        """
        self.check_owner()
        index = self.plan.start.first + env
        if timeout is None:
            timeout = self.plan.deadlines.of(method)
        if timeout is not None and not self.plan.backend.kills:
            self._warn_of_deadlines()
        with SHIELD:
            try:
                payload = dumps(tuple(message))
            except Exception as error:
                future.settle(
                    None, self._failures.unpicklable((index, method), self.incarnation, error), self.incarnation
                )
                return
            request = Request(kind, payload, method, index, timeout, retries, future, bound)
            if not self.plan.backend.inline:
                self._submit(request, first)
                return
        self._submit(request, first)  # in line env code runs in here, and Ctrl-C shall reach it

    def renew(self, future: ActorFuture) -> None:
        """Queues the replacement of the process; the future gets the new incarnation."""
        self.check_owner()
        self._submit(Request(None, dumps(()), "renew", self.plan.start.first, None, 0, future))

    def _submit(self, request: Request, first: bool = False) -> None:
        with self._change:
            if self._closing:
                raise self._failures.closed(request, self.incarnation)
            self._look_at_turn()
            if first:
                self._table.add_first(request)
            else:
                self._table.add(request)
            if request.bound is not None and (request.bound < self.incarnation or self._is_between()):
                self._fail_bound(request.bound)
            if self._phase is DEAD:
                self._settle_dead()
            else:
                self._dispatch()

    def _is_between(self) -> bool:
        """Whether one process is gone and the next one, if any, has not begun."""
        return self._phase in (BACKOFF, DEAD)

    def may_retry(self, index: int, seeded: bool, error: BaseException) -> bool:
        """Whether what an env was asked is worth another try, in a new process that is brought to the same point.

        Where it is not, the env is not brought back at all.

        Args:
            index: The env's index.
            seeded: Whether that is a seeded reset.
            error: What it has raised.
        """
        with self._lock:
            if self._journals is None:
                return False
            journal = self._journals.of(index)
            worth = journal.may_retry(seeded, error)
            if not worth:
                journal.drop()
            return worth

    def condemn(self, incarnation: int | None, index: int, method: str, error: BaseException) -> None:
        """Ends a process that an env of it is not fit to be used in any more; counts as a loss.

        Args:
            incarnation: Which one; another one is left alone.
            index: The env's index.
            method: What it was asked.
            error: What it has raised.
        """
        with self._change:
            if incarnation == self.incarnation and self._phase is LIVE:
                self._condemned_for = self._failures.condemned((index, method), self.incarnation, self.pid, error)
                self._end(Verdict.CONDEMNED)

    def cancel(self, future: ActorFuture) -> bool:
        self.check_owner()
        with self._change:
            if self._table.withdraw(future) is not None:
                future.discard()
                self.reactor.wake(future)
        return future.cancelled()

    def abort(self, future: ActorFuture) -> bool:
        if self.cancel(future):
            return True
        with self._change:
            if future.settled():
                return False
            running = self._table.running
            if isinstance(running, Request) and running.future is future:
                self._check_kills("abort a running call")
                running.retries = 0
                self._replace()
            elif (waiting := self._table.withdraw(future, retry=True)) is not None:
                self._fail(waiting, self._failures.death(Obituary(), self.incarnation, waiting, aborted=True))
            else:
                return False
        return True

    def kill(self, restart: bool) -> None:
        """Ends the process now; see `envactors.actor.handle.ActorHandle.kill`."""
        self.check_owner()
        with self._change:
            if self._phase is CLOSED:
                return
            self._look_at_turn()
            if self._table.running is not None:
                self._check_kills("kill it in the middle of a call")
            if not restart:
                self._closing = True
                self._end(Verdict.CLOSE)
            elif not self._closing:
                self._replace()

    def begin_close(self, timeout: float | None) -> None:
        """Lets what is queued run and the env close, for ``timeout`` seconds; then ends the process."""
        with self._change:
            if self._phase is CLOSED:
                return
            patience = self._close_patience(timeout)
            if patience is not None:
                when = time.monotonic() + patience
                self._set_timer("close", min(when, self._timers.get("close", when)))
            if not self._closing:
                self._closing = True
                self._look_at_turn()
                idle = self._table.running is None and not self._table.queue
                if self._phase in (DEAD, BACKOFF) or (idle and self._engine.launcher.waits(self)):
                    self._end(Verdict.CLOSE)
                else:
                    first = self.plan.start.first
                    self._table.add(Request(Kind.CLOSE, dumps(()), "close", first, None, 0, ActorFuture(self, None)))
                    self._dispatch()

    def wait_closed(self, timeout: float | None) -> None:
        """Waits until the process has ended; not in the reactor's thread, which is what ends it."""
        if self.reactor.is_current_thread():
            return
        patience = self._close_patience(timeout)
        self._closed.wait(None if patience is None else min(patience + _KILL_GRACE, LONGEST_WAIT))
        self._engine.linger()

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and its process gone."""
        return self._closed.is_set()

    def check_owner(self) -> None:
        """Refuses to go on in a process that inherited the actor by a fork.

        Raises:
            ActorClosedError: This is not the process that made the actor.
        """
        if engines.forks != self._forks:
            raise ActorClosedError(
                f"actor {self.plan.name!r} belongs to process {self.owner_pid} and this is process {os.getpid()}, a "
                "fork of it: make an actor here, or send the call to where the actor is",
                actor=self.plan.name,
            )

    def _close_patience(self, timeout: float | None) -> float | None:
        return self.plan.deadlines.close if timeout is None else timeout

    def abandon(self) -> None:
        """Closes without waiting; for finalizers: takes no lock."""
        if engines.forks == self._forks and not self._engine.ended:
            self.reactor.post(lambda: self.begin_close(None))

    # Deadlines -------------------------------------------------------------------------------------------

    def next_timer(self) -> float:
        return min(self._timers.copy().values(), default=float("inf"))

    def on_timer(self, now: float) -> None:
        with self._change:
            # A caller that was stopped itself finds both at once: replies that came in time, and deadlines.
            self._receive(READABLE)
            self._look_at_turn()
            for name in [name for name, when in self._timers.items() if when <= now]:
                self._timers.pop(name, None)
                if name == "backoff":
                    self._restarts += 1
                    self._relaunch()
                elif name == "close":
                    self._end(Verdict.CLOSE)
                elif name == "kill" and self._process is not None:
                    self._process.kill()
                elif name == "call" and self._phase in (LAUNCHING, LIVE):
                    running = self._table.running
                    if isinstance(running, Turn) and (later := running.later(self.plan.deadlines, now)) is not None:
                        self._set_timer("call", later)
                        continue
                    self._phase, self._verdict = ENDING, Verdict.TIMEOUT
                    if self._process is not None:
                        self._process.ask_stacks()
                        self._set_timer("kill", now + _STACKS_GRACE)

    def _set_timer(self, name: str, when: float) -> None:
        self._timers[name] = when
        self.reactor.note_timer(when)

    # Starting --------------------------------------------------------------------------------------------

    def _begin_launch(self, spare: Incarnation | None = None) -> None:
        self._phase, self._started, self._adopting = LAUNCHING, False, spare is not None
        self._launched, self._made = time.monotonic(), 0
        if spare is not None:
            self._adopt(spare)
        elif self.plan.backend.inline:
            self._launch_due = True
        else:
            self._engine.launcher.submit(self, self._launch, self.plan.backend.max_starting)

    def _take_standby(self, delay: float) -> Incarnation | None:
        """Takes a process that is ready; its own successor starts ``delay`` seconds later."""
        return None if self.plan.take_standby is None else self.plan.take_standby(delay)

    def _adopt(self, spare: Incarnation) -> None:
        """Makes a standby's process this actor's."""
        self._process = spare
        spare.move(self.plan.name, self._on_channel, self._on_death)
        limit = self.plan.deadlines.start
        self._set_timer("call", time.monotonic() + min(_ADOPTION_GRACE, _ADOPTION_GRACE if limit is None else limit))
        start = self._start
        message = Adopt(start.name, start.first, len(start.factories), start.attach)
        spare.send(Frame(Kind.ADOPT, self.incarnation, _START_CALL_ID, dumps(tuple(message))))

    def work(self) -> None:
        """Runs, in this thread and without the lock, what an in-line backend was asked for."""
        me = threading.get_ident()
        if me in self._working:
            return  # the loop below is this thread's own, further out
        # Threads come and go in any order: each takes out what it has put in, and nothing else.
        self._working.add(me)
        try:
            with self._lock:
                due, self._launch_due = self._launch_due, False
            if due:
                self._launch()
            while (process := self._process) is not None and process.work():
                self._on_channel(READABLE)
        finally:
            self._working.discard(me)

    def _relaunch(self, spare: Incarnation | None = None) -> None:
        self._timers.pop("backoff", None)
        self.incarnation += 1
        self._begin_launch(spare or self._take_standby(0.0))

    def _launch(self) -> None:
        """Runs in the launcher's thread, once for each `_begin_launch`."""
        worker, refusal = None, None
        slab = None if self.plan.shared is None else self.plan.shared.fileno()
        with self._lock:
            due = self._phase is LAUNCHING
            self._launched = time.monotonic()  # not when it was queued behind others
            if due and self.plan.deadlines.start is not None and self.plan.backend.kills:
                self._set_timer("call", self._launched + self.plan.deadlines.start)
        if due:
            try:
                worker = self.plan.backend.launch(self.plan.name, self.plan.env_vars, slab)
            except Exception as error:
                refusal = error
        with self._change:
            if worker is None:
                self._lose(Obituary(refusal=refusal))
            else:
                self._process = Incarnation(worker, self.plan.name, self.reactor, self._on_channel, self._on_death)
                if self._phase is LAUNCHING:
                    self._process.send(Frame(Kind.START, self.incarnation, _START_CALL_ID, self._start_payload))
                else:
                    self._process.kill()

    def _on_started(self, frame: Frame) -> None:
        if frame.kind == Kind.MADE:
            self._made = loads(frame.payload)
            return
        if frame.kind == Kind.FAILED:
            self._start_failure = frame
            self._phase = ENDING
            if self._process is not None:
                self._process.kill()
            return
        self._timers.pop("call", None)
        self._phase, self._started = LIVE, True
        self._engine.launcher.finish(self)
        renewal = self._table.interrupt()
        if isinstance(renewal, Request):
            self._answer(renewal, Frame(Kind.RESULT, 0, 0, dumps(self.incarnation)))
        if self._journals is not None:
            if renewal is not None:
                self._journals.forget()  # a fresh one was asked for
            for request in reversed(self._journals.replays(self.plan.deadlines, ActorFuture(self, None))):
                self._table.add_first(request)
        self._dispatch()

    # Calling ---------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Starts the next call where the process is free for one."""
        if self._phase is not LIVE and self._phase is not DEAD:
            return
        request = self._table.start()
        if request is None:
            turn = self._table.running
            if isinstance(turn, Turn) and self._table.queue and self._process is not None:
                # Who waits for the turn need not be looking at it, nor have come to ring, and others wait for its end.
                self._process.hear(self._on_bell)
                turn.ring()
                self._look_at_turn()
            return
        request.future.begin()
        request.started = time.monotonic()
        if self._phase is DEAD:
            self._relaunch()
            return
        kind = request.kind
        if kind is None or kind == _CLOSE:
            self._phase = STOPPING
            self._verdict = Verdict.RENEW if kind is None else Verdict.CLOSE
            if kind is None and self.plan.deadlines.close is not None:
                self._set_timer("kill", request.started + self.plan.deadlines.close)
            kind = Kind.CLOSE
        elif request.timeout is not None and self.plan.backend.kills:
            self._set_timer("call", request.started + request.timeout)
        assert self._process is not None, "a live actor has a process"
        lively = self._waiting.way.workers_look and request.started - self._answered < SHORT_PAUSE
        self._process.send(
            Frame(kind, self.incarnation, request.call_id, request.payload), LOOKING if lively else ASLEEP
        )

    def _on_channel(self, mask: int) -> None:
        with self._change:
            self._receive(mask)

    def _receive(self, mask: int) -> bool:
        """Takes in what has come; False when nothing had."""
        if self._process is None or self._process.silent:
            return False
        frames = self._process.advance(mask)
        for frame in frames or ():
            self._on_frame(frame)
        if self._process.silent and self._phase is not STOPPING:
            # Only the sentinel tells of a death; but a worker that cannot be asked is of no use any more.
            self._set_timer("kill", time.monotonic() + _EXIT_GRACE)
        return frames is not None

    def _on_frame(self, frame: Frame) -> None:
        running = self._table.running
        if frame.incarnation != self.incarnation:
            self._stale += 1
        elif frame.call_id == _START_CALL_ID and self._phase is LAUNCHING:
            self._on_started(frame)
        elif running is None or frame.call_id != running.call_id or self._phase is ENDING:
            self._stale += 1
        elif isinstance(running, Turn):
            running.take(frame)
            self.reactor.wake(running.waiter)
        elif frame.kind == _PROGRESS:
            self._timers.pop("call", None)
            running.timeout = self.plan.deadlines.of(bytes(frame.payload).decode())
            if running.timeout is not None and self.plan.backend.kills:
                # What comes next has begun by then, or this is told once more.
                self._set_timer("call", time.monotonic() + running.timeout + PULSE)
        elif frame.kind == _RESETTING:
            self._timers.pop("call", None)
            deadline = self.plan.deadlines.of("reset")
            if deadline is not None and self.plan.backend.kills:
                running.timeout = deadline
                self._set_timer("call", time.monotonic() + deadline)
        elif self._phase is STOPPING:
            # The env is closed. What may still keep its process, such as a thread that never ends, gets a moment.
            when = time.monotonic() + _EXIT_GRACE
            self._set_timer("kill", min(when, self._timers.get("kill", when)))
        elif self._phase is LIVE:
            self._table.running = None
            self._timers.pop("call", None)
            self._completed += 1
            if self._journals is not None:
                self._take_down(self._journals, running, frame)
            self._answered = now = time.monotonic()
            self._waiting.note(now - running.started, now)
            self._answer(running, frame)
            if self._table.queue:
                self._dispatch()

    def _take_down(self, journals: Journals, request: Request, frame: Frame) -> None:
        """Takes in what an answer means for the env's journal."""
        if request.kind != Kind.REPLAY:
            journals.record(request, frame)
        elif not journals.replayed(request, frame):
            self._fail_bound(self.incarnation - 1)

    # Turns -----------------------------------------------------------------------------------------------

    def take_turn(self, turn: Turn, now: float, wait: int) -> bool:
        """Starts a turn of the actor's envs, whose actions stand in shared memory; called under `SHIELD`.

        Args:
            turn: The turn.
            now: The time (`time.monotonic`).
            wait: How the worker is to wait for the next one, as `envactors.wire.board` says.

        Returns:
            False where the actor is not free for it now, or has another process: then each env is to be asked alone.
        """
        with self._lock:
            table = self._table
            if table.running is not None:
                self._look_at_turn(tell=False)
            process = self._process
            if (
                process is None
                or process.board is not turn.board
                or self._phase is not LIVE
                or self._closing
                or not table.take(turn, now)
            ):
                return False
            if self._turn_limit is not None:
                self._set_timer("call", now + self._turn_limit)
            turn.order(wait)
        return True

    def end_turn(self, turn: Turn) -> bool:
        """Takes a finished turn off; False as long as it is under way. Called under `SHIELD`."""
        if not turn.over and turn.finished:
            with self._lock:
                if self._table.running is turn:
                    self._look_at_turn(tell=False)
        return turn.over

    def keep(self, turn: Turn, env: int, take: Callable[[], None]) -> None:
        """Takes the result of an env of a turn, unless the env is lost; from then on it cannot be."""
        with self._lock:
            if env not in turn.lost and turn.complete(env):
                turn.given.add(env)
                take()

    def owe(self, turn: Turn, mark: Callable[[Turn, int], None]) -> None:
        """Marks the envs of a turn that are not lost; none is lost meanwhile."""
        with self._lock:
            for env in turn.envs:
                if env not in turn.lost:
                    mark(turn, env)

    def take_mail(self, turn: Turn) -> None:
        """Takes in what has come besides the results so far; called under `SHIELD`."""
        with self._lock:
            if self._table.running is turn and self._phase is LIVE:
                self._fetch_mail(turn)

    def read_mail(self, turn: Turn, index: int) -> tuple[Any, BaseException | None]:
        """Reads what came besides an env's result: `Mail`'s fields, or what the env failed with."""
        frame = turn.read(index)
        if frame.kind == _RESULT:
            try:  # a context takes as long as the reading
                return loads(frame.payload), None
            except BaseException:  # noqa: S110 # below it is told what was wrong
                pass
        request = Request(Kind.STEP, b"", turn.method(index), index, None, 0, ActorFuture(self, None))
        request.call_id = turn.call_id
        return self._failures.outcome(request, frame, self.pid)

    def _look_at_turn(self, tell: bool = True) -> None:
        """Takes the running turn off if the worker has finished it.

        Args:
            tell: Whether who waits for it is told, since the worker may be lost or stopped before it rings; not where
                it is they who look.
        """
        table, process = self._table, self._process
        turn = table.running
        if not isinstance(turn, Turn) or self._phase is not LIVE or process is None:
            return
        words = turn.board.words
        if words[FINISHED] != turn.call_id or (words[MAILED] and not self._fetch_mail(turn)):
            return
        table.running = None
        if self._turn_limit is not None:
            self._timers.pop("call", None)
        self._completed += len(turn.envs)
        turn.over = True
        if self._journals is not None:
            self._journals.record_turn(turn)
        process.hear(None)
        if tell:
            self.reactor.wake(turn.waiter)
        if table.queue:
            self._dispatch()

    def _fetch_mail(self, turn: Turn) -> bool:
        """Takes in what came besides the results that are there; all of it was sent before them."""
        while turn.awaits_mail():
            if not self._receive(READABLE):
                self.torn()  # the worker's numbers are wrong: what else is?
                return False
        return True

    def _on_bell(self, _mask: int) -> None:
        with self._change:
            if self._process is not None:
                self._process.clear_bell()
            turn = self._table.running
            self._look_at_turn()
            if isinstance(turn, Turn):
                self.reactor.wake(turn.waiter)  # the ring was meant for them too

    def _interrupt(self) -> Request | None:
        """Takes out what runs; of a turn that is lost the first part, the others wait as if they had not begun."""
        running = self._table.interrupt()
        if not isinstance(running, Turn):
            return running
        parts = running.split(self.plan.deadlines)
        if self._journals is not None:
            self._journals.record_turn(running)
        first = parts.pop(0) if parts and parts[0].started else None
        for request in reversed(parts):
            self._table.put_back(request)
        self._completed += len(running.envs) - len(running.lost)
        self.reactor.wake(running.waiter)
        return first

    # Ending ----------------------------------------------------------------------------------------------

    def _end(self, verdict: Verdict) -> None:
        """Ends the process, or what is about to become one, for a reason of the parent's own."""
        coming = self._phase in (LAUNCHING, ENDING) and self._process is None
        if coming and self._engine.launcher.withdraw(self):
            coming = False
        self._phase, self._verdict = ENDING, verdict
        if self._process is None:
            if not coming:
                self._lose(Obituary())
            return
        self._process.kill()
        if not self.plan.backend.kills and self._table.running is not None:
            # It runs on until its call ends, and nobody waits for it.
            process, self._process = self._process, None
            self._lose(process.bury()[1])

    def _check_kills(self, what: str) -> None:
        if not self.plan.backend.kills:
            raise self._failures.cannot(what, self.incarnation)

    def _warn_of_deadlines(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"actor {self.plan.name!r} lives in {self.plan.backend!r}, where deadlines are not enforced",
                stacklevel=5,
            )

    def _replace(self) -> None:
        """Ends the process and has another; not counted."""
        if self._phase is DEAD:
            self._relaunch()
        elif self._phase is not CLOSED and self._verdict is not Verdict.CLOSE:
            self._end(Verdict.ABORT)

    def torn(self) -> None:
        """After an error in the middle of a change: what the process was told is unknown, so it goes."""
        if self._process is not None:
            self._process.kill()

    def _on_death(self, process: Incarnation) -> None:
        with self._change:
            if self._process is not process:
                return
            frames, obituary = process.bury()
            for frame in frames:
                self._on_frame(frame)
            self._process = None
            self._lose(obituary)

    def _lose(self, obituary: Obituary) -> None:
        """Decides what follows from the end of a process."""
        verdict, self._verdict = self._verdict, None
        self._engine.launcher.finish(self)
        for name in ("call", "kill", "backoff"):
            self._timers.pop(name, None)
        running = self._interrupt()
        lost = self.incarnation
        if self._journals is not None:  # the next process is asked anew
            self._table.withdraw_all(lambda request: request.kind == Kind.REPLAY)
        if self._started:
            deliberate = verdict not in (None, Verdict.TIMEOUT)
            self._loss = self._condemned_for or self._failures.death(
                obituary, lost, running, aborted=deliberate, timed_out=verdict is Verdict.TIMEOUT
            )
        if self._closing:
            self._finish(running, obituary, verdict)
        elif verdict is Verdict.RENEW or verdict is Verdict.ABORT:
            if running is not None and verdict is Verdict.RENEW:
                self._table.running = running
            elif running is not None:
                if self._journals is not None:
                    self._journals.of(running.index).drop()
                self._fail(running, self._failures.death(obituary, lost, running, aborted=True))
            self._relaunch()
        elif self._adopting and not self._started:
            # A standby that was lost on its way has never been this actor's: as if there had been none.
            self._table.running, self._start_failure = running, None
            self._begin_launch()
        else:
            self._lose_counted(obituary, verdict, running)
        self._fail_bound(lost)

    def _loss_error(self, request: Request) -> ActorError:
        loss = self._loss
        if loss is None:
            return self._failures.death(Obituary(), self.incarnation, request, aborted=True)
        if (loss.call_id, loss.index) == (request.call_id, request.index):
            return twin(loss)  # see `_lose_counted`
        return self._failures.loss(request, loss)

    def _fail_bound(self, incarnation: int) -> None:
        """Fails what waits and was meant for a process that is lost, as far as no other can take its place."""

        def lost(request: Request) -> bool:
            if request.bound is None or request.bound > incarnation:
                return False
            return self._journals is None or not self._journals.holds(request)

        for request in self._table.withdraw_all(lost):
            self._fail(request, self._loss_error(request))

    def _lose_counted(self, obituary: Obituary, verdict: Verdict | None, running: Request | None) -> None:
        timed_out = verdict is Verdict.TIMEOUT
        condemned, self._condemned_for = self._condemned_for, None
        if condemned is not None:
            error = condemned
        elif self._started:
            error = self._failures.death(obituary, self.incarnation, running, timed_out=timed_out)
        else:
            begun, failure = (self._made, self._launched), self._start_failure
            self._start_failure = None
            if failure is not None:
                error = self._failures.factory(failure, obituary, begun)
            else:
                error = self._failures.start(obituary, self.incarnation, begun, timed_out=timed_out)
        if running is not None:
            if running.kind is None:
                self._table.running = running  # a renewal waits for the next process
            elif self._journals is not None and running.kind in (Kind.REPLAY, Kind.STEP, Kind.RESET):
                blamed = condemned is None and (timed_out or not obituary.unread)
                self._try_again(self._journals, running, error, blamed)
            elif condemned is not None:
                self._fail(running, self._loss_error(running))
            elif self._started and obituary.unread and not timed_out:
                self._table.put_back(running)
            elif running.retries > 0:
                running.retries -= 1
                self._table.put_back(running)
            else:
                self._fail(running, error)
        now = time.monotonic()
        delay = self._losses.add(error, now)
        if delay is not None:
            spare = self._take_standby(delay) if self._started else None
            if spare is not None:
                # The wait goes over to the standby: however often an actor is lost, processes start no faster.
                self._restarts += 1
                self._relaunch(spare)
                return
            self._phase = BACKOFF
            self._set_timer("backoff", now + delay)
            return
        self._final = self._failures.exhausted(self._losses.errors, self.incarnation)
        self._phase = DEAD
        renewal = self._interrupt()
        if renewal is not None:
            self._fail(renewal, twin(self._final))
        self._settle_dead()

    def _try_again(self, journals: Journals, running: Request, error: ActorError, blamed: bool) -> None:
        """Has a reset or a step that was lost run again where its env can be brought back, but not a third time."""
        journal = journals.of(running.index)
        if running.kind == Kind.REPLAY:
            if blamed:
                journal.lose_replay()
        elif not blamed or journal.may_retry(journals.is_seeded(running)):
            self._table.put_back(running)  # and fails with what else is bound to the lost process, if it has to
        else:
            if journal.whole:
                error = self._failures.poison(error, journal.inputs(journals.attach, running))
            journal.drop()
            self._fail(running, error)

    def _settle_dead(self) -> None:
        """Fails what waits for a dead actor, up to a renewal, which revives it."""
        assert self._final is not None, "a dead actor has a reason"
        for request in self._table.drain():
            if self._phase is DEAD and request.kind is not None:
                self._fail(request, self._failures.after_all(self._final, request))
            else:
                self._table.restore(request)
                self._dispatch()

    def _finish(self, running: Request | None, obituary: Obituary, verdict: Verdict | None) -> None:
        """The end of a closed actor: whatever is left fails, everything is freed."""
        aborted = verdict is not None
        left = [request for request in (running, *self._table.drain()) if request is not None]
        for request in left:
            if request.kind == Kind.CLOSE:
                self._answer(request, Frame(Kind.RESULT, 0, 0, dumps(None)))
            else:
                self._fail(request, self._failures.death(obituary, self.incarnation, request, aborted=aborted))
        self._timers.clear()
        self._phase = CLOSED
        self._outcomes.add(self._release)

    # Outcomes --------------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: ActorError) -> None:
        self._failed += 1
        self._outcomes.add(functools.partial(self._settle, request, None, error))

    def _answer(self, request: Request, frame: Frame) -> None:
        self._outcomes.add(functools.partial(self._settle, request, frame))

    def _settle(self, request: Request, frame: Frame | None, error: ActorError | None = None) -> None:
        """Gives a call's future its outcome: a reply, or an error of the parent's own."""
        if frame is None:
            request.future.settle(None, error, self.incarnation)
        else:
            request.future.settle(*self._failures.outcome(request, frame, self.pid), frame.incarnation)
        self.reactor.wake(request.future)

    def _release(self) -> None:
        """Says that nothing of a closed actor is left."""
        self.plan.backend.release()
        self._closed.set()
        self._engine.release(self)
