"""Executors: the behavior of `concurrent.futures`, and functions that hang, crash, exit, and start processes."""

from __future__ import annotations

import asyncio
import concurrent.futures as cf
import gc
import itertools
import pickle
import signal
import sys
import textwrap
import threading
import time
import types
import weakref

import cloudpickle
import functions
import numpy as np
import psutil
import pytest
from helpers import FORK_SERVER, SOON, is_gone, promised, wait_for_path, wait_until
from interrupting import interrupt

import envactors as ea
from envactors.pools.executor import ExecutorStats

BACKENDS = [FORK_SERVER, "thread", "inline"]


def executor(workers=2, **options):
    return ea.Executor(workers, **{"backend": FORK_SERVER, **options})


@pytest.fixture
def pool():
    with executor() as made:
        yield made


# As concurrent.futures -------------------------------------------------------------------------------------------


def test_it_is_an_executor_whose_futures_are_futures(pool):
    future = pool.submit(functions.identity, 1)
    assert isinstance(pool, cf.Executor)
    assert isinstance(future, cf.Future)
    assert future.result(SOON) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_submit_passes_arguments_and_keywords(backend):
    with executor(backend=backend) as pool:
        assert pool.submit(functions.keywords, 1, fn=2, self=3, method=4).result(SOON) == (
            (1,),
            {"fn": 2, "self": 3, "method": 4},
        )


def test_exceptions_keep_their_type_and_arguments(pool):
    with pytest.raises(ZeroDivisionError) as caught:
        pool.submit(functions.divide, 1, 0).result(SOON)
    assert "return one // other" in str(caught.value.__cause__)
    with pytest.raises(functions.FalseError, match="it is false"):
        pool.submit(functions.fail_falsely).result(SOON)
    with pytest.raises(SystemExit) as left:
        pool.submit(functions.exit_politely).result(SOON)
    assert left.value.code == 4


@pytest.mark.parametrize("chunksize", [1, 3, 100, 10**30])
def test_map_returns_results_in_order(pool, chunksize):
    assert list(pool.map(functions.add, range(10), range(10, 30), chunksize=chunksize)) == [*range(10, 30, 2)]
    assert list(pool.map(functions.identity, [])) == []


def test_map_raises_the_exception_of_a_call_in_its_place(pool):
    results = pool.map(functions.divide, [1, 1, 1], [1, 0, 1])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_map_stops_waiting_at_its_timeout(pool, tmp_path):
    results = pool.map(functions.wait_for, [str(tmp_path / "gate")], timeout=0.05)
    with pytest.raises(cf.TimeoutError):
        next(results)
    (tmp_path / "gate").touch()


def test_map_with_a_timeout_that_is_over_returns_only_what_is_done():
    """As the executors of `concurrent.futures` do."""
    with executor() as pool, cf.ThreadPoolExecutor() as expected:
        for each in (pool, expected):
            with pytest.raises(cf.TimeoutError):
                list(each.map(time.sleep, [0.5], timeout=-1))


def test_map_cancels_the_calls_that_wait_once_it_is_closed(tmp_path):
    with executor(1) as pool:
        gate = str(tmp_path / "gate")
        running = pool.submit(functions.wait_for, gate)
        results = pool.map(functions.append_line, [str(tmp_path / "lines")] * 3, range(3), timeout=0)
        with pytest.raises(cf.TimeoutError):
            next(results)
        (tmp_path / "gate").touch()
        running.result(SOON)
    assert not (tmp_path / "lines").exists()


def test_refusals_say_what_was_given():
    for options, error, text in [
        ({"max_workers": 0}, ValueError, r"max_workers=0.*int >= 1"),
        ({"max_workers": -1}, ValueError, r"max_workers=-1"),
        ({"max_workers": True}, ValueError, r"max_workers=True"),
        ({"max_pending": 0}, ValueError, r"max_pending=0"),
        ({"deadline": -1}, ValueError, r"deadline"),
        ({"retries": -1}, ValueError, r"retries"),
        ({"initializer": 3}, TypeError, r"initializer=3"),
        ({"initializer": print, "initargs": 3}, TypeError, r"initargs is 3"),
        ({"name": 3}, TypeError, r"name is 3"),
        ({"recycle": ea.RecyclePolicy(max_steps=3)}, ValueError, r"max_calls"),
        ({"initializer": print, "initargs": (threading.Lock(),)}, ea.SerializationError, r"initializer"),
    ]:
        with pytest.raises(error, match=text):
            ea.Executor(**options)
    with executor() as pool:
        with pytest.raises(TypeError, match=r"cannot submit 3"):
            pool.submit(3)
        with pytest.raises(ValueError, match="chunksize"):
            pool.map(functions.identity, [1], chunksize=0)
        with pytest.raises(ValueError, match="timeout"):
            pool.map(functions.identity, [1], timeout="1")
        with pytest.raises(ValueError, match="deadline"):
            pool.options(deadline=-1)
        assert pool.stats().submitted == 0


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_a_warning_says_where_deadlines_of_calls_are_not_enforced(backend):
    with executor(backend=backend) as pool:
        with pytest.warns(UserWarning, match="where deadlines are not enforced") as caught:
            pool.options(deadline=1.0)
        assert caught[0].filename == __file__


def test_it_can_be_neither_pickled_nor_copied(pool):
    with pytest.raises(TypeError, match="Executor cannot be pickled"):
        pickle.dumps(pool)


def test_wait_and_as_completed_work(pool, tmp_path):
    slow = pool.submit(functions.wait_for, str(tmp_path / "gate"))
    quick = [pool.submit(functions.identity, number) for number in range(5)]
    done, running = cf.wait([slow, *quick], timeout=0)
    assert slow in running
    assert next(cf.as_completed([slow, *quick])) in quick
    done, running = cf.wait([slow, *quick], return_when=cf.FIRST_COMPLETED, timeout=SOON)
    assert slow in running
    failed = pool.submit(functions.fail)
    done, running = cf.wait([slow, failed], return_when=cf.FIRST_EXCEPTION, timeout=SOON)
    assert done == {failed}
    with pytest.raises(cf.TimeoutError):
        list(cf.as_completed([slow], timeout=0))
    (tmp_path / "gate").touch()
    assert not cf.wait([slow, failed, *quick], timeout=SOON).not_done


def test_callbacks_run_after_results_and_failures(pool):
    seen = []
    futures = [pool.submit(functions.identity, 1), pool.submit(functions.fail), pool.submit(functions.exit_at_once)]
    for future in futures:
        future.add_done_callback(seen.append)
    wait_until(lambda: len(seen) == 3)
    assert set(seen) == set(futures)


def test_a_callback_that_exits_keeps_no_other_one_from_running(pool, tmp_path):
    future = pool.submit(functions.wait_for, tmp_path / "gate")
    called = threading.Event()
    future.add_done_callback(lambda _: sys.exit())
    future.add_done_callback(lambda _: called.set())
    (tmp_path / "gate").touch()
    assert called.wait(SOON)


def test_results_are_freed_once_nobody_holds_them(pool):
    class Argument:
        pass

    argument = Argument()
    reference = weakref.ref(argument)
    pool.submit(functions.keywords, 1).result(SOON)
    future = pool.submit(id, np.zeros(3))
    future.result(SOON)
    freed = weakref.ref(future)
    del argument, future
    wait_until(lambda: gc.collect() is not None and freed() is None)
    assert reference() is None


@pytest.mark.parametrize("chunksize", [1, 3])
def test_map_keeps_no_result_that_it_has_returned(pool, chunksize):
    for array in pool.map(np.zeros, range(6), chunksize=chunksize):
        reference = weakref.ref(array)
        del array
        wait_until(lambda reference=reference: gc.collect() is not None and reference() is None)


# Shutting down ---------------------------------------------------------------------------------------------------


def test_after_shutdown_it_refuses_functions():
    pool = executor()
    pool.shutdown()
    pool.shutdown()
    with pytest.raises(RuntimeError, match="the executor was shut down"):
        pool.submit(functions.identity)
    with pytest.raises(RuntimeError, match="the executor was shut down"):
        pool.options(deadline=1).map(functions.identity, [1])


def test_shutdown_lets_all_calls_end(tmp_path):
    pool = executor()
    futures = [pool.submit(functions.append_line, str(tmp_path / "lines"), number) for number in range(50)]
    pool.shutdown()
    assert [future.result(0) for future in futures] == [*range(50)]
    assert len((tmp_path / "lines").read_text().split()) == 50


def test_shutdown_can_cancel_the_calls_that_wait(tmp_path):
    pool = executor(1)
    running = pool.submit(functions.announce, str(tmp_path / "started"), str(tmp_path / "gate"))
    waiting = [pool.submit(functions.identity) for _ in range(20)]
    wait_for_path(tmp_path / "started")
    pool.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in waiting)
    (tmp_path / "gate").touch()
    assert running.result(SOON)
    pool.shutdown()


@pytest.mark.parametrize("kind", [ValueError, SystemExit, GeneratorExit])
def test_leaving_the_block_lets_all_calls_end(kind):
    with pytest.raises(kind), executor(1) as pool:
        futures = [pool.submit(functions.identity, number) for number in range(3)]
        raise kind
    assert [future.result(SOON) for future in futures] == [0, 1, 2]


def test_shutdown_without_waiting_lets_calls_end_and_then_ends_the_workers(tmp_path):
    pool = executor(1)
    running = pool.submit(functions.announce, str(tmp_path / "started"), str(tmp_path / "gate"))
    waiting = pool.submit(functions.pid)
    wait_for_path(tmp_path / "started")
    pool.shutdown(wait=False)
    (tmp_path / "gate").touch()
    worker = waiting.result(SOON)
    assert running.result(SOON) == worker
    wait_until(lambda: is_gone(worker))


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_a_call_that_waits_for_its_own_end_gets_an_error(backend, monkeypatch):
    with executor(backend=backend) as pool:
        monkeypatch.setattr(functions, "state", pool)
        with pytest.raises(RuntimeError, match="waits for a request of the same"):
            pool.submit(functions.shut_down_state).result(SOON)
    assert pool.stats() == ExecutorStats(1, 0, {"exception": 1}, waiting=0, running=0, restarts=0)


def test_in_process_calls_that_make_more_calls_than_there_are_workers_get_an_error(monkeypatch):
    with executor(2, backend="inline") as pool:
        monkeypatch.setattr(functions, "state", pool)
        assert pool.submit(functions.submit_to_state, 1).result(SOON) == 0
        with pytest.raises(RuntimeError, match="waits for a request of the same"):
            pool.submit(functions.submit_to_state, 2).result(SOON)
        assert pool.stats() == ExecutorStats(5, 2, {"exception": 3}, waiting=0, running=0, restarts=0)


def test_an_executor_that_nobody_holds_ends_its_workers():
    pool = executor(1)
    worker = pool.submit(functions.pid).result(SOON)
    del pool
    gc.collect()
    wait_until(lambda: is_gone(worker))


def test_shutdown_ends_while_a_worker_crashes():
    pool = executor()
    crashed = pool.submit(functions.segfault)
    pool.shutdown()
    assert isinstance(crashed.exception(0), ea.ActorDiedError)


def test_exit_handlers_of_functions_run(tmp_path):
    with executor(1) as pool:
        pool.submit(functions.write_at_exit, str(tmp_path / "written")).result(SOON)
    assert (tmp_path / "written").exists()


def test_the_program_ends_after_its_calls(run_warm):
    done = run_warm(
        """
        import time, envactors as ea
        def work():
            time.sleep(0.3)
            print("apple", flush=True)
        pool = ea.Executor(1)
        pool.submit(work)
        pool.submit(work)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("apple") == 2
    assert not done.stderr


def test_the_program_ends_after_the_calls_of_an_executor_that_was_shut_down(run_warm):
    done = run_warm(
        """
        import time, envactors as ea
        def work():
            time.sleep(3.5)
            print("apple", flush=True)
        pool = ea.Executor(1)
        pool.submit(work)
        pool.submit(print, "pear", flush=True)
        pool.shutdown(wait=False)
        del pool
        """
    )
    assert done.returncode == 0, done.stderr
    assert "apple" in done.stdout
    assert "pear" in done.stdout


def test_a_forked_child_leaves_the_executor_alone(run_warm):
    done = run_warm(
        """
        import os, sys, time, envactors as ea
        pool = ea.Executor(1)
        running = pool.submit(time.sleep, 0.5)
        child = os.fork()
        if child == 0:
            try:
                pool.shutdown()
            except ea.ActorClosedError:
                sys.exit(7)
            sys.exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        running.result()
        """
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.parametrize("place", ["submit", "result", "with"])
def test_ctrl_c_ends_the_program(program_server, capfd, place):
    code = f"""
        import itertools, os, signal, sys, threading, time, envactors as ea
        def work(number):
            if number == 2:
                print("ready", flush=True)
            if number > 2:
                time.sleep(1000)
        def main():
            pool = ea.Executor(2, max_pending=4)
            if {place!r} == "submit":
                for number in itertools.count():
                    pool.submit(work, number)
            elif {place!r} == "result":
                [pool.submit(work, number) for number in range(5)][-1].result()
            else:
                with pool:
                    [pool.submit(work, number) for number in range(5)][-1].result()
        main()
    """
    with program_server.start(textwrap.dedent(code)) as program:
        assert "ready" in program.stdout.readline()
        began = time.monotonic()
        program.send_signal(signal.SIGINT)
        program.wait(SOON)
        assert time.monotonic() - began < promised(5)
    errors = capfd.readouterr().err
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")


# Functions that end their workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "text"), [(functions.segfault, "SIGSEGV"), (functions.exit_at_once, "exit code 3")]
)
def test_a_function_that_ends_its_worker_fails_its_own_future_and_no_other(pool, function, text):
    futures = [
        pool.submit(function if number == 7 else functions.identity, *[()] * (number != 7)) for number in range(20)
    ]
    for number, future in enumerate(futures):
        if number != 7:
            assert future.result(SOON) == ()
    with pytest.raises(ea.ActorDiedError, match=rf"\(pid \d+, incarnation \d+\) .*{text}.* in {function.__name__}"):
        futures[7].result(SOON)
    assert pool.submit(functions.identity, 1).result(SOON) == 1
    stats = pool.stats()
    assert (stats.submitted, stats.completed, stats.failed, stats.waiting, stats.running) == (21, 20, {"died": 1}, 0, 0)
    wait_until(lambda: pool.stats().restarts == 1)


@pytest.mark.parametrize("function", [functions.hang_in_c, functions.sleep_in_c])
def test_a_function_that_hangs_is_ended_at_its_deadline(pool, function):
    began = time.monotonic()
    hung = pool.options(deadline=0.5).submit(function)
    healthy = [pool.submit(functions.identity, number) for number in range(10)]
    assert [future.result(SOON) for future in healthy] == [*range(10)]
    with pytest.raises(ea.ActorTimeoutError, match=f"deadline of 0.5 s in {function.__name__}"):
        hung.result(SOON)
    assert 0.5 <= time.monotonic() - began < promised(1.5)
    assert pool.stats().failed == {"timeout": 1}


def test_the_deadline_of_the_executor_counts_from_when_a_worker_could_run_the_call(tmp_path):
    with executor(1, deadline=30) as pool:
        first = pool.submit(functions.announce, str(tmp_path / "started"), str(tmp_path / "gate"))
        second = pool.options(deadline=0.5).submit(functions.sleep_in_c)
        wait_for_path(tmp_path / "started")
        time.sleep(0.7)
        assert not second.done()
        (tmp_path / "gate").touch()
        first.result(SOON)
        with pytest.raises(ea.ActorTimeoutError):
            second.result(SOON)


@pytest.mark.parametrize("steps", [(), ("session",), ("session", "fork"), ("session", "fork", "env")])
def test_nothing_is_left_of_a_call_whose_grandchild_ignores_sigterm(pool, tmp_path, steps):
    path = tmp_path / "grandchild"
    bystander = pool.submit(functions.start_stubborn_child, str(tmp_path / "bystander"), steps)
    hung = pool.submit(functions.start_stubborn_child, str(path), steps)
    wait_for_path(path)
    wait_for_path(tmp_path / "bystander")
    grandchild, other = (int(name.read_text()) for name in (path, tmp_path / "bystander"))
    left = psutil.Process(grandchild).parents()[0].pid if "fork" not in steps else grandchild
    assert hung.abort()
    with pytest.raises(ea.ActorDiedError) as caught:
        hung.result(SOON)
    assert caught.value.aborted
    began = time.monotonic()
    wait_until(lambda: is_gone(grandchild) and is_gone(left))
    assert time.monotonic() - began < promised(5)
    assert not is_gone(other)
    bystander.abort()
    wait_until(lambda: is_gone(other))


def test_retries_cover_crashes_and_deadlines_and_no_exceptions(pool, tmp_path):
    path = tmp_path / "lines"

    def crash_first():
        functions.append_line(path, "x")
        if len(path.read_text().split()) == 1:
            functions.exit_at_once()
        return "second"

    def fail_always():
        functions.append_line(path, "x")
        raise KeyError

    with executor(1, retries=1) as retrying:
        assert retrying.options(deadline=30).submit(crash_first).result(SOON) == "second"
    path.unlink()
    assert pool.options(retries=1).submit(crash_first).result(SOON) == "second"
    path.unlink()
    with pytest.raises(KeyError):
        pool.options(retries=3).submit(fail_always).result(SOON)
    assert path.read_text().split() == ["x"]
    path.unlink()
    with pytest.raises(ea.ActorDiedError):
        pool.submit(crash_first).result(SOON)


def test_another_worker_that_is_idle_runs_a_call_again(pool, tmp_path):
    gates = [str(tmp_path / name) for name in "ab"]
    started = [pool.submit(functions.announce, f"{gate}-started", gate) for gate in gates]
    for gate in gates:
        wait_for_path(tmp_path / f"{gate}-started")
    for gate in gates:
        (tmp_path / gate).touch()
    workers = {future.result(SOON) for future in started}
    path = tmp_path / "lines"

    def crash_first():
        functions.append_line(path, functions.pid())
        if len(path.read_text().split()) == 1:
            functions.exit_at_once()

    pool.options(retries=1).submit(crash_first).result(SOON)
    assert set(map(int, path.read_text().split())) == workers


@pytest.mark.parametrize("where", ["pickle", "load", "load elsewhere"])
@pytest.mark.parametrize("act", [functions.exit_at_once, functions.segfault, functions.fail])
def test_arguments_and_results_that_end_a_worker_or_fail_fail_their_own_call(pool, where, act):
    if where != "pickle":
        argument = pool.submit(functions.identity, functions.Explosive(act, "load elsewhere"))
        assert isinstance(argument.exception(SOON), (ea.ActorError, ValueError))
    if where == "load" and act is not functions.fail:
        return  # that would end this process
    result = pool.submit(functions.explode_later, act, where)
    error = result.exception(SOON) if where != "load elsewhere" or act is functions.fail else None
    if where == "pickle":
        assert isinstance(error, ea.SerializationError if act is functions.fail else ea.ActorDiedError)
    assert pool.submit(functions.identity, 3).result(SOON) == 3


def test_what_cannot_be_pickled_fails_its_own_call(pool):
    with pytest.raises(ea.SerializationError, match="identity"):
        pool.submit(functions.identity, threading.Lock()).result(SOON)
    with pytest.raises(ea.SerializationError, match="make_unpicklable"):
        pool.submit(functions.make_unpicklable).result(SOON)
    lock = threading.Lock()
    with pytest.raises(ea.SerializationError, match="<lambda> or its arguments for actor"):
        pool.submit(lambda: lock).result(SOON)
    assert pool.stats().failed == {"exception": 3}


def test_functions_of_a_module_that_only_the_caller_has_say_what_to_do(pool, monkeypatch):
    module = types.ModuleType("only_here")
    exec("factor = 2\ndef double(value): return value * factor", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(ea.SerializationError, match=r"cannot import .*register_pickle_by_value.*'only_here'"):
        pool.submit(module.double, 1).result(SOON)
    cloudpickle.register_pickle_by_value(module)
    try:
        assert pool.submit(module.double, 1).result(SOON) == 2
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_an_initializer_of_a_module_that_only_the_caller_has_says_what_to_do(monkeypatch):
    module = types.ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    for initializer, advice in ((lambda: module, True), (lambda: __import__("missing_everywhere"), False)):
        with executor(1, initializer=initializer) as pool:
            with pytest.raises(ea.ActorStartError, match="ModuleNotFoundError") as caught:
                pool.submit(functions.identity, 1).result(SOON)
            assert ("register_pickle_by_value" in str(caught.value)) == advice


def test_a_worker_killed_from_outside_fails_its_call_and_is_replaced(pool, tmp_path):
    future = pool.submit(functions.announce, str(tmp_path / "started"), str(tmp_path / "gate"))
    wait_for_path(tmp_path / "started")
    worker = next(handle.pid for handle in pool._calls.handles if handle.state is ea.ActorState.BUSY)
    psutil.Process(worker).kill()
    with pytest.raises(ea.ActorDiedError, match="SIGKILL"):
        future.result(SOON)
    assert pool.submit(functions.pid).result(SOON) != worker


# Canceling -------------------------------------------------------------------------------------------------------


def test_a_call_that_waits_can_be_canceled_and_a_running_one_cannot(tmp_path):
    with executor(1) as pool:
        running = pool.submit(functions.announce, str(tmp_path / "started"), str(tmp_path / "gate"))
        waiting = pool.submit(functions.append_line, str(tmp_path / "lines"), "x")
        wait_for_path(tmp_path / "started")
        assert running.running()
        assert not running.cancel()
        assert waiting.cancel()
        (tmp_path / "gate").touch()
        with pytest.raises(cf.CancelledError):
            waiting.result(SOON)
        running.result(SOON)
    assert not (tmp_path / "lines").exists()
    assert pool.stats().failed == {"cancelled": 1}


def test_run_in_executor_works_with_gather_and_canceled_tasks(pool, tmp_path):
    path = tmp_path / "lines"

    async def main():
        loop = asyncio.get_running_loop()
        tasks = [loop.run_in_executor(pool, functions.append_line, path, number) for number in range(1000)]
        for task in tasks[-10:]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert results[:990] == [*range(990)]
    assert all(isinstance(result, asyncio.CancelledError) for result in results[990:])
    assert sorted(map(int, path.read_text().split())) == [*range(990)]


def test_futures_can_be_awaited(pool):
    async def main():
        return await pool.submit(functions.add, 1, 2)

    assert asyncio.run(main()) == 3


# Workers ---------------------------------------------------------------------------------------------------------


def test_workers_start_when_calls_need_them(tmp_path):
    with executor(3) as pool:
        states = [handle.stats() for handle in pool._calls.handles]
        assert [one.pid for one in states] == [None] * 3
        first = pool.submit(functions.pid).result(SOON)
        for _ in range(10):
            assert pool.submit(functions.pid).result(SOON) == first
        assert sum(handle.pid is not None for handle in pool._calls.handles) == 1
        futures = [pool.submit(functions.wait_for, str(tmp_path / "gate")) for _ in range(8)]
        wait_until(lambda: pool.stats().running == 3)
        (tmp_path / "gate").touch()
        assert len({future.result(SOON) for future in futures}) == 3


def test_the_idle_worker_that_was_used_last_is_used_first(pool, tmp_path):
    gates = [str(tmp_path / name) for name in "ab"]
    futures = [pool.submit(functions.announce, f"{gate}-started", gate) for gate in gates]
    for gate in gates:
        wait_for_path(tmp_path / f"{gate}-started")
    (tmp_path / "b").touch()
    futures[1].result(SOON)
    (tmp_path / "a").touch()
    last = futures[0].result(SOON)
    assert [pool.submit(functions.pid).result(SOON) for _ in range(5)] == [last] * 5


def test_a_call_that_waits_does_not_wait_for_a_worker_that_starts_if_another_one_is_idle(tmp_path):
    with executor(2, initializer=functions.wait_for, initargs=(str(tmp_path / "gate"),)) as pool:
        (tmp_path / "gate").touch()
        pool.submit(functions.identity).result(SOON)
        (tmp_path / "gate").unlink()
        blocked = pool.submit(functions.wait_for, str(tmp_path / "other"))
        quick = pool.submit(functions.identity, 3)  # wakes the other worker, whose initializer waits
        (tmp_path / "other").touch()
        assert blocked.result(SOON)
        assert quick.result(SOON) == 3
        (tmp_path / "gate").touch()


def test_workers_are_replaced_after_a_number_of_calls():
    with executor(1, recycle=ea.RecyclePolicy(max_calls=3)) as pool:
        pids = [pool.submit(functions.pid).result(SOON) for _ in range(9)]
        counts = [pool.submit(functions.count_calls).result(SOON) for _ in range(6)]
        assert pool.stats().restarts == 0
    assert [pids.count(one) for one in dict.fromkeys(pids)] == [3, 3, 3]
    assert counts == [1, 2, 3, 1, 2, 3]


def test_workers_are_replaced_above_a_limit_of_memory():
    with executor(1, recycle=ea.RecyclePolicy(max_memory=200 << 20)) as pool:
        first = pool.submit(functions.pid).result(SOON)
        assert pool.submit(functions.set_state, 1).result(SOON) is None
        assert pool.submit(functions.pid).result(SOON) == first
        pool.submit(functions.fill_state, 200 << 20).result(SOON)
        assert pool.submit(functions.pid).result(SOON) != first


def test_max_pending_makes_submit_wait(tmp_path):
    with executor(1, max_pending=2) as pool:
        gate = str(tmp_path / "gate")
        first = pool.submit(functions.announce, str(tmp_path / "started"), gate)
        wait_for_path(tmp_path / "started")
        waiting = [pool.submit(functions.identity, number) for number in range(2)]
        blocked = threading.Thread(target=lambda: waiting.append(pool.submit(functions.identity, 2)))
        blocked.start()
        time.sleep(0.1)
        assert pool.stats().waiting == 2
        assert len(waiting) == 2
        waiting[1].cancel()
        blocked.join(SOON)
        (tmp_path / "gate").touch()
        first.result(SOON)
        assert waiting[2].result(SOON) == 2


def test_shutdown_ends_a_submit_that_waits(tmp_path):
    pool = executor(1, max_pending=1)
    first = pool.submit(functions.announce, str(tmp_path / "started"), str(tmp_path / "gate"))
    wait_for_path(tmp_path / "started")
    waiting = pool.submit(functions.identity, 1)
    errors = []

    def submit():
        try:
            pool.submit(functions.identity, 2)
        except RuntimeError as error:
            errors.append(error)

    blocked = threading.Thread(target=submit)
    blocked.start()
    time.sleep(0.05)
    pool.shutdown(wait=False)
    blocked.join(SOON)
    assert len(errors) == 1
    (tmp_path / "gate").touch()
    first.result(SOON)
    assert waiting.result(SOON) == 1


@pytest.mark.parametrize("function", [functions.identity, lambda number: number], ids=["by name", "by value"])
def test_an_exception_of_a_signal_handler_in_submit_is_raised_there(pool, function):
    made = []
    for number in itertools.count():
        made.clear()
        where = interrupt(lambda: made.append(pool.submit(function, 1)), number)
        if where is None:
            break
        assert not made, where
    assert number > 10
    assert pool.submit(function, 2).result(SOON) == 2


# Initializers, and functions that travel by value ----------------------------------------------------------------


def test_an_initializer_runs_once_in_each_process():
    with executor(1, initializer=functions.set_state, initargs=("loaded",)) as pool:
        assert pool.submit(functions.get_state).result(SOON) == "loaded"
        with pytest.raises(ea.ActorDiedError):
            pool.submit(functions.exit_at_once).result(SOON)
        assert pool.submit(functions.get_state).result(SOON) == "loaded"


def test_a_worker_that_ends_in_its_initializer_says_so():
    with executor(1, initializer=functions.exit_at_once) as pool:
        future = pool.submit(functions.identity, 1)
        with pytest.raises(ea.ActorStartError, match=r"exit code 3 .*before its initializer had returned"):
            future.result(SOON)


def test_futures_that_wait_get_the_error_of_an_initializer_and_later_ones_try_again(tmp_path):
    path = tmp_path / "works"

    def initialize():
        if not path.exists():
            raise KeyError("not yet")

    with executor(2, initializer=initialize) as pool:
        futures = [pool.submit(functions.identity) for _ in range(5)]
        for future in futures:
            with pytest.raises(ea.ActorStartError, match="the initializer of") as caught:
                future.result(SOON)
            assert isinstance(caught.value.__cause__, KeyError)
        assert pool.stats().failed == {"start": 5}
        path.touch()
        assert pool.submit(functions.identity, 1).result(SOON) == 1


MAIN = """
    import functools, threading
    import envactors as ea
    model = None
    table = {"key": 1}
    factor = 2

    def initialize(value):
        global model, only_here
        model, only_here = value, "assigned"

    def use():
        return model, only_here

    def scale(number):
        return helper(number) * factor

    def helper(number):
        return number + 1

    def look_up():
        return table["key"]

    def count():
        global counter
        counter = globals().get("counter", 0) + 1
        return counter

    @functools.lru_cache
    def cached(number):
        calls.append(number)
        return len(calls)

    calls = []

    def use_cached(number):
        return cached(number)

    class Point:
        def __init__(self, x):
            self.x = x

    def make_point(x):
        return Point(x)

    def is_point(point):
        return isinstance(point, Point)
"""


@pytest.fixture
def run_in_main(run_warm):
    def run(code):
        done = run_warm(MAIN + code)
        assert done.returncode == 0, done.stderr

    return run


def test_functions_of_the_main_script_see_what_the_initializer_has_assigned(run_in_main):
    run_in_main(
        """
    with ea.Executor(2, initializer=initialize, initargs=("loaded",)) as pool:
        for _ in range(3):
            assert pool.submit(use).result() == ("loaded", "assigned")
            assert pool.submit(scale, 1).result() == 4
        assert pool.submit(lambda: (model, only_here)).result() == ("loaded", "assigned")
        assert pool.submit(functools.partial(use)).result() == ("loaded", "assigned")
        """
    )


def test_functions_of_the_main_script_see_what_the_initializer_has_changed_in_place(run_in_main):
    run_in_main(
        """
    import types
    parts, nested, kept = [], {"models": {"first": None}}, {"key": 1}
    holder = types.SimpleNamespace(model=None)

    def fill(value):
        table["model"] = nested["models"]["first"] = holder.model = value
        parts.append(None)
        kept["key"]

    def read():
        return table["model"], table["key"], parts, nested["models"]["first"], holder.model, kept["key"]

    with ea.Executor(2, initializer=functools.partial(fill, "loaded")) as pool:
        for number in (1, 2):
            kept["key"] = number
            assert pool.submit(read).result() == ("loaded", 1, [None], "loaded", "loaded", number)
            assert pool.submit(scale, 1).result() == 4
        """
    )


def test_functions_of_the_main_script_see_what_the_initializer_has_written_into_memory(run_in_main):
    run_in_main(
        """
    import random
    import numpy as np
    weights, layers, code, dice = np.zeros(3), {"first": [np.zeros(3)]}, bytearray(1), random.Random(0)
    untouched = np.zeros(3)

    def fill(value):
        weights[:] = layers["first"][0][:] = code[0] = value
        dice.seed(value)
        untouched.sum()

    def read():
        return sum(weights), sum(layers["first"][0]), code[0], sum(untouched), dice.random()

    with ea.Executor(1, initializer=fill, initargs=(5,)) as pool:
        for number in (1, 2):
            untouched[:] = number
            found = pool.submit(read).result()
            assert found[:4] == (15, 15, 5, 3 * number)
            assert found[4] == random.Random(5).random() or number == 2
        """
    )


def test_local_functions_see_what_the_initializer_of_their_module_has_assigned(monkeypatch):
    monkeypatch.setattr(functions, "calls", 5)
    with executor(1, initializer=functions.set_state, initargs=("loaded",)) as pool:
        assert pool.submit(functions.make_getter()).result(SOON) == ("loaded", 5)
        monkeypatch.setattr(functions, "calls", 6)
        assert pool.submit(functions.make_getter()).result(SOON) == ("loaded", 6)


@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_each_executor_has_its_globals_whatever_thread_submits(run_in_main, backend):
    run_in_main(
        f"""
    def use_in_thread(pool):
        futures = []
        thread = threading.Thread(target=lambda: futures.append(pool.submit(use)))
        thread.start()
        thread.join()
        return futures.pop().result()

    options = dict(initializer=initialize, backend={backend!r})
    with ea.Executor(1, initargs=("one",), **options) as one, ea.Executor(1, initargs=("two",), **options) as two:
        for _ in range(2):
            for pool, value in ((one, "one"), (two, "two")):
                assert pool.submit(use).result() == (value, "assigned")
                assert use_in_thread(pool) == (value, "assigned")
        """
    )


def test_functions_of_a_script_that_a_profiler_runs_see_what_the_initializer_has_assigned(run_in_main):
    run_in_main(
        """
    import cProfile
    script = '''if True:
        import envactors as ea
        model = None

        def initialize():
            global model
            model = "loaded"

        with ea.Executor(1, initializer=initialize) as pool:
            assert pool.submit(lambda: model).result() == "loaded"
    '''
    cProfile.runctx(compile(script, "script", "exec"), {"__name__": "__main__"}, None)
        """
    )


def test_functions_of_the_main_script_keep_what_they_assign(run_in_main):
    run_in_main(
        """
    with ea.Executor(1) as pool:
        assert [pool.submit(count).result() for _ in range(3)] == [1, 2, 3]
        assert pool.submit(scale, 1).result() == 4
        assert pool.submit(count).result() == 4
        """
    )


def test_a_value_that_is_assigned_back_stays(run_in_main):
    run_in_main(
        """
    state = 0

    def set_state(value):
        global state
        state = value

    def get_state():
        return state

    with ea.Executor(1) as pool:
        for value in (7, 0, None, 7):
            pool.submit(set_state, value).result()
            assert pool.submit(get_state).result() == value
            assert pool.submit(scale, 1).result() == 4
        """
    )


def test_classes_of_the_main_script_keep_what_the_initializer_has_assigned_and_changed(run_in_main):
    run_in_main(
        """
    import abc

    class Judge(abc.ABC):
        model, limit, models, notes = None, 1, {}, []
        table = property(lambda self: self.models)

        @classmethod
        def load(cls, value):
            cls.model = cls.only_here = cls.models["judge"] = value

    class Strict(Judge):
        limit = 2

    Judge.default = Judge()  # pickling it sets an attribute of its class

    def judge():
        return Judge.model, Strict.only_here, Strict().table, Judge.limit, Strict.limit, Judge.notes

    for backend in ("process", "thread", "inline"):
        with ea.Executor(1, initializer=Judge.load, initargs=("loaded",), backend=backend) as pool:
            for number in (1, 2, 3):
                Judge.limit, Strict.limit = number, number + 1
                Judge.notes.append(number)
                expected = ("loaded", "loaded", {"judge": "loaded"}, number, number + 1, Judge.notes)
                assert pool.submit(judge).result() == expected
                assert pool.submit(scale, 1).result() == 4
                if backend == "process":
                    assert (Judge.model, Judge.models) == (None, {})
        """
    )


def test_classes_of_the_main_script_keep_what_calls_assign(run_in_main):
    run_in_main(
        """
    import gc

    class Model:
        weights = None
        total = 0.5

        @classmethod
        def load(cls):
            gc.collect()
            if cls.weights is None:
                cls.weights = 0
            cls.weights += 1
            cls.total += 1
            cls.total += 1
            return cls.weights, cls.total

    class Outer:
        class Model:
            weights = None

    def set_inner(value):
        Outer.Model.weights = value

    with ea.Executor(1) as pool:
        pool.submit(set_inner, 7).result()
        assert [pool.submit(Model.load).result() for _ in range(3)] == [(1, 2.5), (2, 4.5), (3, 6.5)]
        assert pool.submit(lambda: Outer.Model.weights).result() == 7
        assert pool.submit(lambda: Model.weights).result() == 3
        assert pool.submit(is_point, Point(1)).result()
        """
    )


def test_a_redefined_class_of_the_main_script_has_its_new_form(run_in_main):
    run_in_main(
        """
    class Model:
        weights = None

    def load(value):
        Model.weights = value

    def read():
        return Model.weights

    with ea.Executor(1, initializer=load, initargs=(1,)) as pool:
        assert pool.submit(read).result() == 1
        before = Model()

        class Model:
            weights = 2
            bias = 3

        assert pool.submit(read).result() == 2
        assert pool.submit(lambda: Model.bias).result() == 3
        pool.submit(load, 4).result()
        assert pool.submit(isinstance, before, Model).result() is False
        assert pool.submit(read).result() == 4
        """
    )


def test_functions_of_the_main_script_have_their_attributes_and_defaults(run_in_main):
    run_in_main(
        """
    def work(number=1):
        return number * getattr(work, "scale", 1)

    with ea.Executor(1) as pool:
        assert pool.submit(work).result() == 1
        work.scale = 10
        assert pool.submit(work).result() == 10
        del work.scale
        work.__defaults__ = (1.0,)
        assert isinstance(pool.submit(work).result(), float)
        """
    )


def test_functions_of_the_main_script_have_the_values_of_when_they_were_submitted(run_in_main):
    run_in_main(
        """
    with ea.Executor(1) as pool:
        first = [pool.submit(scale, 1) for _ in range(50)]
        factor = 10
        second = [pool.submit(scale, 1) for _ in range(50)]
        factor = 2
        third = [pool.submit(scale, 1) for _ in range(50)]
        def helper(number):
            return number - 1
        fourth = [pool.submit(scale, 1) for _ in range(50)]
        table["key"] = 2
        assert pool.submit(look_up).result() == 2
        table["key"] = 3
        assert pool.submit(look_up).result() == 3
        assert {future.result() for future in first + third} == {4}
        assert {future.result() for future in second} == {20}
        assert {future.result() for future in fourth} == {0}
        """
    )


def test_classes_of_the_main_script_are_the_same_everywhere(run_in_main):
    run_in_main(
        """
    with ea.Executor(1) as pool:
        point = pool.submit(make_point, 3).result()
        assert isinstance(point, Point) and point.x == 3
        assert pool.submit(is_point, point).result()
        assert pool.submit(is_point, Point(1)).result()
        assert list(pool.map(is_point, [Point(1)] * 4, chunksize=2)) == [True] * 4
        """
    )


# Typing and remote things ----------------------------------------------------------------------------------------


def test_environment_variables_reach_the_workers():
    with ea.Executor(1, env_vars={"GRADER": "yes"}) as pool:
        assert pool.submit(lambda: __import__("os").environ["GRADER"]).result(SOON) == "yes"


def test_large_arguments_and_results_arrive(pool):
    array = np.arange(3_000_000)
    assert (pool.submit(functions.identity, array).result(SOON) == array).all()
    assert len(pool.submit(functions.allocate, 50_000_000).result(SOON)) == 50_000_000


def test_many_threads_submit_at_once(pool):
    results = []

    def submit(first):
        results.extend(pool.map(functions.identity, range(first, first + 50)))

    threads = [threading.Thread(target=submit, args=(number * 50,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert sorted(results) == [*range(400)]
    assert pool.stats().completed == 400


def test_workers_free_arguments_and_results_once_a_call_has_ended(pool, tmp_path):
    pool.submit(functions.identity, functions.Marked(tmp_path / "argument")).result(SOON)
    wait_for_path(tmp_path / "argument")
    result = pool.submit(functions.make_marked, tmp_path / "result")
    wait_for_path(tmp_path / "result")
    result.result(SOON)


def test_many_more_calls_than_workers_all_end(tmp_path):
    with executor(3) as pool:
        futures = [pool.submit(functions.wait_for, str(tmp_path / "gate")) for _ in range(45)]
        wait_until(lambda: pool.stats().running == 3)
        assert pool.stats().waiting == 42
        (tmp_path / "gate").touch()
        assert len({future.result(SOON) for future in futures}) <= 3


def test_a_crash_while_much_data_is_on_its_way_fails_its_own_call(pool):
    futures = [pool.submit(functions.exit_if, bytes(20_000_000), number == 3) for number in range(8)]
    for number, future in enumerate(futures):
        if number == 3:
            with pytest.raises(ea.ActorDiedError):
                future.result(SOON)
        else:
            assert future.result(SOON) == 20_000_000


def test_threads_that_submit_while_it_shuts_down_get_results_or_refusals():
    pool = executor(2)
    outcomes = []

    def submit():
        try:
            for number in range(1000):
                outcomes.append(pool.submit(functions.identity, number))  # noqa: PERF401 # others look at it meanwhile
        except RuntimeError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) > 20)
    pool.shutdown()
    for thread in threads:
        thread.join(SOON)
    futures = [one for one in outcomes if isinstance(one, cf.Future)]
    assert all(future.done() and future.exception() is None for future in futures)


def test_functions_that_are_submitted_at_the_exit_of_the_program_are_refused(run_warm):
    done = run_warm(
        """
        import atexit
        import envactors as ea

        @atexit.register
        def submit():
            try:
                pool.submit(print, "never")
            except RuntimeError as error:
                print("refused", error)

        pool = ea.Executor(1)
        print(pool.submit(len, "abc").result())
        """
    )
    assert done.stdout.splitlines() == ["3", "refused cannot submit 'print': the executor was shut down"], done.stderr
