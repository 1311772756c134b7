"""The loop and the pool of threads."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import queue
import signal
import threading
import time
import weakref

import pytest
from interrupting import Interrupt, interrupt

from envactors.loop import Loop
from envactors.runtime import ThreadPool
from envactors.system.polling import READABLE, WRITABLE, Doorbell

SOON = 10.0


@pytest.fixture
def errors():
    return []


@pytest.fixture
def loop(errors):
    loop = Loop(errors.append)
    yield loop
    loop.stop()
    loop.join(SOON)


def wait_until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def pipe():
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


def test_callbacks_run_in_order(loop):
    seen, done = [], threading.Event()
    for i in range(3):
        loop.call_soon(lambda i=i: seen.append(i))
    loop.call_soon(done.set)
    assert done.wait(SOON)
    assert seen == [0, 1, 2]


def test_the_loop_wakes_others_once_it_has_handled_what_was_ready(loop):
    seen, done, gate = [], threading.Event(), threading.Event()
    loop.call_soon(lambda: gate.wait(SOON))
    for i in range(3):
        loop.call_soon(lambda i=i: (seen.append(i), loop.wake_after_events(lambda: seen.append(f"woken {i}"))))
    loop.call_soon(lambda: loop.wake_after_events(done.set))
    gate.set()
    assert done.wait(SOON)
    assert seen == [0, 1, 2, "woken 0", "woken 1", "woken 2"]


def test_what_is_not_urgent_goes_along_with_what_is_or_comes_soon(loop):
    seen, done, later = [], threading.Event(), threading.Event()
    loop.call_soon(lambda: loop.wake_after_events(lambda: seen.append(1), is_urgent=False))
    loop.call_soon(lambda: loop.wake_after_events(done.set))
    assert done.wait(SOON)
    assert seen == [1]
    loop.call_soon(lambda: loop.wake_after_events(later.set, is_urgent=False))
    assert later.wait(SOON)


def test_other_threads_wake_others_immediately(loop):
    seen = []
    loop.wake_after_events(lambda: seen.append(1))
    assert seen == [1]


def test_events_without_end_do_not_keep_the_loop_from_waking_others(loop, pipe):
    woken = threading.Event()
    loop.watch(pipe[0], lambda _events: None)  # it stays readable
    os.write(pipe[1], b"x")
    loop.call_soon(lambda: loop.wake_after_events(woken.set))
    assert woken.wait(SOON)
    loop.unwatch(pipe[0])


def test_a_loop_that_ends_wakes_others(loop):
    woken = threading.Event()
    loop.call_soon(lambda: (loop.wake_after_events(woken.set), loop.stop()))
    assert woken.wait(SOON)


def test_an_error_in_waking_one_thread_leaves_the_others(loop, errors):
    woken = threading.Event()
    loop.call_soon(lambda: (loop.wake_after_events(lambda: 1 / 0), loop.wake_after_events(woken.set)))
    assert woken.wait(SOON)
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_an_ended_loop_does_not_keep_the_objects_of_its_callbacks(loop, pipe):
    class Owner:
        def on_event(self, *_):
            pass

    owner = Owner()
    loop.call_at(time.monotonic() + 1000.0, owner.on_event)
    loop.watch(pipe[0], owner.on_event)
    loop.stop()
    loop.join(SOON)
    seen = weakref.ref(owner)
    del owner
    assert seen() is None


def test_timers_run_in_the_order_of_their_times(loop):
    seen, done, now = [], threading.Event(), time.monotonic()
    loop.call_at(now + 0.03, done.set)
    loop.call_at(now + 0.02, lambda: seen.append(2))
    loop.call_at(now + 0.01, lambda: seen.append(1))
    loop.call_at(now + 0.015, lambda: seen.append("canceled")).cancel()
    assert done.wait(SOON)
    assert seen == [1, 2]


def test_a_readable_descriptor_is_reported_until_it_is_not_watched(loop, pipe):
    reader, writer = pipe
    seen = []
    loop.watch(reader, lambda events: seen.append((events & READABLE, os.read(reader, 9))))
    os.write(writer, b"a")
    wait_until(lambda: seen)
    loop.unwatch(reader)
    os.write(writer, b"b")
    time.sleep(0.02)
    assert [data for _, data in seen] == [b"a"]


def test_an_event_of_a_descriptor_that_was_replaced_meanwhile_is_dropped(loop):
    """The number of a descriptor goes to another one, such as from a channel to the sentinel of another process."""
    read, taken_for_another, done = [], threading.Event(), threading.Event()
    with contextlib.ExitStack() as cleanup:
        silent, *bells = [cleanup.enter_context(contextlib.closing(Doorbell())) for _ in range(3)]
        numbers = [os.dup(bell.fileno()) for bell in bells]
        for number in numbers:
            cleanup.callback(os.close, number)

        def replace_other(number):
            (other,) = {*numbers} - {number}
            if not read:
                loop.unwatch(other)
                os.dup2(silent.fileno(), other)
                loop.watch(other, lambda _events: taken_for_another.set())
                loop.call_soon(done.set)
            read.append(number)
            loop.unwatch(number)

        def ring_both():  # in the loop, which then polls both events at once
            for number in numbers:
                loop.watch(number, lambda _events, number=number: replace_other(number))
            for bell in bells:
                bell.ring()

        loop.call_soon(ring_both)
        assert done.wait(SOON)
        assert len(read) == 1
        assert not taken_for_another.is_set()
        for number in numbers:
            loop.unwatch(number)


def test_a_lent_descriptor_is_not_read_but_still_written(loop, pipe):
    """Lending and wanting to write do not overwrite each other's mask."""
    reader, writer = pipe
    read, written = threading.Event(), threading.Event()

    def on_write(events):
        if events & WRITABLE:
            loop.want_write(writer, False)
            written.set()

    loop.watch(writer, on_write)
    loop.set_lent(writer, True)
    loop.want_write(writer, True)
    assert written.wait(SOON)
    written.clear()
    loop.want_write(writer, True)
    loop.set_lent(writer, False)
    assert written.wait(SOON)
    loop.watch(reader, lambda _events: read.set())
    loop.set_lent(reader, True)
    os.write(writer, b"a")
    assert not read.wait(0.02)
    loop.set_lent(reader, False)
    assert read.wait(SOON)
    loop.unwatch(reader)
    loop.unwatch(writer)


@pytest.mark.parametrize("is_lent", [True, False])
@pytest.mark.parametrize("number", range(8))
def test_a_descriptor_is_read_again_after_an_interrupt_anywhere_in_lending_it(loop, pipe, is_lent, number):
    reader, writer = pipe
    read = threading.Event()
    loop.watch(reader, lambda _events: (os.read(reader, 1), read.set()))
    if not is_lent:
        loop.set_lent(reader, True)
    with contextlib.suppress(Interrupt):
        interrupt(lambda: loop.set_lent(reader, is_lent), number)
    loop.set_lent(reader, False)  # as the timer of the loan does
    os.write(writer, b"a")
    assert read.wait(SOON)
    loop.unwatch(reader)


def test_an_error_is_reported_and_the_loop_continues(loop, errors):
    done = threading.Event()
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(done.set)
    assert done.wait(SOON)
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_a_descriptor_whose_callback_raises_twice_is_removed(loop, errors, pipe):
    reader, writer = pipe
    loop.watch(reader, lambda _events: 1 / 0)
    os.write(writer, b"a")
    done = threading.Event()
    loop.call_at(time.monotonic() + 0.05, done.set)
    assert done.wait(SOON)
    assert len(errors) == 2


def test_a_descriptor_whose_callback_raises_now_and_then_is_kept(loop, errors, pipe):
    reader, writer = pipe
    calls = queue.SimpleQueue()

    def read(_events):
        calls.put(os.read(reader, 1))
        if calls.qsize() % 2:
            raise ZeroDivisionError

    loop.watch(reader, read)
    for count in range(1, 7):
        os.write(writer, b"a")
        wait_until(lambda: calls.qsize() == count)  # noqa: B023
    wait_until(lambda: len(errors) == 3)
    loop.unwatch(reader)


def test_a_function_that_waits_for_one_behind_it_gets_another_thread(loop):
    pool, gate, done = ThreadPool("pool", runs_user_code=True, loop=loop), threading.Event(), threading.Event()
    pool.submit(lambda: (gate.wait(SOON), done.set()))
    pool.submit(gate.set)
    assert done.wait(SOON)
    pool.stop()
    pool.join(SOON)


def test_a_pool_runs_all_functions_before_it_ends():
    pool, seen = ThreadPool("pool", runs_user_code=True), []
    for i in range(100):
        pool.submit(lambda i=i: seen.append(i))
    pool.stop()
    pool.join(SOON)
    assert seen == list(range(100))


def test_a_pool_adds_threads_for_as_long_as_functions_block(loop):
    pool, gates = ThreadPool("pool", runs_user_code=True, loop=loop), [threading.Event() for _ in range(4)]
    done = threading.Event()
    for gate in gates:  # submitted at once, and each blocks
        pool.submit(lambda gate=gate: gate.wait(SOON))
    pool.submit(done.set)
    assert done.wait(SOON)
    for gate in gates:
        gate.set()
    pool.stop()
    pool.join(SOON)


def test_an_interrupted_submit_does_not_keep_a_pool_from_adding_threads(loop, monkeypatch):
    pool, gate, done = ThreadPool("pool", runs_user_code=True, loop=loop), threading.Event(), threading.Event()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for name in ("call_soon", "call_at"):
            patch.setattr(loop, name, lambda *_: signal.raise_signal(signal.SIGINT))
        pool.submit(lambda: None)
    pool.submit(lambda: gate.wait(SOON))
    pool.submit(done.set)
    assert done.wait(SOON / 2)
    gate.set()
    pool.stop()
    pool.join(SOON)


def test_a_function_that_is_submitted_while_its_pool_looks_for_stuck_ones_is_not_overlooked(loop):
    pool, gate, done = ThreadPool("pool", runs_user_code=True, loop=loop), threading.Event(), threading.Event()
    functions, looks = pool._functions, []

    class Functions:
        """The queue, into which functions come just after the first look that finds it empty."""

        get, put = functions.get, functions.put

        def empty(self):
            is_empty = functions.empty()
            if is_empty and not looks:
                looks.append(None)
                pool.submit(lambda: gate.wait(SOON))
                pool.submit(done.set)
            return is_empty

    pool._functions = Functions()
    pool.submit(lambda: None)
    assert done.wait(SOON / 2)
    gate.set()
    pool.stop()
    pool.join(SOON)


def test_a_function_that_is_submitted_after_the_end_of_a_pool_runs():
    pool, done = ThreadPool("pool", runs_user_code=True), threading.Event()
    pool.stop()
    pool.join(SOON)
    pool.submit(done.set)
    assert done.wait(SOON)
    pool.join(SOON)


def test_a_pool_can_be_joined_while_it_adds_a_thread(monkeypatch):
    pool = ThreadPool("pool", runs_user_code=True)
    pool.stop()
    pool.join(SOON)
    done, start = threading.Event(), threading.Thread.start

    def join_and_start(thread):
        pool.join(SOON)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", join_and_start)
    pool.submit(done.set)
    assert done.wait(SOON)
    pool.join(SOON)


def test_a_doorbell_is_closed_although_a_poller_of_it_is_being_closed():
    class ClosingPoller:
        def add_bell(self, bell):
            pass

        def remove(self, fd):
            raise OSError(errno.EBADF, "another thread has just closed the poller")

    poller, bell = ClosingPoller(), Doorbell()
    bell.register(poller)
    bell.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bell.fileno())


def test_a_pool_keeps_no_thread_that_has_ended():
    pool, ended = ThreadPool("pool", runs_user_code=True), weakref.WeakSet()
    pool.stop()
    pool.join(SOON)
    for _ in range(5):
        pool.submit(lambda: ended.add(threading.current_thread()))
        while pool.count_waiting() > 1 or any(thread.is_alive() for thread in ended):
            time.sleep(0.001)
    gc.collect()
    assert len(ended) <= 1
