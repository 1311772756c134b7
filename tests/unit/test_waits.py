"""Threads that wait for results: each wakes once its result is there, whatever the others do meanwhile."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time

import pytest
from helpers import SOON
from interleaving import Lines, StoppingThread, when_this_thread_sleeps

import envactors as ea
from envactors.integrations.access import VectorAccess

# Where threads fall asleep and wake each other.
WAITING = ("actor/future.py", "actor/latch.py", "actor/loan.py", "vector/waiting.py")
# Where a thread borrows the channel of an actor and returns it.
READING = ("actor/actor.py", "actor/future.py", "actor/loan.py")
# Where they read results and deliver them.
DELIVERING = ("vector/engine.py", "vector/waiting.py", "vector/row_reader.py")
GATES = [threading.Event() for _ in range(3)]
BACKEND = ea.ThreadBackend()


class Gated:
    """An env whose calls and steps return once a gate is open."""

    def __init__(self, number=0):
        self.number = number

    def reset(self, **_kwargs):
        return 0, {}

    def step(self, action):
        self.wait(action)
        return 0, 0.0, False, False, {}

    def wait(self, number):
        assert GATES[number].wait(SOON)
        return number

    def echo(self, value):
        return value


@pytest.fixture(autouse=True)
def closed_gates():
    for gate in GATES:
        gate.clear()
    yield
    for gate in GATES:
        gate.set()


def result_of(future):
    """Something to wait for it that ends some time even if nothing wakes it."""
    return lambda: future.result(2 * SOON)


def outcome_of(function):
    """What it returns, or the type of its error: the error itself would keep the vector."""
    try:
        return function()
    except ea.EnvActorsError as error:
        return type(error)


def test_a_thread_that_wakes_several_may_stop_at_any_line():
    """The threads that it has woken leave the queue in which it looks for the others."""
    lines = Lines()
    for line in lines:
        opened = threading.Event()
        with ea.spawn(Gated, backend=BACKEND) as actor:
            future = actor.wait(0)
            reader = StoppingThread(result_of(future), line, WAITING, armed=opened).start()
            reader.wait_asleep()
            others = [StoppingThread(result_of(future)).start() for _ in range(3)]
            for thread in others:
                thread.wait_asleep()
            opened.set()
            GATES[0].set()
            lines.has_stopped = reader.stops()
            for thread in others if lines.has_stopped else ():
                thread.wait_asleep()
            reader.go_on()
            threads = [reader, *others]
            assert all(thread.ends_within(SOON) for thread in threads), f"stopped after {line} lines"
            assert [thread.result for thread in threads] == [0] * 4
        GATES[0].clear()
    assert lines.count > 5


def test_a_thread_may_stop_at_any_line_on_its_way_to_sleep():
    """Two results come one after the other, the first one while the thread is about to wait for both."""
    lines = Lines()
    for line in lines:
        with (
            ea.spawn(Gated, backend=BACKEND) as other,
            ea.VectorEnv([Gated] * 2, backend=BACKEND) as envs,
        ):
            envs.reset()
            reader = StoppingThread(result_of(other.wait(2))).start()
            reader.wait_asleep()  # it reads replies, so that the other thread only waits
            envs.send([0, 1])
            waiting = StoppingThread(lambda envs=envs: envs.recv(timeout=2 * SOON), line, WAITING).start()
            lines.has_stopped = waiting.stops(or_sleeps=True)
            for env_id in (0, 1):
                handled = threading.Event()
                envs[env_id].echo(0).add_done_callback(lambda _future, handled=handled: handled.set())
                GATES[env_id].set()
                # It comes after the step's result; but where the thread stands it may hold what the reader needs.
                handled.wait(0.1 if env_id == 0 else SOON)
                waiting.go_on()
                assert handled.wait(SOON)
                waiting.wait_asleep()
            assert waiting.ends_within(SOON), f"stopped after {line} lines"
            assert waiting.result.env_ids.tolist() == [0, 1]
            GATES[2].set()
            assert reader.ends_within(SOON)
        for gate in GATES:
            gate.clear()
    assert lines.count > 10


def test_the_loop_reads_replies_again_wherever_a_thread_stops_that_has_read_the_one_before():
    lines = Lines()
    with ea.spawn(Gated, backend=BACKEND) as actor:
        for line in lines:
            reader = StoppingThread(lambda: actor.echo(0).result(SOON), line, READING).start()
            lines.has_stopped = reader.stops()
            told = threading.Event()
            submitter = StoppingThread(lambda told=told: actor.echo(1).add_done_callback(lambda _: told.set())).start()
            submitter.wait_asleep()
            reader.go_on()
            assert reader.ends_within(SOON)
            assert told.wait(SOON), f"stopped after {line} lines"
    assert lines.count > 10


@pytest.fixture
def handler():
    """Returns a function that sets what SIGUSR1 does in this thread."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda act: signal.signal(signal.SIGUSR1, lambda *_: act())
    signal.signal(signal.SIGUSR1, before)


def test_a_wait_in_a_signal_handler_leaves_no_other_wait_asleep(handler):
    """What the handler reads while it waits may be what the wait waits for that it has interrupted."""
    with ea.spawn(Gated, backend=BACKEND) as first, ea.spawn(Gated, backend=BACKEND) as second:

        def wait_for_another():
            GATES[0].set()
            other = second.echo(1)
            time.sleep(0.05)  # both are there to be read
            assert other.result(SOON) == 1

        handler(wait_for_another)
        future = first.wait(0)
        thread = when_this_thread_sleeps(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        began = time.monotonic()
        assert future.result(2 * SOON) == 0
        assert time.monotonic() - began < SOON
        assert thread.ends_within(SOON)


def test_a_signal_handler_may_cancel_the_future_that_its_thread_waits_for(handler):
    with ea.spawn(Gated, backend=BACKEND) as actor:
        actor.wait(0)
        queued = actor.echo(1)
        handler(queued.cancel)
        thread = when_this_thread_sleeps(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        began = time.monotonic()
        with pytest.raises(concurrent.futures.CancelledError):
            queued.result(2 * SOON)
        assert time.monotonic() - began < SOON
        assert thread.ends_within(SOON)
        GATES[0].set()


def test_of_threads_that_wait_for_one_step_one_gets_it_and_none_sleeps_on():
    with ea.VectorEnv([Gated] * 2, backend=BACKEND) as envs:
        envs.reset()
        for gate in GATES:
            gate.set()
        envs.step([0, 0])
        for gate in GATES:
            gate.clear()
        access = VectorAccess(envs)
        access.start_step([0, 0])
        threads = [StoppingThread(lambda: outcome_of(access.finish_step)).start() for _ in range(3)]
        for thread in threads:
            thread.wait_asleep()
        GATES[0].set()
        assert all(thread.ends_within(SOON) for thread in threads)
        assert [thread.result for thread in threads].count(ea.NothingPendingError) == 2


@pytest.mark.parametrize("in_order", [True, False], ids=["as a step", "as they complete"])
def test_a_result_is_delivered_once_wherever_the_thread_stops_that_delivers_it(in_order):
    GATES[0].set()
    lines = Lines()
    with ea.VectorEnv([Gated] * 2, backend=BACKEND) as envs:
        access = VectorAccess(envs)
        start, take = (access.start_step, access.finish_step) if in_order else (envs.send, envs.recv)
        envs.reset()
        for steps, line in enumerate(lines, start=1):
            start([0, 0])
            first = StoppingThread(lambda: outcome_of(take), line, DELIVERING).start()
            lines.has_stopped = first.stops()
            second = StoppingThread(lambda: outcome_of(take)).start()
            second.wait_asleep()
            first.go_on()
            assert first.ends_within(SOON)
            assert second.ends_within(SOON)
            outcomes = [first.result, second.result]
            assert outcomes.count(ea.NothingPendingError) == 1, f"stopped after {line} lines: {outcomes}"
            assert envs.stats().steps == [steps] * 2
    assert lines.count > 20


def test_a_wait_that_ends_in_time_leaves_the_rings_that_another_thread_waits_for():
    with ea.VectorEnv([Gated] * 2, backend=BACKEND) as envs:
        envs.reset()
        envs.send([0, 0])
        receiver = StoppingThread(envs.recv).start()
        receiver.wait_asleep()
        assert outcome_of(lambda: VectorAccess(envs).finish_step(timeout=0.01)) is ea.VectorTimeoutError
        receiver.wait_asleep()
        GATES[0].set()
        assert receiver.ends_within(SOON)
        assert sorted(receiver.result.env_ids.tolist()) == [0, 1]


def test_a_thread_that_waits_for_all_results_does_not_keep_another_from_the_first():
    with ea.VectorEnv([Gated] * 3, backend=BACKEND) as envs:
        envs.reset()
        envs.send([0, 1, 1])
        first = StoppingThread(lambda: envs.recv(min_envs=1, max_envs=1)).start()
        first.wait_asleep()
        rest = StoppingThread(envs.recv).start()
        rest.wait_asleep()
        GATES[0].set()
        assert first.ends_within(SOON)
        assert first.result.env_ids.tolist() == [0]
        GATES[1].set()
        assert rest.ends_within(SOON)
        assert sorted(rest.result.env_ids.tolist()) == [1, 2]


@pytest.mark.parametrize("ask", [lambda envs: envs.submit([1], [1])[0], lambda envs: envs[1].step(1)])
def test_a_canceled_request_that_waits_for_a_permit_holds_up_no_call(ask):
    with ea.VectorEnv([Gated] * 2, backend=BACKEND, max_running=1) as envs:
        envs.reset()
        (running,) = envs.submit([0], [0])
        waiting, call = ask(envs), envs[1].echo(5)
        assert waiting.cancel()
        assert call.result(SOON) == 5
        GATES[0].set()
        running.result(SOON)
