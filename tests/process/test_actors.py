"""Actors and their futures when nothing goes wrong."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from helpers import (
    SOON,
    Counter,
    ExitsOnArrival,
    ExplodesOnArrival,
    Frozen,
    MuteError,
    TwoArguments,
    Unpicklable,
    is_gone,
    promised,
    wait_for_path,
    wait_until,
)

import envactors as ea
from envactors.actor.future import ActorFuture
from envactors.process.starting import THREAD_CAPS


def behind(gate):
    """A factory that waits for a file."""

    def factory():
        env = Counter()
        env.wait_for_file(str(gate))
        return env

    return factory


@pytest.fixture
def actor():
    with ea.spawn(Counter, name="counter") as handle:
        yield handle


def test_any_method_gives_a_standard_future(actor):
    future = actor.add(3)
    assert isinstance(future, ea.ActorFuture)
    assert isinstance(future, concurrent.futures.Future)
    assert isinstance(future, ea.Future)
    assert future.result(SOON) == 3
    assert future.done()
    assert future.exception() is None
    assert actor.call("echo", 1, b=2).result(SOON) == ((1,), {"b": 2})


def test_factories_of_every_kind():
    class Local(Counter):
        def add(self, n=1):
            return super().add(10 * n)

    five = 5
    for factory, expected in ((lambda: Counter(five), 6), (Local, 10), (Counter, 1)):
        with ea.spawn(factory) as handle:
            assert handle.add().result(SOON) == expected


def test_the_factory_runs_in_the_worker_only(actor):
    assert actor.call("pid").result(SOON) == actor.pid
    assert actor.pid != os.getpid()


def test_spawn_returns_before_the_env_is_made(tmp_path):
    gate = tmp_path / "gate"

    with ea.spawn(behind(gate), name="slow") as handle:
        assert handle.state is ea.ActorState.STARTING
        assert handle.incarnation == 0
        future = handle.add()
        assert not future.running()
        gate.touch()
        assert future.result(SOON) == 1
        assert handle.state is ea.ActorState.IDLE
        assert handle.name == "slow"
        assert handle.stats().completed == 1
    assert handle.state is ea.ActorState.CLOSED
    assert handle.pid is None


def test_busy_while_a_call_runs(actor, tmp_path):
    gate, touched = tmp_path / "gate", tmp_path / "touched"
    future = actor.touch_then_wait(str(touched), str(gate))
    wait_for_path(touched)
    assert actor.state is ea.ActorState.BUSY
    assert future.running()
    gate.touch()
    future.result(SOON)
    assert actor.state is ea.ActorState.IDLE


def test_get_and_set_reach_the_env_and_hidden_names(actor):
    gymnasium = pytest.importorskip("gymnasium")
    actor.set("count", 41).result(SOON)
    assert actor.add().result(SOON) == 42
    assert actor.get("count").result(SOON) == 42
    with pytest.raises(AttributeError, match="nothing_like_it"):
        actor.get("nothing_like_it").result(SOON)
    with ea.spawn(lambda: gymnasium.make("CartPole-v1")) as cart:
        assert cart.get("gravity").result(SOON) == 9.8
        cart.set("gravity", 1.6).result(SOON)
        assert cart.get("gravity").result(SOON) == 1.6
        assert cart.get("unwrapped").result(SOON).gravity == 1.6


def test_names_with_an_underscore_are_never_sent(actor):
    with pytest.raises(AttributeError, match="underscore"):
        actor._secret  # noqa: B018
    with pytest.raises(AttributeError):
        actor.call("__init__")
    with pytest.raises(AttributeError):
        actor.get("_count")
    with pytest.raises(AttributeError):
        actor.set("_count", 1)
    assert not hasattr(actor, "__array__")


def test_calls_run_in_order_one_at_a_time(actor):
    futures = [actor.add() for _ in range(200)]
    assert [future.result(SOON) for future in futures] == list(range(1, 201))


def test_handles_are_thread_safe(actor):
    results, failures = [], []

    def work():
        try:
            results.extend(actor.add().result(SOON) for _ in range(100))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(results) == list(range(1, 801))


def test_many_threads_many_actors():
    with ea.spawn(Counter) as one, ea.spawn(Counter) as two:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            sums = list(pool.map(lambda i: (one, two)[i % 2].echo(i).result(SOON), range(300)))
        assert sums == list(range(300))


def test_the_library_functions_of_futures_work(actor):
    futures = [actor.echo(i) for i in range(20)]
    assert {future.result() for future in ea.as_completed(futures, SOON)} == set(range(20))
    done, pending = ea.wait([actor.echo(1), actor.echo(2)], SOON)
    assert (len(done), len(pending)) == (2, 0)

    async def main():
        return await asyncio.gather(*(asyncio.wrap_future(actor.echo(i)) for i in range(10)))

    assert asyncio.run(main()) == list(range(10))


def test_a_callback_may_wait_for_another_call(actor):
    done = threading.Event()
    seen = []

    def callback(future):
        seen.append(future.result() + actor.echo(1).result(SOON))
        futures = [actor.echo(10), actor.echo(20)]
        seen.extend(sorted(f.result() for f in ea.as_completed(futures, SOON)))
        ea.wait([actor.echo(5)], SOON)
        done.set()

    with ea.spawn(Counter) as other:
        other.echo(1).add_done_callback(callback)
        assert done.wait(SOON)
    assert seen == [2, 10, 20]


def test_waiting_with_a_timeout_ends_the_waiting_only(actor, tmp_path):
    gate = tmp_path / "gate"
    future = actor.wait_for_file(str(gate))
    later = actor.echo("later")
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.05)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.exception(0)
    gate.touch()
    assert later.result(SOON) == "later"
    assert future.result(SOON) == str(gate)
    assert actor.incarnation == 0
    assert actor.stats().stale == 0


def test_cancel_takes_a_queued_call_out_and_leaves_a_running_one(actor, tmp_path):
    gate, touched = tmp_path / "gate", tmp_path / "touched"
    running = actor.touch_then_wait(str(touched), str(gate))
    queued, last = actor.add(100), actor.add(1)
    wait_for_path(touched)
    assert not running.cancel()
    assert queued.cancel()
    assert queued.cancelled()
    assert concurrent.futures.wait([queued], SOON).done == {queued}
    with pytest.raises(concurrent.futures.CancelledError):
        queued.result()
    gate.touch()
    assert last.result(SOON) == 1
    assert not last.cancel()


def test_abort_of_queued_running_and_finished_calls(actor, tmp_path):
    touched = tmp_path / "touched"
    finished = actor.add()
    assert finished.result(SOON) == 1
    assert not finished.abort()
    running = actor.options(retries=3).hang_in_c(str(touched))
    queued, last = actor.add(), actor.add()
    wait_for_path(touched)
    assert queued.abort()
    assert queued.cancelled()
    assert running.abort()
    with pytest.raises(ea.ActorDiedError) as caught:
        running.result(SOON)
    assert caught.value.aborted
    assert last.result(SOON) == 1, "queued calls go on in the new incarnation, which counts anew"
    assert actor.incarnation == 1
    assert actor.stats().restarts == 0


def test_renew_takes_its_place_in_the_queue_and_is_not_counted(actor, tmp_path):
    closed = tmp_path / "closed"
    before = actor.call("pid").result(SOON)
    actor.touch_on_close(str(closed))
    first, renewal, second = actor.add(), actor.renew(), actor.add()
    assert first.result(SOON) == 1
    assert renewal.result(SOON) == 1
    assert second.result(SOON) == 1
    assert closed.exists(), "the old env was closed properly"
    assert is_gone(before)
    assert actor.pid != before
    assert actor.incarnation == 1
    assert actor.stats().restarts == 0


def test_kill_fails_everything_and_later_calls(actor, tmp_path):
    touched = tmp_path / "touched"
    running, queued = actor.hang_in_c(str(touched)), actor.add()
    wait_for_path(touched)
    pid = actor.pid
    actor.kill()
    for future in (running, queued):
        with pytest.raises(ea.ActorDiedError) as caught:
            future.result(SOON)
        assert caught.value.aborted
    with pytest.raises(ea.ActorClosedError, match="closed"):
        actor.add().result(SOON)
    assert actor.state is ea.ActorState.CLOSED
    wait_until(lambda: is_gone(pid))
    actor.kill()
    actor.close()


def test_kill_with_restart_fails_the_running_call_only(actor, tmp_path):
    touched = tmp_path / "touched"
    running, queued = actor.hang_in_c(str(touched)), actor.add()
    wait_for_path(touched)
    actor.kill(restart=True)
    with pytest.raises(ea.ActorDiedError) as caught:
        running.result(SOON)
    assert caught.value.aborted
    assert queued.result(SOON) == 1
    assert (actor.incarnation, actor.stats().restarts) == (1, 0)


def test_close_lets_queued_calls_and_the_env_finish(tmp_path):
    closed = tmp_path / "closed"
    handle = ea.spawn(Counter)
    handle.touch_on_close(str(closed))
    futures = [handle.add() for _ in range(5)]
    handle.close()
    assert [future.result(0) for future in futures] == [1, 2, 3, 4, 5]
    assert closed.exists()
    handle.close()
    with pytest.raises(ea.ActorClosedError):
        handle.add()


def test_close_does_not_wait_for_a_process_that_has_not_begun_to_start(tmp_path):
    gate = tmp_path / "gate"

    stream_results = ea.ProcessBackend("loky", max_starting=1)
    with ea.spawn(behind(gate), backend=stream_results) as first:
        second = ea.spawn(Counter, backend=stream_results, deadlines=ea.Deadlines(close=None))
        closer = threading.Thread(target=second.close)
        closer.start()
        closer.join(SOON)
        closed = not closer.is_alive()
        gate.touch()
        closer.join()
        assert closed
        assert first.add().result(SOON) == 1


def test_an_actor_lives_while_its_handle_or_an_unfinished_future_does(tmp_path):
    gate, touched = tmp_path / "gate", tmp_path / "touched"
    handle = ea.spawn(Counter)
    pid = handle.call("pid").result(SOON)
    future = handle.touch_then_wait(str(touched), str(gate))
    wait_for_path(touched)
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None
    gate.touch()
    assert future.result(SOON) == str(gate)
    wait_until(lambda: is_gone(pid))


def test_current_actor():
    assert ea.current_actor() is None
    with ea.spawn(Counter, name="me") as handle:
        assert handle.context().result(SOON) == ea.ActorContext("me", 0, 0)
        handle.renew()
        assert handle.context().result(SOON) == ea.ActorContext("me", 0, 1)


def test_an_exception_arrives_whole_and_the_actor_continues(actor):
    with pytest.raises(TwoArguments) as caught:
        actor.fail(TwoArguments, 7, "details").result(SOON)
    assert (caught.value.code, caught.value.detail) == (7, "details")
    assert str(caught.value) == "7: details"
    assert isinstance(caught.value.__cause__, ea.RemoteTraceback)
    assert "helpers.py" in str(caught.value.__cause__)
    assert "raise kind(*args)" in str(caught.value.__cause__)
    for kind, args in ((KeyError, ("k",)), (SystemExit, (3,)), (KeyboardInterrupt, ()), (OSError, (2, "no", "file"))):
        with pytest.raises(kind) as plain:
            actor.fail(kind, *args).result(SOON)
        assert plain.value.args == kind(*args).args
    assert actor.add().result(SOON) == 1
    assert actor.incarnation == 0


def test_an_exception_of_a_local_class_is_caught_by_that_class(actor):
    class Mine(Exception):
        pass

    with pytest.raises(Mine):
        actor.fail(Mine, "x").result(SOON)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda a: a.fail(Unpicklable), id="an exception that does not pickle"),
        pytest.param(lambda a: a.echo(threading.Lock()), id="an argument that does not pickle"),
        pytest.param(lambda a: a.echo(ExplodesOnArrival()), id="an argument that does not unpickle"),
        pytest.param(lambda a: a.call("get_lock"), id="a result that does not pickle"),
        pytest.param(lambda a: a.call("get_bomb"), id="a result that does not unpickle"),
    ],
)
def test_values_that_cannot_be_pickled_fail_only_their_call(call):
    class Env(Counter):
        def get_lock(self):
            return threading.Lock()

        def get_bomb(self):
            return ExplodesOnArrival()

    with ea.spawn(Env) as handle:
        before, bad, after = handle.add(), call(handle), handle.add()
        with pytest.raises(ea.SerializationError) as caught:
            bad.result(SOON)
        assert caught.value.actor == handle.name
        assert (before.result(SOON), after.result(SOON)) == (1, 2)
        assert handle.incarnation == 0


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_a_result_fails_only_its_call_if_the_error_of_unpickling_it_has_no_repr(backend):
    def explode():
        raise MuteError

    class Bomb:
        def __reduce__(self):
            return explode, ()

    class Env(Counter):
        def get_bomb(self):
            return Bomb()

    with ea.spawn(Env, backend=backend) as handle:
        with pytest.raises(ea.SerializationError, match="MuteError whose repr raises"):
            handle.call("get_bomb").result(SOON)
        assert handle.add().result(SOON) == 1


def test_values_are_rejected_if_the_error_of_pickling_them_has_no_repr(actor):
    class Bomb:
        def __reduce__(self):
            raise MuteError

    bomb = Bomb()
    with pytest.raises(ea.SerializationError, match="MuteError whose repr raises"):
        actor.call("add", bomb).result(SOON)
    with pytest.raises(ea.SerializationError, match="MuteError whose repr raises"):
        ea.spawn(lambda: bomb)
    assert actor.add().result(SOON) == 1


def test_an_unpicklable_exception_keeps_repr_and_traceback(actor):
    with pytest.raises(ea.SerializationError, match=r"Unpicklable\('no way out'\)") as caught:
        actor.fail(Unpicklable).result(SOON)
    assert "raise kind(*args)" in str(caught.value)


def test_hostile_results_and_exceptions_fail_their_own_call_only():
    class Env(Counter):
        def get_exit(self):
            return ExitsOnArrival()

    with ea.spawn(Env) as handle, ea.spawn(Counter) as other:
        with pytest.raises(ea.SerializationError):
            handle.get_exit().result(SOON)
        done, _ = ea.wait([handle.get_exit()], SOON)  # unpickled in the library's thread
        assert isinstance(done.pop().exception(), ea.SerializationError)
        with pytest.raises(Frozen) as caught:
            handle.fail(Frozen, "ice").result(SOON)
        assert isinstance(caught.value.__cause__, ea.RemoteTraceback)
        assert ea.wait([handle.add(), other.add()], SOON).not_done == set()


def test_callbacks_that_raise_or_block_hold_up_no_other(actor):
    first, second, last = threading.Event(), threading.Event(), threading.Event()
    actor.add().add_done_callback(lambda _: sys.exit(3))
    actor.add().add_done_callback(lambda _: (first.set(), second.wait(SOON), last.set()))
    assert first.wait(SOON)
    actor.add().add_done_callback(lambda _: second.set())  # what the one before it waits for
    assert last.wait(SOON)


def test_a_thread_that_waits_for_a_cancelled_call_is_woken(actor, tmp_path):
    gate = tmp_path / "gate"
    actor.wait_for_file(str(gate))
    queued = actor.add()
    timer = threading.Timer(0.1, queued.cancel)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(concurrent.futures.CancelledError):
        queued.result(SOON)
    assert time.monotonic() - begun < promised(2.0)
    timer.join()
    gate.touch()


def test_a_finalizer_may_wait_for_a_call_while_a_future_gets_its_condition(actor):
    """Whenever in between the garbage collector comes to run it."""
    answered = []

    class Last:
        def __init__(self):
            self.me = self

        def __del__(self):
            if threading.current_thread() is threading.main_thread():
                done = threading.Event()
                actor.add().add_done_callback(lambda _: done.set())
                answered.append(done.wait(SOON))

    actor.add().result(SOON)
    thresholds = gc.get_threshold()
    try:
        for objects in range(1, 30):
            future = ActorFuture(actor._actor, None)
            gc.collect()
            gc.disable()
            Last()
            gc.set_threshold(objects)
            gc.enable()
            future.done()
            gc.set_threshold(*thresholds)
            assert all(answered)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.collect()
    assert answered


def test_an_env_that_forks_answers_once(actor):
    class Env(Counter):
        def fork(self):
            if os.fork() == 0:
                raise LookupError("in the child")
            os.wait()
            return "parent"

    with ea.spawn(Env) as handle:
        assert handle.fork().result(SOON) == "parent"
        assert [handle.add().result(SOON) for _ in range(3)] == [1, 2, 3]


def test_an_unpicklable_factory_is_rejected_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(ea.SerializationError, match="factory"):
        ea.spawn(lambda: lock)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"factory": 3}, TypeError),
        ({"factory": Counter, "backend": "nothing"}, ValueError),
        ({"factory": Counter, "env_vars": {"A": 1}}, TypeError),
    ],
)
def test_bad_input_to_spawn_is_rejected(arguments, error):
    with pytest.raises(error, match="expected"):
        ea.spawn(**arguments)


def test_invalid_call_options_raise(actor):
    for bad in ({"deadline": -1}, {"deadline": "1"}, {"retries": -1}, {"retries": 1.5}):
        with pytest.raises(ValueError, match="expected"):
            actor.options(**bad)


def test_large_arguments_and_results(actor):
    array = np.arange(20_000_000, dtype=np.uint8)
    assert np.array_equal(actor.echo(array).result(SOON), array)
    assert actor.add().result(SOON) == 1


def test_a_handle_with_options_has_the_attributes_of_the_handle(actor):
    actor.add().result(SOON)
    timed = actor.options(deadline=SOON)
    for name in ("name", "pid", "node", "state", "incarnation"):
        assert getattr(timed, name) == getattr(actor, name), name
    assert timed.stats().completed == actor.stats().completed
    assert "worker/main.py" in timed.stacks()
    assert timed.renew().result(SOON) == 1
    assert actor.options(retries=1).incarnation == actor.incarnation == 1
    timed.close()
    assert actor.state is ea.ActorState.CLOSED


def test_options_of_a_handle_with_options_keep_what_they_do_not_replace(actor):
    for timed in (actor.options(deadline=0.2).options(retries=0), actor.options(retries=0).options(deadline=0.2)):
        error = timed.hang_in_c().exception(SOON)
        assert isinstance(error, ea.ActorTimeoutError)
        assert error.timeout == 0.2
        actor.renew().result(SOON)


def test_handles_and_futures_stay_in_their_process(actor):
    for refused in (lambda: pickle.dumps(actor), lambda: copy.copy(actor)):
        with pytest.raises(TypeError, match="belongs to the process"):
            refused()
    future = actor.add()
    assert future.result(SOON) == 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover # the parent's view of it is what counts
        try:
            actor.add()
            os.write(writer, b"no error")
        except ea.ActorClosedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert f"belongs to process {os.getpid()}" in said.read()


@pytest.mark.parametrize(
    "wait",
    [
        lambda future: future.result(SOON),
        lambda future: asyncio.run(asyncio.wait_for(future, 0.1)),
        lambda future: concurrent.futures.wait([future], 0.1),
        lambda future: list(concurrent.futures.as_completed([future], 0.1)),
        lambda future: future.add_done_callback(print),
    ],
    ids=["result", "await", "wait", "as_completed", "callback"],
)
def test_a_forked_child_does_not_wait_for_a_call_of_its_parent(actor, wait):
    """It used to read the reply, and the parent waited forever. Nor can it wait for the end itself."""
    done, future = actor.add(), actor.sleep(0.5)
    wait_until(future.running)
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            concurrent.futures.wait([done])
            wait(future)
        except ea.ActorClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert future.result(SOON) == 0.5


def test_a_forked_child_that_drops_its_handles_leaves_the_parents_actor_alone():
    handles = [ea.spawn(Counter)]
    pid = handles[0].call("pid").result(SOON)
    child = os.fork()
    if child == 0:  # pragma: no cover # what a forked DataLoader does at its end
        code = 1
        try:
            with contextlib.suppress(ea.ActorClosedError):
                handles[0].close(0)
            handles.clear()
            gc.collect()
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handles[0].add().result(SOON) == 1
    assert handles[0].pid == pid
    handles[0].close()


def test_a_forked_child_can_have_actors_of_its_own(actor):
    assert actor.add().result(SOON) == 1
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 1
        try:
            with ea.spawn(Counter) as own:
                code = 0 if own.add(5).result(SOON) == 5 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert actor.add().result(SOON) == 2


@pytest.mark.fresh_processes
def test_env_vars_are_there_before_the_factory_and_caps_hold(monkeypatch):
    for name in THREAD_CAPS:
        monkeypatch.delenv(name, raising=False)
    with ea.spawn(Counter, env_vars={"FLAVOUR": "salt"}) as handle:
        assert handle.environ("FLAVOUR").result(SOON) == "salt"
        assert handle.environ("OMP_NUM_THREADS").result(SOON) == "1"
        assert handle.environ("MKL_NUM_THREADS").result(SOON) == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    with ea.spawn(Counter, env_vars={"OMP_NUM_THREADS": "3"}) as handle:
        assert handle.environ("OMP_NUM_THREADS").result(SOON) == "3"
        assert handle.environ("OPENBLAS_NUM_THREADS").result(SOON) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with ea.spawn(Counter) as handle:
        assert handle.environ("OMP_NUM_THREADS").result(SOON) == "2"
        assert handle.environ("OPENBLAS_NUM_THREADS").result(SOON) is None


def test_output_is_passed_on_line_by_line_with_the_name(capfd):
    class Talker(Counter):
        def talk(self):
            print("one\ntwo")
            os.write(2, b"from C\n")

    with ea.spawn(Talker, name="parrot") as handle:
        handle.talk().result(SOON)
    out, err = capfd.readouterr()
    assert "[parrot] one\n[parrot] two\n" in out
    assert "[parrot] from C\n" in err


def test_the_last_fifty_lines_of_stderr_are_kept_for_errors():
    with ea.spawn(Counter) as handle:
        handle.complain(*(f"line {i}" for i in range(80))).result(SOON)
        error = handle.exit_now(1).exception(SOON)
    assert error.stderr_tail.splitlines() == [f"line {i}" for i in range(30, 80)]
    assert "line 79" in str(error)


def test_the_caller_is_never_forked_with_its_threads(tmp_path):
    forks = []
    os.register_at_fork(before=lambda: forks.append(threading.current_thread().name))
    with ea.spawn(Counter, restart=ea.RestartPolicy(backoff=0)) as handle:
        handle.add().result(SOON)
        os.kill(handle.pid, signal.SIGKILL)
        assert handle.add().result(SOON) == 1
    assert forks == []


def test_waiting_threads_do_not_burn_the_processor(actor):
    actor.add().result(SOON)
    future = actor.sleep(0.6)
    before = time.process_time()
    future.result(SOON)
    assert time.process_time() - before < 0.2


def test_an_actor_whose_crash_was_raised_where_its_handle_is_known_is_freed():
    def lose():
        with ea.spawn(Counter, restart=ea.RestartPolicy(backoff=0.01)) as actor:
            with pytest.raises(ea.ActorDiedError):
                actor.die().result()
            actor.add(1).result()
            return weakref.ref(actor._actor)

    supervisor = lose()
    gc.collect()
    assert supervisor() is None


@pytest.mark.parametrize("start_method", ["forkserver", "loky"])
def test_a_factory_may_have_proxies_of_a_manager(start_method):
    """As in `multiprocessing`, workers get the key of their caller."""
    with multiprocessing.Manager() as manager:
        shared = manager.dict(seen=3)
        with ea.spawn(lambda: shared, backend=ea.ProcessBackend(start_method)) as actor:
            assert actor.call("get", "seen").result(SOON) == 3


def test_calls_behind_a_renewal_run_even_if_the_actor_is_closed():
    actor = ea.spawn(Counter)
    renewal, call = actor.renew(), actor.add(2)
    actor.close()
    assert (renewal.result(SOON), call.result(SOON)) == (1, 2)
