"""Actor pools whose calls are made, end, and are cancelled in several threads."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import math
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers import SOON, wait_until
from interleaving import Lines, StoppingThread
from interrupting import interrupt

import envactors as ea

POOL = ("pools/shared_calls.py",)


class FileGate:
    """An event that workers see, too."""

    def __init__(self, name):
        self.path = Path(os.environ.setdefault("POOL_GATES", tempfile.mkdtemp())) / name

    def set(self):
        self.path.touch()

    def clear(self):
        self.path.unlink(missing_ok=True)

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while not self.path.exists():
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True


GATE, OTHER_GATE = FileGate("gate"), FileGate("other")
BACKEND = ea.ThreadBackend()
# Functions that `cancel` runs.
ENDING = {"cancel", "set_canceled", "_leave", "_notify", "_wake_others", "remove", "wake_submitters", "open"}


class Worker:
    """An env that counts its calls, and waits for a gate."""

    def __init__(self):
        self.count = 0

    def wait(self):
        assert GATE.wait(SOON)

    def wait_again(self):
        assert OTHER_GATE.wait(SOON)

    def find_thread(self):
        return threading.get_ident()

    def add(self):
        self.count += 1
        return self.count

    def echo(self, value):
        return value

    def crash(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def meet(self, count):
        """Return once this many calls of it run at the same time."""
        mine = Path(os.environ["POOL_GATES"]) / f"meet-{count}-{threading.get_native_id()}-{time.monotonic_ns()}"
        mine.touch()
        end = time.monotonic() + SOON
        while len(list(mine.parent.glob(f"meet-{count}-*"))) % count:
            assert time.monotonic() < end
            time.sleep(0.002)


@pytest.fixture(autouse=True)
def closed_gate():
    GATE.clear()
    OTHER_GATE.clear()
    yield
    GATE.set()
    OTHER_GATE.set()


def check_all_work(pool):
    """Every actor of the pool is still given calls."""
    calls = [pool.submit("meet", len(pool)) for _ in pool.actors]
    for call in calls:
        assert call.result(SOON) is None


def end_unless(condition, line):
    if not condition:
        sys.stderr.write(f"deadlock after {line} lines\n")
        sys.stderr.flush()
        os._exit(1)


def cancel_and_submit():
    lines = Lines()
    for line in lines:
        GATE.clear()
        pool = ea.ActorPool(Worker, 1, backend=BACKEND)
        pool.submit("wait")
        queued = pool.submit("echo", 1)
        canceller = StoppingThread(queued.cancel, line, POOL).start()
        lines.has_stopped = canceller.stops()
        submitter = StoppingThread(lambda pool=pool: pool.submit("echo", 2)).start()
        submitter.wait_asleep()
        canceller.go_on()
        end_unless(canceller.ends_within(SOON) and submitter.ends_within(SOON), line)
        assert canceller.result is True
        assert queued.cancelled()
        GATE.set()
        assert submitter.result.result(SOON) == 2
        pool.close()
    assert lines.count > 3


def test_cancelling_a_call_and_submitting_another_do_not_deadlock(run_warm):
    """It is a program of its own: a thread that waits for a lock forever cannot be ended."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = run_warm(f"import sys; sys.path[:0] = {paths!r}; import test_pools; test_pools.cancel_and_submit()")
    assert done.returncode == 0, done.stderr


class Interruption(BaseException):
    """An exception of a signal handler."""


def interrupt_at(line, module):
    """Raises at the n-th line of a module of the library that this thread runs; returns what says whether it did.

    Lines to which a frame comes back do not count: that is how it leaves a ``with``, where no handler runs.
    """
    done = []
    left = [line]
    seen = set()

    def trace(frame, event, _argument):
        if not frame.f_code.co_filename.endswith(module):
            return None
        if event == "line" and (frame, frame.f_lineno) not in seen:
            seen.add((frame, frame.f_lineno))
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                done.append(True)
                raise Interruption
        return trace

    sys.settrace(trace)
    return done


def test_an_interrupt_in_submit_takes_no_actor_out_of_its_pool():
    with ea.ActorPool(Worker, 2, backend=BACKEND) as pool:
        lines = Lines()
        for line in lines:
            interrupted = interrupt_at(line, POOL[0])
            try:
                future = pool.submit("echo", 1)
            except Interruption:
                future = None
            finally:
                sys.settrace(None)
            assert future is None or future.result(SOON) == 1
            lines.has_stopped = bool(interrupted)
            check_all_work(pool)
        assert lines.count > 10


@pytest.mark.parametrize("what", ["result", "room"])
def test_a_thread_that_waits_continues_after_an_interrupted_cancel(what):
    for number in itertools.count():
        GATE.clear()
        with ea.Executor(1, backend=BACKEND, max_pending=1) as pool:
            running = pool.submit(GATE.wait, SOON)
            wait_until(running.running)
            queued = pool.submit(int)
            if what == "result":
                waiting = StoppingThread(lambda queued=queued: queued.exception()).start()
            else:
                waiting = StoppingThread(lambda pool=pool: pool.submit(int)).start()
            waiting.wait_asleep()
            where = interrupt(queued.cancel, number, only=ENDING)
            GATE.set()
            assert waiting.ends_within(SOON), where
        if where is None:
            break


def test_a_pool_that_closes_anywhere_while_an_actor_becomes_idle_sends_nothing_that_it_cancels():
    """Each waiting call is cancelled, and no actor gets it meanwhile."""
    lines = Lines()
    for line in lines:
        pool = ea.ActorPool(Worker, 1, backend=BACKEND)
        pool.submit("echo", 1).result(SOON)  # from now on the actor takes calls at once
        running = pool.submit("wait")
        waiting = [pool.submit("add") for _ in range(3)]
        closing = StoppingThread(pool.close, line, POOL).start()
        lines.has_stopped = closing.stops(or_sleeps=True)
        GATE.set()
        StoppingThread(lambda running=running: running.result(SOON)).start().wait_asleep()
        closing.go_on()
        assert closing.ends_within(SOON)
        assert closing.error is None
        assert running.result(SOON) is None
        ran = [future.result(SOON) for future in waiting if not future.cancelled()]
        assert ran == list(range(1, len(ran) + 1)), "all others are cancelled, and those that ran did so once"
        GATE.clear()
    assert lines.count > 5


def test_the_end_of_a_block_waits_for_calls_that_run():
    with ea.ActorPool(Worker, 1, deadlines=ea.Deadlines(close=0.1)) as pool:
        running = pool.submit("wait")
        threading.Timer(1.0, GATE.set).start()
    assert running.result(0) is None
    GATE.clear()


def test_who_waits_for_a_call_that_cannot_be_sent_learns_that():
    with ea.ActorPool(Worker, 1, backend=BACKEND) as pool:
        first = pool.submit("wait")
        reader = StoppingThread(lambda: first.result(2 * SOON)).start()
        reader.wait_asleep()
        bad = pool.submit("echo", threading.Lock())
        waiting = StoppingThread(lambda: bad.exception(2 * SOON)).start()
        waiting.wait_asleep()
        GATE.set()
        assert waiting.ends_within(SOON)
        assert isinstance(waiting.result, ea.SerializationError)
        assert reader.ends_within(SOON)


@pytest.mark.parametrize("arguments", [(1,), (threading.Lock(),)], ids=["closed", "not pickled"])
def test_any_number_of_calls_may_fail_as_they_are_sent(arguments):
    with ea.ActorPool(Worker, 1, backend=BACKEND) as pool:
        running = pool.submit("wait")
        waiting = [pool.submit("echo", *arguments) for _ in range(1000)]
        if arguments == (1,):
            pool.actors[0].close(0)
        GATE.set()
        concurrent.futures.wait([running, *waiting], SOON)
        errors = {type(future.exception(0)) for future in waiting}
        assert errors == {ea.ActorClosedError if arguments == (1,) else ea.SerializationError}


def test_a_call_that_waits_for_an_actor_can_be_aborted():
    with ea.ActorPool(Worker, 1, backend=BACKEND) as pool:
        pool.submit("wait")
        waiting = pool.submit("echo", 1)
        assert waiting.abort()
        assert waiting.cancelled()
        GATE.set()


@pytest.mark.parametrize("kind", ["pool", "executor"])
def test_an_interrupt_while_the_block_waits_for_its_calls_ends_them(monkeypatch, kind):
    deadlines = ea.Deadlines(close=0.2)
    pool = ea.ActorPool(lambda: time, 1, deadlines=deadlines) if kind == "pool" else ea.Executor(1)
    sleep = "sleep" if kind == "pool" else time.sleep

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), pool:
        running, waiting = pool.submit(sleep, 3600), pool.submit(sleep, 3600)
        wait_until(running.running)
        patch.setattr("envactors.pools.shared_calls.SharedCalls.wait_ended", interrupted)
    assert isinstance(running.exception(SOON), ea.ActorError)
    assert waiting.cancelled()


class Interrupted:
    """Cannot be pickled: its reduction raises what no call can end with."""

    def __reduce__(self):
        raise KeyboardInterrupt


def test_a_call_whose_arguments_cannot_be_pickled_for_whatever_reason_takes_no_actor_out_of_its_pool():
    with ea.ActorPool(Worker, 1, backend=BACKEND) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.submit("echo", Interrupted())
        assert pool.submit("echo", 1).result(SOON) == 1


def test_calls_wait_for_a_living_actor_while_another_one_is_dead():
    with ea.ActorPool(Worker, 2, backend="process") as pool:
        pool.submit("add").result(SOON)
        busy = pool.submit("wait")  # on the actor that has been idle for longer
        wait_until(busy.running)
        assert isinstance(pool.submit("crash").exception(SOON), ea.ActorDiedError)
        calls = [pool.submit("echo", i) for i in range(10)]
        GATE.set()
        assert [call.result(SOON) for call in calls] == list(range(10))


def test_a_callback_that_blocks_delays_the_close_of_no_actor():
    gate = threading.Event()
    with ea.ActorPool(Worker, 8, backend=BACKEND) as pool:
        call = pool.submit("echo", 1)
        call.result(SOON)
        call = pool.submit("echo", 1)
        call.add_done_callback(lambda _: gate.wait(SOON))
        call.result(SOON)
        started = time.monotonic()
        pool.close(1)
        assert time.monotonic() - started < 2.5
    gate.set()


def test_in_process_calls_of_several_threads_run_in_these_threads():
    """One that finds all actors busy waits for one of them, and nothing runs in the threads of the library."""
    with ea.ActorPool(Worker, 2, backend="inline") as pool:
        busy = [StoppingThread(lambda: pool.submit("wait").result(SOON)).start() for _ in range(2)]
        wait_until(lambda: all(actor.state is ea.ActorState.BUSY for actor in pool.actors))
        waiting = StoppingThread(lambda: pool.submit("find_thread").result(SOON)).start()
        waiting.wait_asleep()
        GATE.set()
        assert all(thread.ends_within(SOON) for thread in [*busy, waiting])
        assert [thread.result for thread in busy] == [None, None]
        assert waiting.result == waiting.ident
        assert pool.submit("find_thread").result(SOON) == threading.get_ident()


def test_an_in_process_call_runs_at_once_if_an_actor_is_idle():
    with ea.ActorPool(Worker, 2, backend="inline") as pool:
        busy = StoppingThread(lambda: pool.submit("wait").result(SOON)).start()
        wait_until(lambda: any(actor.state is ea.ActorState.BUSY for actor in pool.actors))
        assert [pool.submit("echo", i).result(SOON) for i in range(3)] == [0, 1, 2]
        GATE.set()
        assert busy.ends_within(SOON)


def test_a_call_that_an_actor_takes_while_it_is_aborted_does_not_continue_unseen():
    lines = Lines()
    for line in lines:
        pool = ea.ActorPool(Worker, 1, backend=BACKEND)
        running = pool.submit("wait")
        waiting = pool.submit("wait_again")
        aborting = StoppingThread(waiting.abort, line, POOL).start()
        lines.has_stopped = aborting.stops(or_sleeps=True)
        GATE.set()
        StoppingThread(lambda running=running: running.result(SOON)).start().wait_asleep()
        aborting.go_on()
        assert aborting.ends_within(SOON)
        # A thread cannot be ended in a call.
        assert aborting.result is True or isinstance(aborting.error, ea.ActorError), line
        OTHER_GATE.set()
        pool.close()
        GATE.clear()
        OTHER_GATE.clear()
    assert lines.count > 3


@pytest.mark.parametrize("backend", [BACKEND, "inline"])
def test_a_pool_whose_actors_are_closed_refuses_calls(backend):
    pool = ea.ActorPool(Worker, 2, backend=backend)
    for actor in pool.actors:
        actor.close()
    assert isinstance(pool.submit("echo", 1).exception(SOON), ea.ActorClosedError)
    pool.close()
    with pytest.raises(ea.ActorClosedError):
        pool.submit("echo", 1)


def test_deadlines_hold_for_calls_that_have_waited_for_an_actor():
    with ea.ActorPool(Worker, 1, backend="process", deadlines=ea.Deadlines(call=0.5)) as pool:
        first, second = pool.submit("wait"), pool.submit("wait")
        for future in (first, second):
            assert isinstance(future.exception(SOON), (ea.ActorTimeoutError, ea.RestartsExhaustedError))


def test_map_keeps_no_result_that_it_has_returned():
    with ea.ActorPool(lambda: np, 2, backend="process") as pool:
        for array in pool.map("zeros", range(6)):
            reference = weakref.ref(array)
            del array
            wait_until(lambda reference=reference: gc.collect() is not None and reference() is None)


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
@pytest.mark.parametrize("how", ["map", "map_unordered"])
def test_results_may_take_any_time(how, timeout):
    with ea.ActorPool(Worker, 1, backend="process") as pool:  # which starts while the caller waits
        assert list(getattr(pool, how)("echo", [1], timeout=timeout)) == [1]


@pytest.mark.parametrize("kind", [ea.ActorPool, ea.SessionPool])
def test_a_pool_whose_name_is_no_string_is_refused(kind):
    with pytest.raises(TypeError, match="name is 5: expected str"):
        kind(dict, 1, name=5)


def test_calls_are_refused_in_a_fork():
    with ea.ActorPool(Worker, 1, backend=BACKEND) as pool:
        child = os.fork()
        if child == 0:
            try:
                pool.submit("echo", 1)
            except ea.ActorClosedError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_crash_fails_one_call_and_no_other():
    with ea.ActorPool(Worker, 2, backend="process") as pool:
        futures = [pool.submit("echo", number) for number in range(20)]
        crash = pool.submit("crash")
        futures += [pool.submit("echo", number) for number in range(20, 200)]
        assert [future.result(SOON) for future in futures] == list(range(200))
        assert crash.exception(SOON).signal == signal.SIGKILL
        for _ in range(6):  # more often than one actor may be restarted by the policy of `spawn`
            assert isinstance(pool.submit("crash").exception(SOON), ea.ActorDiedError)
        assert pool.submit("echo", 1).result(SOON) == 1


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_calls_that_no_actor_can_run_say_so(max_restarts):
    policy = ea.RestartPolicy(max_restarts=max_restarts, backoff=0)
    with ea.ActorPool(Worker, 2, backend="process", restart=policy) as pool:
        crashes = [pool.submit("crash") for _ in range(2 * max_restarts + 2)]
        waiting = [pool.submit("echo", number) for number in range(3)]
        for crash in crashes:
            assert isinstance(crash.exception(SOON), ea.ActorDiedError)
        for future in [*waiting, pool.submit("echo", 9)]:
            error = future.exception(SOON)
            assert type(error) is ea.RestartsExhaustedError
            assert str(error).startswith(
                "cannot run echo: none of the 2 actors of the pool has a process, and its restar"
            )
            assert error.method == "echo"
            assert len(error.causes) == 2


def test_calls_of_a_pool_whose_actors_cannot_start_get_the_reason():
    def fail():
        raise LookupError("no such simulator")

    with ea.ActorPool(fail, 2, backend="process") as pool:
        errors = [pool.submit("echo", number).exception(SOON) for number in range(5)]
    assert {type(error) for error in errors} == {ea.ActorStartError}
    assert all("no such simulator" in str(error) for error in errors)


def test_calls_of_a_pool_whose_factory_crashes_end_with_an_error_that_names_restart(tmp_path):
    def crash():
        with (tmp_path / "starts").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGSEGV)

    with ea.ActorPool(crash, 2, backend="process") as pool:
        errors = [pool.submit("echo", number).exception(2 * SOON) for number in range(3)]
        assert {type(error) for error in errors} == {ea.RestartsExhaustedError}
        assert all("restart=" in str(error) and "SIGSEGV" in str(error) for error in errors)
        assert (tmp_path / "starts").stat().st_size == 2 * 10


def test_crashes_in_calls_of_a_pool_do_not_count_as_failed_starts():
    with ea.ActorPool(Worker, 1, backend="process") as pool:
        for _ in range(12):
            assert isinstance(pool.submit("crash").exception(SOON), ea.ActorDiedError)
        assert pool.submit("echo", 1).result(SOON) == 1
