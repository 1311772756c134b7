"""Futures without an actor."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from types import SimpleNamespace

import pytest

from envactors.actor.future import ActorFuture, ReadyOutcome
from envactors.actor.latch import Latch
from envactors.loop import Loop
from envactors.runtime import ThreadPool
from envactors.system import polling

SOON = 10.0


class Owner:
    def __init__(self, pool, loop):
        self.runtime = SimpleNamespace(callbacks=pool, loop=loop)

    def check_not_forked(self):
        pass

    def read_reply(self, future, until):
        pass


@pytest.fixture
def make():
    errors = []
    pool, loop = ThreadPool("callbacks", runs_user_code=True), Loop(errors.append)
    yield lambda: ActorFuture(Owner(pool, loop), None)
    for part in (pool, loop):
        part.stop()
        part.join(SOON)
    assert errors == []


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return thread, found


def test_the_repr_of_a_finished_future_names_a_type_only_once_its_outcome_was_read(make):
    """It used to say that every unread future, also that of a failed call, had returned None."""
    fine, failed = make(), make()
    fine.set_outcome(ReadyOutcome(3))
    failed.set_outcome(ReadyOutcome(None, KeyError("a")))
    for future in (fine, failed):
        assert repr(future).endswith(" state=finished>")
        future.exception(SOON)
    assert repr(fine).endswith(" state=finished returned int>")
    assert repr(failed).endswith(" state=finished raised KeyError>")
    canceled = make()
    assert repr(canceled).endswith(" state=pending>")
    canceled.set_canceled()
    assert repr(canceled).endswith(" state=cancelled>")


@pytest.mark.parametrize("is_in_loop", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_all_threads_that_wait_get_the_result(make, count, is_in_loop):
    future = make()
    threads = [in_thread(lambda: future.result(SOON)) for _ in range(count)]
    run = future.owner.runtime.loop.call_soon if is_in_loop else lambda function: function()
    run(lambda: future.set_outcome(ReadyOutcome(3)))
    for thread, found in threads:
        thread.join(SOON)
        assert found == [3]


def test_the_outcome_is_read_once_by_the_thread_that_asks(make):
    future, threads = make(), []

    class Outcome:
        is_failure = False

        def read(self):
            threads.append(threading.get_ident())
            return 1, None

    future.set_outcome(Outcome())
    assert (future.result(), future.result()) == (1, 1)
    assert threads == [threading.get_ident()]


def test_an_interrupted_reading_is_repeated(make):
    future, outcomes = make(), iter([KeyboardInterrupt(), None])

    class Outcome:
        is_failure = False

        def read(self):
            if (error := next(outcomes)) is not None:
                raise error
            return 1, None

    future.set_outcome(Outcome())
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert future.result() == 1


def test_the_first_outcome_counts_and_the_second_completes_an_interrupted_notification(make):
    future = make()
    future._condition.state = "FINISHED"  # the first call was interrupted here
    future._outcome = ReadyOutcome(1)
    thread, found = in_thread(lambda: future._ended.wait(SOON))
    future.set_outcome(ReadyOutcome(2))
    thread.join(SOON)
    assert found == [True]
    assert future.result() == 1


def test_callbacks_run_once_in_another_thread(make):
    future, seen, called = make(), [], threading.Semaphore(0)

    def callback(done):
        seen.append((done is future, threading.get_ident()))
        called.release()

    future.add_done_callback(callback)
    future.set_outcome(ReadyOutcome(1))
    future.set_outcome(ReadyOutcome(1))
    assert called.acquire(timeout=SOON)
    future.add_done_callback(callback)
    assert called.acquire(timeout=SOON)
    assert [same for same, _ in seen] == [True, True]
    assert seen[0][1] != threading.get_ident() == seen[1][1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_standard_library_waits_for_futures(make, when):
    futures = [make() for _ in range(3)]
    if when == "before":
        for future in futures:
            future.set_outcome(ReadyOutcome(1))
        assert concurrent.futures.wait(futures, SOON).done == set(futures)
    else:
        thread, found = in_thread(lambda: list(concurrent.futures.as_completed(futures, SOON)))
        while not all(future._waiters for future in futures):
            pass
        for future in futures:
            future.set_outcome(ReadyOutcome(1))
        thread.join(SOON)
        assert set(found[0]) == set(futures)


@pytest.fixture
def locked(make, monkeypatch):
    """A future with a waiter, whose condition an interrupt in `concurrent.futures.wait` has left locked."""
    monkeypatch.setattr("envactors.actor.future._LOCK_PATIENCE", 0.01)
    future, waiter = make(), concurrent.futures._base._AllCompletedWaiter(1, stop_on_exception=False)
    thread, _ = in_thread(lambda: future._condition.acquire(timeout=SOON))
    thread.join()
    future._waiters.append(waiter)
    return future, waiter


def test_a_condition_that_was_left_locked_does_not_block_the_loop(locked):
    future, _ = locked
    future.set_outcome(ReadyOutcome(1))
    assert future.result(SOON) == 1


def test_a_condition_that_was_left_locked_delays_callbacks_and_waiters_only_for_a_moment(locked):
    future, waiter = locked
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    future.set_outcome(ReadyOutcome(1))
    assert called.wait(SOON)
    assert waiter.event.wait(SOON)
    assert waiter.finished_futures == [future]


def test_a_waiter_that_comes_after_the_end_and_before_the_notification_sees_the_future_once(make):
    """The callback has the notification run in another thread, which another callback holds up."""
    future, gate = make(), threading.Event()
    future.owner.runtime.callbacks.submit(lambda: gate.wait(SOON))
    future.add_done_callback(lambda _: None)
    future.set_outcome(ReadyOutcome(1))
    other = make()
    thread, found = in_thread(lambda: list(concurrent.futures.as_completed([future, other], SOON)))
    while not other._waiters:
        pass
    gate.set()
    notified = threading.Event()
    future.owner.runtime.callbacks.submit(notified.set)
    assert notified.wait(SOON)
    other.set_outcome(ReadyOutcome(2))
    thread.join(SOON)
    assert [each.result() for each in found[0]] == [1, 2]


def test_a_waiter_that_looks_as_the_future_ends_is_notified(make):
    future = make()
    condition = future._condition
    condition.acquire()
    future.set_outcome(ReadyOutcome(1))
    assert future.done()
    assert future._state == "PENDING"  # as the waiter has seen it
    waiter = concurrent.futures._base._AllCompletedWaiter(1, stop_on_exception=False)
    future._waiters.append(waiter)
    condition.release()
    assert waiter.event.wait(SOON)
    assert waiter.finished_futures == [future]
    assert future._state == "FINISHED"


def test_a_signal_handler_that_waits_for_a_future_drops_no_waiter_of_its_thread(make):
    future, waiter = make(), concurrent.futures._base._AllCompletedWaiter(1, stop_on_exception=False)
    future._condition.acquire()
    waiters = future._waiters
    concurrent.futures.wait([future], 0)  # the handler comes here
    waiters.append(waiter)
    future._condition.release()
    future.set_outcome(ReadyOutcome(1))
    assert waiter.event.wait(SOON)


def test_a_canceled_future(make):
    future = make()
    future.set_canceled()
    assert future.cancelled()
    assert future.done()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert concurrent.futures.wait([future], SOON).done == {future}


def test_a_latch_times_out():
    latch = Latch()
    assert not latch.wait(0.01)
    latch.set()
    latch.set()
    assert latch.wait(None)


class ReadMeanwhile(ActorFuture):
    """Its outcome is read by another thread as soon as somebody has looked at it."""

    _kept = None

    @property
    def _outcome(self):
        outcome, self._kept = self._kept, None
        return outcome

    @_outcome.setter
    def _outcome(self, outcome):
        self._kept = outcome


def test_waiters_are_notified_although_the_outcome_is_read_meanwhile(make):
    future = ReadMeanwhile(make().owner, None)
    thread, found = in_thread(lambda: concurrent.futures.wait([future], SOON))
    while not future._waiters:
        time.sleep(0.001)
    future.set_outcome(ReadyOutcome(1))
    thread.join(SOON)
    assert found[0].done == {future}


def test_a_timeout_that_is_no_number_is_named_by_the_method_that_was_called(make):
    with pytest.raises(ValueError, match=r"^result\(timeout"):
        make().result(timeout="x")
    with pytest.raises(ValueError, match=r"^exception\(timeout"):
        make().exception(timeout="x")


def test_a_timeout_may_be_longer_than_one_wait(make, monkeypatch):
    monkeypatch.setattr(polling, "LONGEST_WAIT", 0.01)
    future = make()
    thread, found = in_thread(lambda: future.result(SOON))
    time.sleep(0.05)
    future.set_result(3)
    thread.join()
    assert found == [3]


def test_asyncio_sees_an_outcome_that_nobody_has_read(make):
    """`asyncio` looks at `_get_snapshot` in place of `result` since Python 3.15."""
    fine, failed, canceled, pending = make(), make(), make(), make()
    error = KeyError("a")
    fine.set_outcome(ReadyOutcome(3))
    failed.set_outcome(ReadyOutcome(None, error))
    canceled.set_canceled()
    assert fine._get_snapshot() == (True, False, 3, None)
    assert failed._get_snapshot() == (True, False, None, error)
    assert canceled._get_snapshot() == (True, True, None, None)
    assert pending._get_snapshot() == (False, False, None, None)
