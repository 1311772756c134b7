"""Scenarios in which threads wait for each other: in the reactor, in wait sets, and for the calls of a pool."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import envactors as ea
from envactors.actor import callbacks, engine, future, pool, reactor, wait_set
from envactors.actor.callbacks import CallbackExecutor, DeferredCalls
from envactors.actor.pool import ActorPool, PoolFuture
from envactors.actor.reactor import Reactor
from envactors.actor.wait_set import LockGate, Parking, WaitSet
from envactors.backends.base import Backend, ExitStatus, Stacks, Worker
from envactors.wire.control_page import ControlPage, page_size
from envactors.wire.messages import Frame, Kind
from envactors.wire.pickling import dumps, loads
from simulation.interleavings import Carriers, Interruption, Run, Scenario
from simulation.primitives import ControlledDoorbell, Inbox, controlled

Check = Callable[[], None]
# The reactor counts this many waits as a loop here, so that a short scenario has one.
_LOOP_WAITS = 2
# The modules that get controlled primitives.
_CONTROLLED = ("envactors.actor.", "simulation.planted_waits")


class _Errors(logging.Handler):
    """Collects the errors that the library contains and logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


_errors = _Errors()


@contextlib.contextmanager
def installed(carriers: Carriers) -> Iterator[None]:
    """Have the library use controlled primitives, and an engine of its own in each schedule."""
    names = [name for name in sys.modules if name.startswith(_CONTROLLED)]
    modules = [*(sys.modules[name] for name in names), concurrent.futures._base]
    logger = logging.getLogger("envactors")
    before = engine._engine, engine._lock, reactor._LOOP_WAITS, logger.propagate, logger.manager.disable
    logger.addHandler(_errors)
    logger.propagate = False
    logging.disable(logging.WARNING)
    try:
        with controlled(modules, carriers):
            reactor._LOOP_WAITS = _LOOP_WAITS
            yield
    finally:
        engine._engine, engine._lock, reactor._LOOP_WAITS, logger.propagate, level = before
        logging.disable(level)
        logger.removeHandler(_errors)


def _check_errors() -> None:
    assert not _errors.records, f"an error was contained: {_errors.records[0].getMessage()}"


# The reactor ---------------------------------------------------------------------------------------------


class Hub:
    """A reactor, and results that come through it.

    Args:
        run: The schedule.

    Attributes:
        reactor: The reactor.
        results: The keys of the results that have come.
    """

    def __init__(self, run: Run) -> None:
        _errors.records.clear()
        self._run = run
        self.reactor = Reactor(tuple)
        self.results: set[str] = set()
        # What is called before a result counts as there, by its key.
        self.before: dict[str, Callable[[], object]] = {}
        self._inbox = Inbox(run)
        self.reactor.watch_channel(self._inbox.fileno(), self._on_replies)

    def _on_replies(self, _mask: int) -> None:
        for key in self._inbox.take():
            if key in self.before:
                self.before.pop(key)()
            self.settle(key)

    def settle(self, key: str) -> None:
        """Have a result there without a reply."""
        self.results.add(key)
        self.reactor.wake(key)

    def send(self, *keys: str) -> None:
        """Send replies that bring results."""
        for key in keys:
            self._inbox.put(key)

    def wait(self, key: str, seconds: float | None = None, bells: WaitSet | None = None) -> None:
        """Wait for a result."""
        deadline = None if seconds is None else self._run.now + seconds

        def done() -> bool:
            return key in self.results

        with self._run.waiting_for(done):
            is_done = self.reactor.wait(done, key, deadline, bells)
        if deadline is None:
            assert is_done, "a wait without a deadline ends too early"
        elif not is_done:
            assert self._run.now >= deadline, "a wait ends before its deadline"

    def check(self) -> None:
        """Check what is left once all threads have ended."""
        _check_errors()
        assert not self.reactor._parking.gates, "a thread that has left is still listed as asleep"
        assert not self.reactor._pump_lock.locked(), "the lock of the pump is still taken"
        assert not self._inbox.is_readable, "nobody has read a reply"


def _same_key(run: Run) -> Check:
    hub = Hub(run)
    run.add_thread("first", lambda: hub.wait("a"))
    run.add_thread("second", lambda: hub.wait("a"))
    run.add_thread("sender", lambda: hub.send("a"))
    return hub.check


def _same_key_without_reply(run: Run) -> Check:
    hub = Hub(run)
    run.add_thread("first", lambda: hub.wait("a"))
    run.add_thread("second", lambda: hub.wait("a"))
    run.add_thread("waker", lambda: hub.settle("a"))
    return hub.check


def _different_keys(run: Run) -> Check:
    hub = Hub(run)
    run.add_thread("first", lambda: hub.wait("a"))
    run.add_thread("second", lambda: hub.wait("b"))
    run.add_thread("sender", lambda: hub.send("b", "a"))
    return hub.check


def _one_waiter(run: Run) -> Check:
    hub = Hub(run)
    run.add_thread("waiter", lambda: hub.wait("a"))
    run.add_thread("waker", lambda: hub.settle("a"))
    return hub.check


def _timeout(run: Run) -> Check:
    hub = Hub(run)
    run.add_thread("patient", lambda: hub.wait("a"))
    run.add_thread("impatient", lambda: hub.wait("a", 1.0))
    run.add_thread("sender", lambda: hub.send("a"))
    return hub.check


def _nested(run: Run) -> Check:
    hub = Hub(run)
    hub.before["a"] = lambda: hub.wait("b")
    run.add_thread("outer", lambda: hub.wait("a"))
    run.add_thread("sender", lambda: hub.send("a"))
    run.add_thread("waker", lambda: hub.settle("b"))
    return hub.check


def _nested_after_look(run: Run) -> Check:
    """A signal handler waits, too, just after the thread has looked at its condition."""
    hub = Hub(run)
    handlers = [lambda: hub.wait("b")]

    def done() -> bool:
        is_done = "a" in hub.results
        if handlers:
            handlers.pop()()
        return is_done

    def wait() -> None:
        with run.waiting_for(lambda: "a" in hub.results):
            assert hub.reactor.wait(done, "a", None), "a wait without a deadline ends too early"

    run.add_thread("outer", wait)
    run.add_thread("sender", lambda: hub.send("a", "b"))
    return hub.check


def _loop(run: Run) -> Check:
    hub = Hub(run)

    def wait_often() -> None:
        for number in range(2 * _LOOP_WAITS + 1):
            hub.send(f"a{number}")
            hub.wait(f"a{number}")

    run.add_thread("loop", wait_often)
    run.add_thread("sender", lambda: hub.send("b"))  # the reactor's thread has to read it
    return hub.check


def _ring_and_reply(run: Run) -> Check:
    hub = Hub(run)
    bell = ControlledDoorbell(run)
    bells = hub.reactor.make_wait_set()
    bells.watch_doorbell(bell)  # type: ignore[arg-type]

    def ring() -> None:
        hub.results.add("a")
        bell.ring()

    run.add_thread("for a ring", lambda: hub.wait("a", bells=bells))
    run.add_thread("for a reply", lambda: hub.wait("b"))

    def ring_and_send() -> None:
        ring()
        hub.send("b")

    run.add_thread("sender", ring_and_send)
    return hub.check


# What threads sleep in -----------------------------------------------------------------------------------


class _Sleepers:
    """Threads that sleep in one parking until something holds.

    Args:
        run: The schedule.
        parking: Where they sleep.
    """

    def __init__(self, run: Run, parking: Any) -> None:
        self._run = run
        self.parking = parking
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def sleep(self, key: str) -> None:
        with self._run.waiting_for(self.done):
            while not self.done():
                self.parking.sleep(self.done, key, LockGate(), None)

    def wake(self, *keys: str) -> None:
        """Wake them twice: what they wait for holds only the second time."""
        for self.is_done in (False, True):
            for key in keys:
                self.parking.wake(key)
                self._run.pause()

    def check(self) -> None:
        assert not any(self.parking.gates.values()), "a thread that has left is still listed as asleep"


def sleepers(parking: Callable[[], Any], *keys: str) -> Callable[[Run], Check]:
    """Return what builds one thread that sleeps for each key, and one that wakes all of them."""

    def build(run: Run) -> Check:
        shared = _Sleepers(run, parking())
        for number, key in enumerate(keys):
            run.add_thread(f"sleeper {number}", functools.partial(shared.sleep, key))
        run.add_thread("waker", lambda: shared.wake(*dict.fromkeys(keys)))
        return shared.check

    return build


def ring_sleepers(parking: Callable[[], Any]) -> Callable[[Run], Check]:
    """Return what builds two threads that sleep in wait sets, for one key, and one that wakes both."""

    def build(run: Run) -> Check:
        shared = _Sleepers(run, parking())
        replies = Inbox(run)

        def sleep(bells: WaitSet) -> None:
            with run.waiting_for(shared.done):
                assert bells.wait_rings(shared.done, "a", None)

        for number in range(2):
            bells = WaitSet(replies.fileno(), shared.parking)
            run.add_thread(f"sleeper {number}", functools.partial(sleep, bells))
        run.add_thread("waker", lambda: shared.wake("a"))
        return shared.check

    return build


# What runs later -----------------------------------------------------------------------------------------


class _SafeThread:
    """Runs in its own thread what was interrupted."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._executor = CallbackExecutor("safe")

    def post(self, job: Callable[[], None]) -> None:
        self._executor.submit(job)

    def is_current_thread(self) -> bool:
        return self._executor.owns_current_thread()


def crossed_calls(make: Callable[[Any, Any], Any]) -> Callable[[Run], Check]:
    """Return what builds two threads, each of which runs the deferred calls of one actor and then the other's."""

    def build(run: Run) -> Check:
        safe = _SafeThread(run)
        errors: list[BaseException] = []
        first, second = make(safe, errors.append), make(safe, errors.append)
        ran: list[str] = []

        def act(name: str, own: Any, other: Any) -> None:
            def lead_to_the_other() -> None:
                ran.append(name)
                other.waiting.append(lambda: ran.append(f"after {name}"))
                other.run()

            own.waiting.append(lead_to_the_other)
            own.run()

        def check() -> None:
            assert not errors, f"a deferred call has failed: {errors[0]!r}"
            assert sorted(ran) == ["after first", "after second", "first", "second"], f"what ran is {ran}"

        run.add_thread("first", lambda: act("first", first, second))
        run.add_thread("second", lambda: act("second", second, first))
        return check

    return build


def _submitted_jobs(run: Run) -> Check:
    executor = CallbackExecutor("executor")
    ran: list[str] = []
    run.add_thread("first", lambda: executor.submit(lambda: ran.append("first")))
    run.add_thread("second", lambda: executor.submit(lambda: ran.append("second")))

    def check() -> None:
        assert sorted(ran) == ["first", "second"], f"what ran is {ran}"

    return check


# Pools ---------------------------------------------------------------------------------------------------


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
        _errors.records.clear()
        engine._engine = None
        engine._lock = vars(engine)["threading"].RLock()
        self._run = run
        self.backend = _Backend(run, holds)
        self.pool = ea.ActorPool(dict, actors, backend=self.backend)
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
        _check_errors()
        for number, call in enumerate(self.futures):
            assert call.settled(), f"call {number} never ends"
        assert not self.pool._waiting, "a call waits although its future is settled"
        assert set(self.pool._idle) == set(self.pool.actors), "an actor never becomes idle again"
        assert not self.pool._running, "an actor runs a call that has ended"


def _pool_submit(run: Run) -> Check:
    user = _PoolUser(run, 1)
    run.add_thread("first", lambda: user.use(1))
    run.add_thread("second", lambda: user.use(2))
    return user.check


def _pool_two_actors(run: Run) -> Check:
    user = _PoolUser(run, 2)
    for number in range(3):
        run.add_thread(f"user {number}", functools.partial(user.use, number))
    return user.check


def _pool_cancel(run: Run) -> Check:
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


def _pool_cancel_waiting(run: Run) -> Check:
    """A call that waits for an actor is cancelled as the actor becomes idle."""
    user = _PoolUser(run, 1, holds=True)
    running, waiting = user.submit(1), user.submit(2)
    run.add_thread("canceller", lambda: user.cancel(waiting))
    run.add_thread("waiter", lambda: user.result_of(running))
    run.add_thread("worker", user.answer)
    return user.check


def _pool_idle_again(run: Run) -> Check:
    """Two calls end at once, and each thread sends the next call to the actor that it has freed."""
    user = _PoolUser(run, 2, holds=True)
    running = [user.submit(1), user.submit(2)]
    user.submit(3)
    user.submit(4)
    run.add_thread("first", lambda: user.result_of(running[0]))
    run.add_thread("second", lambda: user.result_of(running[1]))
    run.add_thread("worker", user.answer)
    return user.check


def _pool_wait(run: Run) -> Check:
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


def _pool_interrupt(run: Run) -> Check:
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


_WAITS = (reactor, wait_set)
_POOL = (pool,)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("one-waiter", _WAITS, _one_waiter, installed),
        Scenario("same-key", _WAITS, _same_key, installed),
        Scenario("same-key-without-reply", _WAITS, _same_key_without_reply, installed),
        Scenario("different-keys", _WAITS, _different_keys, installed),
        Scenario("timeout", _WAITS, _timeout, installed),
        Scenario("nested", _WAITS, _nested, installed),
        Scenario("nested-after-look", _WAITS, _nested_after_look, installed),
        Scenario("loop", _WAITS, _loop, installed),
        Scenario("ring-and-reply", _WAITS, _ring_and_reply, installed),
        Scenario("sleepers-same-key", _WAITS, sleepers(Parking, "a", "a"), installed),
        Scenario("sleepers-different-keys", _WAITS, sleepers(Parking, "a", "b"), installed),
        Scenario("sleepers-for-rings", _WAITS, ring_sleepers(Parking), installed),
        Scenario("crossed-calls", (callbacks,), crossed_calls(DeferredCalls), installed),
        Scenario("submitted-jobs", (callbacks,), _submitted_jobs, installed),
        Scenario("pool-submit", _POOL, _pool_submit, installed),
        Scenario("pool-two-actors", _POOL, _pool_two_actors, installed),
        Scenario("pool-cancel", _POOL, _pool_cancel, installed),
        Scenario("pool-cancel-waiting", _POOL, _pool_cancel_waiting, installed),
        Scenario("pool-idle-again", _POOL, _pool_idle_again, installed),
        Scenario("pool-wait", (pool, future), _pool_wait, installed),
        Scenario("pool-interrupt", _POOL, _pool_interrupt, installed),
    )
}
