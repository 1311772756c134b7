"""Scenarios in which threads wait in the reactor and in wait sets, and run what was deferred."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from envactors.actor import engine
from envactors.actor.callbacks import CallbackExecutor
from envactors.actor.reactor import Reactor
from envactors.actor.wait_set import LockGate, WaitSet
from simulation.descriptors import ControlledDoorbell, Inbox
from simulation.primitives import controlled
from simulation.schedule import Run
from simulation.tasks import Carriers

Check = Callable[[], None]
# How many waits the thread makes that waits in a loop.
_LOOP_WAITS = 5
# The modules that get controlled primitives.
_CONTROLLED = ("envactors.actor.", "envactors.rollout.rollouts", "simulation.planted_waits")


class _Errors(logging.Handler):
    """Collects the errors that the library contains and logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


contained = _Errors()


@contextlib.contextmanager
def installed(carriers: Carriers) -> Iterator[None]:
    """Have the library use controlled primitives, and an engine of its own in each schedule."""
    names = [name for name in sys.modules if name.startswith(_CONTROLLED)]
    modules = [*(sys.modules[name] for name in names), concurrent.futures._base]
    logger = logging.getLogger("envactors")
    before = engine._engine, engine._lock, logger.propagate, logger.manager.disable
    logger.addHandler(contained)
    logger.propagate = False
    logging.disable(logging.WARNING)
    try:
        with controlled(modules, carriers):
            yield
    finally:
        engine._engine, engine._lock, logger.propagate, level = before
        logging.disable(level)
        logger.removeHandler(contained)


def check_errors() -> None:
    assert not contained.records, f"an error was contained: {contained.records[0].getMessage()}"


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
        contained.records.clear()
        self._run = run
        self.reactor = Reactor()
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
        check_errors()
        assert not self.reactor._parking.gates, "a thread that has left is still listed as asleep"
        assert not self.reactor._pump_lock.locked(), "the lock of the pump is still taken"
        assert not self._inbox.is_readable, "nobody has read a reply"


def waiters(*keys: str, send: Sequence[str] = (), settle: Sequence[str] = ()) -> Callable[[Run], Check]:
    """Return what builds one thread that waits for each key, and one that has the results come.

    Args:
        *keys: What the threads wait for.
        send: The results that come by replies, in this order.
        settle: Those that come without a reply.
    """

    def build(run: Run) -> Check:
        hub = Hub(run)
        for number, key in enumerate(keys):
            run.add_thread(f"waiter {number}", functools.partial(hub.wait, key))

        def bring() -> None:
            hub.send(*send)
            for key in settle:
                hub.settle(key)

        run.add_thread("sender", bring)
        return hub.check

    return build


def timeout(run: Run) -> Check:
    hub = Hub(run)
    run.add_thread("patient", lambda: hub.wait("a"))
    run.add_thread("impatient", lambda: hub.wait("a", 1.0))
    run.add_thread("sender", lambda: hub.send("a"))
    return hub.check


def nested(run: Run) -> Check:
    hub = Hub(run)
    hub.before["a"] = lambda: hub.wait("b")
    run.add_thread("outer", lambda: hub.wait("a"))
    run.add_thread("sender", lambda: hub.send("a"))
    run.add_thread("waker", lambda: hub.settle("b"))
    return hub.check


def nested_after_look(run: Run) -> Check:
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


def loop(run: Run) -> Check:
    hub = Hub(run)

    def wait_often() -> None:
        for number in range(_LOOP_WAITS):
            hub.send(f"a{number}")
            hub.wait(f"a{number}")

    run.add_thread("loop", wait_often)
    run.add_thread("sender", lambda: hub.send("b"))  # the reactor's thread has to read it
    return hub.check


def ring_and_reply(run: Run) -> Check:
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

    def sleep(self, key: str, wait_set: WaitSet | None = None) -> None:
        with self._run.waiting_for(self.done):
            while not self.done():
                self.parking.sleep(self.done, key, wait_set or LockGate(), None)

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
        for number in range(2):
            run.add_thread(f"sleeper {number}", functools.partial(shared.sleep, "a", WaitSet(replies.fileno())))
        run.add_thread("waker", lambda: shared.wake("a"))
        return shared.check

    return build


# What runs later -----------------------------------------------------------------------------------------


class _SafeThread:
    """Runs in its own thread what was interrupted."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._executor = CallbackExecutor("safe")
        self.errors: list[BaseException] = []

    def post(self, job: Callable[[], None]) -> None:
        self._executor.submit(job)

    def is_current_thread(self) -> bool:
        return self._executor.owns_current_thread()


def crossed_calls(make: Callable[[Any, Any, Any], Any]) -> Callable[[Run], Check]:
    """Return what builds two threads, each of which runs the deferred calls of one actor and then the other's."""

    def build(run: Run) -> Check:
        safe = _SafeThread(run)
        parts = safe.post, safe.is_current_thread, safe.errors.append
        first, second = make(*parts), make(*parts)
        ran: list[str] = []

        def act(name: str, own: Any, other: Any) -> None:
            def lead_to_the_other() -> None:
                ran.append(name)
                other.waiting.append(lambda: ran.append(f"after {name}"))
                other.run()

            own.waiting.append(lead_to_the_other)
            own.run()

        def check() -> None:
            assert not safe.errors, f"a deferred call has failed: {safe.errors[0]!r}"
            assert sorted(ran) == ["after first", "after second", "first", "second"], f"what ran is {ran}"

        run.add_thread("first", lambda: act("first", first, second))
        run.add_thread("second", lambda: act("second", second, first))
        return check

    return build


def submitted_jobs(run: Run) -> Check:
    executor = CallbackExecutor("executor")
    ran: list[str] = []
    run.add_thread("first", lambda: executor.submit(lambda: ran.append("first")))
    run.add_thread("second", lambda: executor.submit(lambda: ran.append("second")))

    def check() -> None:
        assert sorted(ran) == ["first", "second"], f"what ran is {ran}"

    return check
