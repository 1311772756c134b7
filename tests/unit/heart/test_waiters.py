"""Threads that wait for results."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from fakes import RAISE, SOON, RowError, wait_until

import envactors as ea
from envactors.mailbox.control_page import RING_AT


def waiting(stage, function, *args):
    """Call a function in a thread; return the thread and its results once it waits."""
    results, count = [], len(stage.table.waiters.sleepers)

    def run():
        try:
            results.append(function(*args))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(stage.table.waiters.sleepers) > count or results)
    return thread, results


def test_nobody_waits_for_what_is_there(stages):
    waiters = stages(1).table.waiters
    assert waiters.wait(lambda: 0, None)
    assert not waiters.sleepers


def test_a_deadline_ends_the_wait(stages):
    waiters = stages(1).table.waiters
    began = time.monotonic()
    assert not waiters.wait(lambda: 1, began + 0.02)
    assert not waiters.sleepers


def test_an_exception_in_the_wait_leaves_no_waiter(stages):
    waiters = stages(1).table.waiters

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        waiters.wait(fail, None)
    assert not waiters.sleepers


def test_a_ring_has_threads_look_again(stages):
    stage = stages(1)
    missing = [1]
    thread, results = waiting(stage, stage.table.waiters.wait, lambda: missing[0], None)
    missing[0] = 0
    stage.table.waiters.ring()
    thread.join(SOON)
    assert results == [True]


def test_a_thread_may_begin_to_wait_while_another_one_publishes_its_number(stages):
    waiters = stages(1).table.waiters

    class Joining(int):
        def __bool__(self):
            waiters.sleepers[object()] = 1
            return True

    waiters.sleepers[object()] = Joining(2)
    waiters._publish_ring_at()  # another thread begins to wait in the midst of this
    waiters.sleepers.clear()


def test_two_threads_wait_for_different_envs(stages):
    stage = stages(2)
    stage.start([1], [0])
    stage.start([2], [1])
    first, of_first = waiting(stage, stage.access.gather, [0], SOON, "step")
    second, of_second = waiting(stage, stage.access.gather, [1], SOON, "step")
    stage.worker(1).play()
    second.join(SOON)
    assert of_second[0].rewards.tolist() == [2.0]
    assert not of_first
    stage.worker(0).play()
    first.join(SOON)
    assert of_first[0].rewards.tolist() == [1.0]


def test_waiters_watch_the_next_process(stages):
    stage = stages(1, on_failure="replay")
    stage.start([1])
    thread, results = waiting(stage, stage.access.gather, None, SOON, "step")
    stage.worker().begin_row(0)
    stage.crash()
    while not results and stage.worker() is not None:
        stage.worker().play()
        stage.settle()
    thread.join(SOON)
    assert results[0].obs.tolist() == [[1, 1, 0]]


def test_a_thread_whose_results_another_has_taken_gets_an_error(stages):
    stage = stages(1)
    stage.envs.send([1])
    thread, results = waiting(stage, stage.envs.recv)
    stage.worker().run_row(0)
    wait_until(lambda: results or stage.table.rows.is_complete(0))
    try:
        mine = stage.envs.recv(timeout=SOON)
    except ea.NothingPendingError as error:
        mine = error
    stage.worker().end_rows()
    thread.join(SOON)
    kinds = sorted(type(result).__name__ for result in (mine, results[0]))
    assert kinds == ["Batch", "NothingPendingError"]


def test_closing_wakes_threads_that_wait(stages):
    stage = stages(1)
    stage.start([1])
    thread, results = waiting(stage, stage.access.gather, None, None, "step")
    stage.envs.actors[0].kill()
    thread.join(SOON)
    assert isinstance(results[0], ea.VectorStepError)


def test_workers_ring_for_the_least_that_any_thread_wants(stages):
    stage = stages(3)
    stage.envs.send([1, 2, 3])
    first, of_first = waiting(stage, stage.envs.recv, 3)
    wait_until(lambda: stage.worker(0).page.counters[RING_AT] == 3)
    second, of_second = waiting(stage, stage.access.gather, [0], SOON, "step")
    wait_until(lambda: stage.worker(0).page.counters[RING_AT] == 1)
    stage.worker(0).run_row(0)
    second.join(SOON)
    assert of_second[0].env_ids.tolist() == [0]
    stage.worker(1).play()
    stage.worker(2).play()
    first.join(SOON)
    assert sorted(of_first[0].env_ids.tolist()) == [1, 2]
    assert stage.worker(0).page.counters[RING_AT] == 0


def test_recv_of_a_step_raises_a_failure_although_the_next_env_of_its_worker_still_runs(stages):
    stage = stages(2, envs_per_actor=2)
    stage.start([RAISE, 1])
    thread, results = waiting(stage, stage.envs.recv)
    worker = stage.worker()
    wait_until(lambda: worker.page.counters[RING_AT])
    worker.run_row(0)
    thread.join(SOON)
    assert isinstance(results[0].failures[0], RowError)
    worker.run_row(1)
    worker.end_rows()
    assert stage.envs.recv(timeout=SOON).env_ids.tolist() == [1]


def test_the_bell_stays_open_while_a_thread_waits(stages):
    stage = stages(1)
    waiters = stage.table.waiters
    missing = [1]
    thread, results = waiting(stage, waiters.wait, lambda: missing[0], None)
    waiters.close()
    assert not waiters._bell._closed
    missing[0] = 0
    waiters.ring()
    thread.join(SOON)
    assert results == [True]
    assert waiters._bell._closed


def test_results_that_another_thread_is_taking_are_not_taken_twice(stages, monkeypatch):
    """The other thread has begun to make the envs idle, and has not finished, when this one looks at them."""
    stage = stages(2)
    stage.start([1, 1])
    stage.run()
    engine, table, results = stage.engine, stage.table, []
    set_idle, steps = table.set_idle, engine.counts()[0]

    def run():
        try:
            results.append(engine._try_to_deliver(engine.all_envs, "step"))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)

    def set_idle_later(*args, **options):
        monkeypatch.undo()
        thread.start()
        time.sleep(0.05)
        set_idle(*args, **options)

    monkeypatch.setattr(table, "set_idle", set_idle_later)
    assert engine._try_to_deliver(engine.all_envs, "step") is not None
    thread.join(SOON)
    assert isinstance(results[0], ea.NothingPendingError)
    assert engine.counts()[0] == [count + 1 for count in steps]


def test_a_thread_that_publishes_late_does_not_hide_what_another_one_wants(stages, monkeypatch):
    stage = stages(4)
    waiters, page = stage.table.waiters, stage.worker(0).page
    late, early = object(), object()
    waiters.sleepers[late] = 4
    ring_at = page.ring_at

    def publish_between(wanted):
        monkeypatch.undo()
        waiters.sleepers[early] = 1
        waiters._publish_ring_at()
        ring_at(wanted)

    monkeypatch.setattr(page, "ring_at", publish_between)
    waiters._publish_ring_at()
    assert [stage.worker(position).page.counters[RING_AT] for position in range(4)] == [1] * 4
    waiters.sleepers.clear()


def test_an_interrupt_before_the_first_count_leaves_no_waiter(stages):
    """The tracer raises at the line after which the thread counts as one that sleeps."""
    waiters = stages(1).table.waiters

    def trace(frame, event, _):
        if frame.f_code is not type(waiters).wait.__code__:
            return None
        if event == "line" and waiters.sleepers:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            waiters.wait(lambda: 1, None)
    finally:
        sys.settrace(before)
    assert not waiters.sleepers
