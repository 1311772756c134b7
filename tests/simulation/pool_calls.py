"""Scenarios in which threads use an actor pool: real actors on workers that answer at once or when they are told to."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from typing import Any

import pytest

import envactors as ea
from envactors.actor import engine
from envactors.actor.pool import ActorPool, PoolFuture
from envactors.backends.base import Backend, ExitStatus, Stacks, Worker
from envactors.mailbox.control_page import ControlPage, page_size
from envactors.mailbox.messages import Frame, Kind
from envactors.mailbox.pickling import dumps, loads
from simulation.descriptors import ControlledDoorbell, Inbox
from simulation.schedule import Run
from simulation.tasks import Interruption
from simulation.waits import Check, check_errors, contained


class _Channel(Inbox):
    """The parent's end of a channel whose worker answers at once, or when it is told to."""

    backlog = False

    def __init__(self, run: Run, holds: bool) -> None:
        super().__init__(run)
        # The calls that were sent and not answered yet, if they are not answered at once.
        self.held: list[Frame] | None = [] if holds else None

    def send(self, frame: Frame) -> None:
        if frame.kind == Kind.CALL and self.held is not None:
            self.held.append(frame)
        else:
            self.answer(frame)

    def answer(self, frame: Frame) -> None:
        result = loads(frame.payload)[2] if frame.kind == Kind.CALL else None
        self.put(Frame(Kind.RESULT, frame.incarnation, frame.call_id, dumps(result)))

    def flush(self) -> None:
        """Do nothing: everything is sent at once."""

    def receive(self) -> list[Frame]:
        frames = self.take()
        if not frames:
            raise BlockingIOError
        return frames


class _Worker(Worker):
    """A worker that returns the arguments of each call."""

    pid = 1

    def __init__(self, run: Run, envs: int, holds: bool) -> None:
        self.outputs = []
        self._end = Inbox(run)
        self.sentinel = self._end.fileno()
        self.channel = _Channel(run, holds)
        bells: Any = ControlledDoorbell(run), ControlledDoorbell(run)
        self.page = ControlPage(bytearray(page_size(envs)), *bells)

    def kill(self) -> None:
        self._end.close()

    def begin_timing(self, spans: bool) -> None:
        raise NotImplementedError

    def ask_stacks(self) -> Stacks:
        raise NotImplementedError

    def resident_memory(self) -> int:
        return 0

    def reap(self) -> ExitStatus:
        return ExitStatus(0, None)


class _Backend(Backend):
    """Makes such workers."""

    kills = pickles = True
    spin = inline = False
    max_starting = None

    def __init__(self, run: Run, holds: bool) -> None:
        self._run = run
        self._holds = holds
        self.workers: list[_Worker] = []

    def make_memory(self) -> None:
        return None

    def launch(self, name: str, env_vars: Any, memory: Any, envs: int = 1) -> _Worker:
        del name, env_vars, memory
        worker = _Worker(self._run, envs, self._holds)
        self.workers.append(worker)
        return worker

    def retain(self, env_vars: Any, loop: Any) -> None:
        """Do nothing."""

    def release(self, env_vars: Any) -> None:
        """Do nothing."""


class _PoolUser:
    """A pool, and what its threads do with it.

    Args:
        run: The schedule.
        actors: How many actors it has.
        holds: Whether calls are answered only by `answer`.
    """

    def __init__(self, run: Run, actors: int, *, holds: bool = False) -> None:
        contained.records.clear()
        engine._engine = None
        engine._lock = vars(engine)["threading"].RLock()
        self._run = run
        self.backend = _Backend(run, holds)
        # No time passes here, and there are no sockets: a timer or a monitor would keep the reactor's thread busy.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ENVACTORS_MONITOR", "0")
            self.pool = ea.ActorPool(dict, actors, backend=self.backend, deadlines=ea.Deadlines(slow=None))
        self.futures: list[ea.ActorFuture] = []

    def submit(self, value: int) -> ea.ActorFuture:
        call = self.pool.submit("echo", value)
        self.futures.append(call)
        return call

    def use(self, value: int) -> None:
        """Submit a call and wait for its result."""
        call = self.submit(value)
        assert self.result_of(call) == (value,), "the result is another call's"

    def result_of(self, call: ea.ActorFuture) -> Any:
        with self._run.waiting_for(call.settled):
            return call.result()

    def cancel(self, call: ea.ActorFuture) -> None:
        """Cancel a call; it has its result if it was too late."""
        was_cancelled = call.cancel()
        try:
            self.result_of(call)
        except concurrent.futures.CancelledError:
            assert was_cancelled, "a call is cancelled although cancel() has returned False"

    def answer(self) -> None:
        """Answer what the workers were sent."""
        for worker in self.backend.workers:
            held = worker.channel.held
            while held:
                worker.channel.answer(held.pop(0))
            worker.channel.held = None

    def check(self) -> None:
        """Check that all calls have ended and all actors are idle."""
        check_errors()
        for number, call in enumerate(self.futures):
            assert call.settled(), f"call {number} never ends"
        assert not self.pool._waiting, "a call waits although its future is settled"
        assert set(self.pool._idle) == set(self.pool.actors), "an actor never becomes idle again"
        assert not self.pool._running, "an actor runs a call that has ended"


def pool_submit(run: Run) -> Check:
    user = _PoolUser(run, 1)
    run.add_thread("first", lambda: user.use(1))
    run.add_thread("second", lambda: user.use(2))
    return user.check


def pool_two_actors(run: Run) -> Check:
    user = _PoolUser(run, 2)
    for number in range(3):
        run.add_thread(f"user {number}", functools.partial(user.use, number))
    return user.check


def pool_cancel(run: Run) -> Check:
    """One thread cancels a call in the queue of a busy actor, and the other one submits a call."""
    user = _PoolUser(run, 1, holds=True)
    user.pool.actors[0].call("echo", 0)
    queued = user.submit(1)

    def submit() -> None:
        user.submit(2)
        user.answer()

    run.add_thread("canceller", lambda: user.cancel(queued))
    run.add_thread("submitter", submit)
    return user.check


def pool_cancel_waiting(run: Run) -> Check:
    """A call that waits for an actor is cancelled as the actor becomes idle."""
    user = _PoolUser(run, 1, holds=True)
    running, waiting = user.submit(1), user.submit(2)
    run.add_thread("canceller", lambda: user.cancel(waiting))
    run.add_thread("waiter", lambda: user.result_of(running))
    run.add_thread("worker", user.answer)
    return user.check


def pool_idle_again(run: Run) -> Check:
    """Two calls end at once, and each thread sends the next call to the actor that it has freed."""
    user = _PoolUser(run, 2, holds=True)
    running = [user.submit(1), user.submit(2)]
    user.submit(3)
    user.submit(4)
    run.add_thread("first", lambda: user.result_of(running[0]))
    run.add_thread("second", lambda: user.result_of(running[1]))
    run.add_thread("worker", user.answer)
    return user.check


def pool_wait(run: Run) -> Check:
    """One thread waits as `concurrent.futures.wait` does, the other one in the future itself."""
    user = _PoolUser(run, 1, holds=True)
    call = user.submit(1)

    def wait() -> None:
        with run.waiting_for(call.settled):
            concurrent.futures.wait([call])

    run.add_thread("in the library", wait)
    run.add_thread("in the future", lambda: user.result_of(call))
    run.add_thread("worker", user.answer)
    return user.check


def pool_interrupt(run: Run) -> Check:
    """An exception falls into a thread that settles a call of the pool."""
    user = _PoolUser(run, 1, holds=True)
    call = user.submit(1)
    user.submit(2)

    def read() -> None:
        with contextlib.suppress(Interruption):
            user.result_of(call)

    # Not where a call is assigned: there signals are deferred.
    settling = [PoolFuture.settle, PoolFuture._leave_actor, ActorPool.release]
    run.add_thread("reader", read, interruptible=settling)
    run.add_thread("worker", user.answer)
    return user.check
