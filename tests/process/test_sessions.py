"""Sessions end exactly once, with the right outcome, and leave nothing to the next one."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import signal
import threading
import time

import pytest
from helpers import SOON, wait_for_path, wait_until

import envactors as ea
from envactors.sessions.session import Session
from envactors.testing import FAULTS


class Desk:
    """A desk that remembers what was put on it, and fails on request."""

    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)
        return list(self.items)

    def reset(self):
        self.items.clear()

    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def block(self):
        """Block in C code that holds the GIL."""
        FAULTS["hang_in_c"]()

    def crash(self):
        os.write(2, b"the simulator says goodbye\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    def fail(self):
        raise ValueError("not on this desk")


def failing_factory():
    raise RuntimeError("no license")


@pytest.fixture
def pool(helper_processes):
    with ea.SessionPool(Desk, 2, standbys=1, deadlines=3.0) as pool:
        yield pool


@contextlib.contextmanager
def small_pool(factory=Desk, size=1, **options):
    with ea.SessionPool(factory, size, **options) as pool:
        yield pool


def settled(pool):
    """Returns the statistics once all processes of a pool are ready."""
    wait_until(lambda: pool.stats().idle >= pool.size)
    return pool.stats()


# One session ------------------------------------------------------------------------------------------------


def test_a_session_completes_and_a_new_process_serves_the_next(pool):
    with pool.session("first") as env:
        assert env.put("a").result(SOON) == ["a"]
        pid = env.pid().result(SOON)
        assert env.outcome is None
    assert isinstance(env.outcome, ea.Completed)
    assert env.outcome.task == "first"
    assert env.outcome.seconds > 0
    for _ in range(4):
        with pool.session() as env:
            assert env.put("b").result(SOON) == ["b"]
            assert env.pid().result(SOON) != pid


def test_calls_after_the_end_raise_and_never_reach_the_next_session(pool):
    with pool.session("past") as env:
        env.put(1).result(SOON)
    with pytest.raises(ea.ActorClosedError, match="cannot call 'put': the session 'past' has ended"):
        env.put(2)


class Editor:
    """Its methods have the names of what a session does by itself."""

    def finish(self, text):
        return f"finished {text}"

    def __getattr__(self, name):
        return lambda *args: name


def test_a_session_hides_no_method_of_the_env_but_those_that_are_documented(helper_processes):
    names = {name for name in dir(Session) if not name.startswith("_")}
    assert names == {"name", "outcome", "seconds", "call", "get", "set"}
    with small_pool(Editor) as pool, pool.session() as env:
        assert env.finish("it").result(SOON) == "finished it"
        assert env.fatal_error().result(SOON) == "fatal_error"
    assert isinstance(env.outcome, ea.Completed)


def test_exceptions_propagate_unchanged_and_fail_the_session(pool):
    with pytest.raises(ValueError, match="not on this desk"), pool.session("task") as env:
        env.fail().result(SOON)
    assert env.outcome.kind == "exception"
    assert isinstance(env.outcome.error, ValueError)
    assert not env.outcome.retryable


def test_a_crash_fails_the_session_even_if_its_error_is_caught(pool):
    with pool.session() as env:
        with pytest.raises(ea.ActorDiedError):
            env.crash().result(SOON)
        with pytest.raises(ea.ActorDiedError):
            env.put(1).result(SOON)
    assert env.outcome.kind == "died"
    assert env.outcome.retryable
    assert "says goodbye" in env.outcome.error.stderr_tail
    with pool.session() as env:
        assert env.put(1).result(SOON) == [1]


def test_a_call_that_blocks_in_c_code_ends_at_its_deadline(helper_processes):
    with small_pool(deadlines=0.5) as pool:
        with pytest.raises(ea.ActorTimeoutError), pool.session() as env:
            env.block().result(SOON)
        assert env.outcome.kind == "timeout"
        assert env.outcome.retryable
        assert "in block" in env.outcome.error.stacks


def test_leaving_the_block_kills_what_the_session_was_running(pool):
    with pool.session() as env:
        running = env.block()
        queued = env.put(1)
        wait_until(running.running)
    assert isinstance(env.outcome, ea.Completed)
    assert isinstance(running.exception(SOON), ea.ActorDiedError)
    assert queued.cancelled()


def test_with_fresh_reset_the_process_stays_and_reset_is_called_between_sessions(helper_processes):
    with small_pool(fresh="reset") as pool:
        with pool.session() as env:
            pid = env.pid().result(SOON)
            env.put(1).result(SOON)
        with pool.session() as env:
            assert env.pid().result(SOON) == pid
            assert env.put(2).result(SOON) == [2]
            with pytest.raises(ea.ActorDiedError):
                env.crash().result(SOON)
        with pool.session() as env:
            assert env.pid().result(SOON) != pid


def test_a_process_that_crashes_between_sessions_is_replaced(helper_processes):
    with small_pool() as pool:
        wait_until(lambda: pool.stats().idle == 1)
        actor = pool._handles[0]
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: actor.state is ea.ActorState.DEAD)
        with pool.session(timeout=SOON) as env:
            assert env.put(1).result(SOON) == [1]


# Waiting and starting ---------------------------------------------------------------------------------------


def test_sessions_begin_in_the_order_in_which_they_were_requested(helper_processes):
    order = []
    with small_pool() as pool, concurrent.futures.ThreadPoolExecutor(4) as threads:

        def work(number):
            with pool.session(number) as env:
                order.append(env.put(number).result(SOON))

        with pool.session() as env:
            env.put(0).result(SOON)
            futures = []
            for number in range(4):
                futures.append(threads.submit(work, number))
                wait_until(lambda: pool.stats().waiting == len(futures))
        for future in futures:
            future.result(SOON)
    assert order == [[0], [1], [2], [3]]


def test_no_more_sessions_than_size_run_even_if_standbys_are_ready(helper_processes):
    with small_pool(standbys=2) as pool:
        wait_until(lambda: pool.stats().idle == 3)
        with pool.session():
            with pytest.raises(TimeoutError, match=r"did not start within 0\.1 s"), pool.session("late", timeout=0.1):
                pass
            assert pool.stats().leased == 1
            assert pool.stats().waiting == 0
        assert pool.stats().outcomes["completed"] == 1


def test_a_factory_that_raises_fails_the_session_that_waits(helper_processes):
    with small_pool(failing_factory) as pool:
        for _ in range(2):
            with pytest.raises(ea.ActorStartError) as info, pool.session():
                pass
            assert "no license" in str(info.value.__cause__)
        assert pool.stats().outcomes["start"] == 2


def test_a_failed_start_fails_one_of_the_sessions_that_wait(tmp_path, helper_processes):
    def fail_once():
        with contextlib.suppress(FileExistsError):
            (tmp_path / "started").mkdir()
            wait_for_path(tmp_path / "requested")
            raise RuntimeError("no license")
        return Desk()

    def use(name):
        with pool.session(name, timeout=SOON) as env:
            return env.put(name).result(SOON)

    with small_pool(fail_once) as pool, concurrent.futures.ThreadPoolExecutor(3) as threads:
        futures = []
        for name in range(3):
            futures.append(threads.submit(use, name))
            wait_until(lambda: pool.stats().waiting == len(futures))
        (tmp_path / "requested").touch()
        with pytest.raises(ea.ActorStartError):
            futures[0].result(SOON)
        assert [future.result(SOON) for future in futures[1:]] == [[1], [2]]


def test_a_process_whose_reset_raises_is_replaced(helper_processes):
    class Stuck(Desk):
        def reset(self):
            raise ValueError("it cannot be cleared")

    with small_pool(Stuck, fresh="reset") as pool:
        for _ in range(3):
            with pool.session(timeout=SOON) as env:
                assert env.put(1).result(SOON) == [1]
        assert pool.stats().outcomes["completed"] == 3


def test_a_wedged_start_ends_after_its_timeout(helper_processes):
    with small_pool(functools.partial(time.sleep, 1000), start_timeout=0.5) as pool:
        with pytest.raises(ea.ActorStartError), pool.session():
            pass
        assert pool.stats().outcomes["start"] == 1


def test_closing_the_pool_ends_sessions_and_those_that_wait(helper_processes):
    with small_pool() as pool, concurrent.futures.ThreadPoolExecutor(2) as threads:
        begun = threading.Event()

        def hang():
            with pool.session() as env:
                begun.set()
                try:
                    env.block().result(SOON)
                finally:
                    hung.append(env)

        def wait():
            with pool.session():
                raise AssertionError("it does not begin")

        hung = []
        hanging = threads.submit(hang)
        assert begun.wait(SOON)
        waiting = threads.submit(wait)
        wait_until(lambda: pool.stats().waiting == 1)
        pool.close()
        assert isinstance(hanging.exception(SOON), ea.ActorError)
        assert isinstance(waiting.exception(SOON), ea.ActorClosedError)
        assert hung[0].outcome.kind == "cancelled"
        with pytest.raises(ea.ActorClosedError, match="the pool is closed"), pool.session():
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, r"size=0\): expected an int >= 1"),
        ({"fresh": "env"}, "expected one of 'process', 'reset'"),
        ({"standbys": -1}, r"standbys=-1\): expected an int >= 0"),
        ({"idle_timeout": -1}, "expected seconds >= 0"),
        ({"start_timeout": float("nan")}, "expected seconds >= 0"),
        ({"backend": "thread"}, "expected a backend that can kill a hung env"),
    ],
)
def test_invalid_session_pool_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        ea.SessionPool(Desk, **{"size": 1, **options})


# Idle sessions ----------------------------------------------------------------------------------------------


def test_an_abandoned_session_ends_and_gives_its_actor_back(helper_processes):
    with small_pool(idle_timeout=0.3) as pool:
        abandoned = pool.session("abandoned").__enter__()
        with pool.session("next", timeout=SOON) as env:
            assert env.put(1).result(SOON) == [1]
        assert abandoned.outcome.kind == "idle"
        assert not abandoned.outcome.retryable
        assert "idle_timeout=0.3" in str(abandoned.outcome.error)
        assert "most recent call first" in abandoned.outcome.error.stacks
        with pytest.raises(ea.ActorClosedError, match="has ended"):
            abandoned.put(1)


def test_a_long_call_is_not_idle(helper_processes):
    with small_pool(idle_timeout=0.3) as pool:
        with pool.session() as env:
            assert env.sleep(1.0).result(SOON) == 1.0
            assert env.put(1).result(SOON) == [1]
        assert isinstance(env.outcome, ea.Completed)


def test_calls_keep_a_session_from_being_idle(helper_processes):
    with small_pool(idle_timeout=1.0) as pool:
        with pool.session() as env:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                env.put(1).result(SOON)
                time.sleep(0.05)
        assert isinstance(env.outcome, ea.Completed)


# Asyncio ----------------------------------------------------------------------------------------------------


def test_sessions_work_with_asyncio(pool):
    async def episode(number):
        async with pool.session(number) as env:
            return await env.put(number)

    async def main():
        return await asyncio.gather(*map(episode, range(6)))

    assert asyncio.run(main()) == [[number] for number in range(6)]


@pytest.mark.parametrize("method", ["block", "sleep"])
def test_cancelling_a_task_in_a_call_kills_its_process(pool, method):
    sessions = []

    async def hang():
        async with pool.session("hang") as env:
            sessions.append(env)
            await (env.block() if method == "block" else env.sleep(1000))

    async def main():
        task = asyncio.ensure_future(hang())
        while not sessions:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sessions[0].outcome.kind == "cancelled"


def test_cancelling_a_task_that_waits_gives_up_its_place(pool):
    async def hold(entered, leave):
        async with pool.session():
            entered.release()
            await leave.wait()

    async def main():
        entered, leave = asyncio.Semaphore(0), asyncio.Event()
        holders = [asyncio.ensure_future(hold(entered, leave)) for _ in range(2)]
        for _ in holders:
            await entered.acquire()
        waiting = asyncio.ensure_future(hold(entered, leave))
        while not pool.stats().waiting:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.stats().waiting == 0
        leave.set()
        await asyncio.gather(*holders)

    asyncio.run(main())


def test_waiting_longer_than_the_timeout_raises_in_asyncio(pool):
    async def main():
        async with pool.session(), pool.session():
            with pytest.raises(TimeoutError, match="did not start"):
                async with pool.session("late", timeout=0.1):
                    pass

    asyncio.run(main())


def test_a_timeout_of_zero_takes_an_actor_that_is_free(pool):
    async def main():
        async with pool.session(timeout=0) as env:
            return await env.put(1)

    settled(pool)
    with pool.session(timeout=0) as env:
        assert env.put(1).result(SOON) == [1]
    settled(pool)
    assert asyncio.run(main()) == [1]


# Runs -------------------------------------------------------------------------------------------------------


def episode(env, task):
    """Does what the task says; returns what is on the desk."""
    if task == "crash":
        with contextlib.suppress(ea.ActorDiedError):
            env.crash().result(SOON)
    elif task == "fail":
        env.fail().result(SOON)
    elif task == "hang":
        env.block().result(SOON)
    return env.put(task).result(SOON) if task != "crash" else ["not a result"]


async def async_episode(env, task):
    return await asyncio.get_running_loop().run_in_executor(None, episode, env, task)


def outcomes_of(pool, how, tasks, function=None, **options):
    """Returns the outcomes of tasks by one of the four ways to run them, by task."""
    function = function or (async_episode if "coroutines" in how else episode)
    if how.startswith("run"):
        outcomes = list(pool.run(function, tasks, **options))
    else:

        async def collect():
            return [outcome async for outcome in pool.arun(function, tasks, **options)]

        outcomes = asyncio.run(collect())
    assert len(outcomes) == len({outcome.task for outcome in outcomes})
    return {outcome.task: outcome for outcome in outcomes}


HOWS = pytest.mark.parametrize("how", ["run", "run coroutines", "arun", "arun coroutines"])


@HOWS
def test_a_run_yields_one_outcome_per_task(pool, how):
    outcomes = outcomes_of(pool, how, ["a", "crash", "b", "fail", "c", "hang"])
    kinds = {task: getattr(outcome, "kind", "completed") for task, outcome in outcomes.items()}
    assert kinds == {
        **dict.fromkeys("abc", "completed"),
        "crash": "died",
        "fail": "exception",
        "hang": "timeout",
    }
    assert [outcomes[task].value for task in "abc"] == [["a"], ["b"], ["c"]]


class AsyncEpisode:
    """An object that is called like a coroutine function."""

    async def __call__(self, env, task):
        return await async_episode(env, task)


def make_async_episode(env, task):
    return async_episode(env, task)


@pytest.mark.parametrize("how", ["run", "arun"])
@pytest.mark.parametrize(
    "function",
    [
        AsyncEpisode(),
        functools.partial(async_episode),
        functools.partial(AsyncEpisode()),
        make_async_episode,
    ],
    ids=["object", "partial", "partial of an object", "function"],
)
def test_whatever_returns_a_coroutine_is_a_coroutine_function(pool, how, function):
    outcomes = outcomes_of(pool, how, ["a", "crash", "b"], function)
    assert outcomes["a"].value == ["a"]
    assert outcomes["b"].value == ["b"]
    assert outcomes["crash"].kind == "died"


class Flaky:
    """Crashes in the first two sessions of each task."""

    def __init__(self):
        self.tries = collections.Counter()

    def __call__(self, env, task):
        self.tries[task] += 1
        if self.tries[task] <= 2:
            env.crash().result(SOON)
        return env.put(task).result(SOON)


@pytest.mark.parametrize("how", ["run", "arun"])
def test_retries_repeat_a_task_in_a_new_session(pool, how):
    flaky = Flaky()
    outcomes = outcomes_of(pool, how, ["a", "b"], flaky, retries=2)
    assert all(isinstance(outcome, ea.Completed) for outcome in outcomes.values())
    assert flaky.tries == {"a": 3, "b": 3}
    failing = outcomes_of(pool, how, ["c"], Flaky(), retries=1)
    assert failing["c"].kind == "died"


def test_failures_of_an_episode_itself_are_not_retried(pool):
    tries = []

    def fail(env, task):
        tries.append(task)
        raise KeyError(task)

    (outcome,) = pool.run(fail, ["x"], retries=5)
    assert outcome.kind == "exception"
    assert tries == ["x"]


def test_tasks_are_taken_one_by_one(pool):
    taken = []

    def tasks():
        for number in itertools.count():
            taken.append(number)
            yield number

    run = pool.run(episode, tasks())
    assert [next(run).task for _ in range(3)]
    run.close()
    assert len(taken) <= 3 + pool.size


def test_an_episode_begins_before_the_next_task_is_taken(pool):
    begun = threading.Event()

    def play(env, task):
        begun.set()
        return task

    def tasks():
        yield 1
        assert begun.wait(SOON)
        yield 2

    assert sorted(outcome.value for outcome in pool.run(play, tasks())) == [1, 2]


@pytest.mark.parametrize("how", ["run", "arun"])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_tasks_that_end_with_an_exception_lose_no_outcome(pool, how, count):
    seen = []

    def tasks():
        yield from map(str, range(count))
        raise LookupError("no more")

    def run():
        seen.extend(outcome.task for outcome in pool.run(episode, tasks()))

    async def arun():
        async for outcome in pool.arun(episode, tasks()):
            seen.append(outcome.task)  # noqa: PERF401 # what comes before the exception counts

    with pytest.raises(LookupError, match="no more"):
        run() if how == "run" else asyncio.run(arun())
    assert sorted(seen) == sorted(map(str, range(count)))


def test_closing_a_run_ends_its_sessions(helper_processes):
    with small_pool(size=2) as pool:
        begun = []

        def hang(env, task):
            if task == 0:
                return task
            begun.append(task)
            return env.block().result()

        run = pool.run(hang, range(100))
        assert next(run).task == 0
        wait_until(lambda: begun)
        run.close()
        wait_until(lambda: pool.stats().idle == 2)
        assert pool.stats().outcomes["cancelled"] >= 1


def test_cancelling_the_consumer_of_arun_ends_its_sessions(helper_processes):
    with small_pool(size=2) as pool:

        async def consume(function):
            async for _ in pool.arun(function, range(10)):
                pass

        async def hang(env, task):
            await env.block()

        def hang_in_thread(env, task):
            env.block().result()

        async def main(function):
            task = asyncio.ensure_future(consume(function))
            while pool.stats().leased < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        for function in (hang, hang_in_thread):
            asyncio.run(main(function))
            wait_until(lambda: pool.stats().idle == 2)
        assert pool.stats().outcomes["cancelled"] == 4


def yielding(env, task):
    yield task


async def yielding_async(env, task):
    yield task


def test_invalid_episodes_and_retries_are_rejected_at_once(pool):
    with pytest.raises(TypeError, match="expected a function or coroutine function"):
        pool.run("episode", [])
    with pytest.raises(ValueError, match="expected an int >= 0"):
        pool.arun(episode, [], retries=-1)
    for generator in (yielding, yielding_async):
        with pytest.raises(TypeError, match=r"expected a function .*without yield"):
            pool.run(generator, [])
    for tasks in (5, None, yielding_async(None, None)):
        with pytest.raises(TypeError, match="expected an iterable, such as a list or a generator, but no async one"):
            pool.arun(episode, tasks)


def test_statistics_count_sessions_and_time_starts(helper_processes):
    with small_pool(size=2) as pool:
        outcomes = list(pool.run(episode, ["a", "fail", "b", "crash"]))
        stats = settled(pool)
        assert stats.outcomes == {
            **dict.fromkeys(stats.outcomes, 0),
            **collections.Counter(getattr(outcome, "kind", "completed") for outcome in outcomes),
        }
        assert 0 <= stats.start_p50 <= stats.start_p99
        assert 0 < stats.session_p50 <= stats.session_p99
        assert "2 idle, 0 waiting" in repr(pool)
