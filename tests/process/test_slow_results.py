"""Results that take long to unpickle: the calls, deadlines and crashes of other actors do not wait for that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import pytest
from helpers import SOON, Counter, fork_server

import envactors as ea
from envactors.testing import EchoEnv

SLOW = 2.5  # seconds
being_read = threading.Event()


def wake_up(seconds):
    being_read.set()
    time.sleep(seconds)
    return "slow"


class Slow:
    """Takes long to unpickle."""

    def __reduce__(self):
        return wake_up, (SLOW,)


class SlowError(Exception):
    def __reduce__(self):
        return wake_up_to_fail, (SLOW,)


def wake_up_to_fail(seconds):
    time.sleep(seconds)
    return SlowError()


class Sluggish(Counter):
    def slow(self):
        return Slow()

    def slow_error(self):
        raise SlowError


class SluggishEnv(EchoEnv):
    """Has an info, or a failure, that takes long to unpickle."""

    def step(self, action):
        *result, info = super().step(action)
        if action == 7:
            raise SlowError
        return *result, {**info, "slow": Slow()} if action == 8 else info


def check_deadlines_beside(ask):
    """Has a deadline of 1 s pass while a result is read; returns what ``ask`` has returned."""
    sleeps = fork_server(may_spin=False)  # a caller that spins reads its reply itself
    hangs = ea.spawn(Counter, deadlines=ea.Deadlines(call=1.0))
    with hangs, ea.spawn(Counter, backend=sleeps) as adds:
        adds.add(1).result(SOON)
        hangs.add(1).result(SOON)
        asked = ask()
        begin = time.monotonic()
        late = hangs.sleep(100)
        assert adds.add(1).result(SOON) == 2
        assert time.monotonic() - begin < SLOW - 1.0
        with pytest.raises(ea.ActorTimeoutError):
            late.result(SOON)
        assert time.monotonic() - begin < SLOW - 0.5
        return asked


@pytest.mark.parametrize("method", ["slow", "slow_error"])
def test_a_result_that_takes_long_to_read_delays_no_deadline(method):
    with ea.spawn(Sluggish) as actor:
        actor.add(1).result(SOON)
        future = check_deadlines_beside(lambda: actor.call(method))
        if method == "slow":
            assert future.result(SOON) == "slow"
        else:
            assert isinstance(future.exception(SOON), SlowError)


@pytest.mark.parametrize("action", [7, 8])
def test_a_submitted_step_that_takes_long_to_read_delays_no_deadline(action):
    with ea.VectorEnv([SluggishEnv] * 2) as envs:
        envs.reset(seed=0)
        slow, quick = check_deadlines_beside(lambda: envs.submit([action, 1]))
        assert quick.result(SOON).obs[2] == 1
        if action == 8:
            assert slow.result(SOON).info["slow"] == "slow"
        else:
            assert isinstance(slow.exception(SOON), SlowError)
        assert envs.step([3, 4])[0][:, 2].tolist() == [3, 4]


def step_at_once(envs):
    return envs.step([8, 1])[4][0]


def send_and_receive(envs):
    envs.send([8, 1])
    batch = envs.recv()
    return batch.infos[batch.env_ids.tolist().index(0)]


@pytest.mark.parametrize("step", [step_at_once, send_and_receive])
def test_a_step_in_another_thread_that_takes_long_to_read_delays_no_deadline(step):
    with ea.VectorEnv([SluggishEnv] * 2) as envs:
        envs.reset(seed=0)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(step(envs)))

        def ask():
            being_read.clear()
            thread.start()
            assert being_read.wait(SOON)  # by the only thread that waits for replies
            return thread

        check_deadlines_beside(ask).join()
        assert seen[0]["slow"] == "slow"


def test_a_result_that_nobody_waits_for_reaches_the_callbacks():
    class Brief(Slow):
        def __reduce__(self):
            return wake_up, (0.01,)

    class Briefly(Counter):
        def slow(self):
            return Brief()

    async def wait_in_a_loop(future):
        return await asyncio.wait_for(asyncio.wrap_future(future), SOON)

    with ea.spawn(Briefly) as actor:
        told = threading.Event()
        future = actor.slow()
        future.add_done_callback(lambda _future: told.set())
        assert told.wait(SOON)
        assert future.done()
        assert not concurrent.futures.wait([actor.slow() for _ in range(3)], SOON).not_done
        assert asyncio.run(wait_in_a_loop(actor.slow())) == "slow"


READ = []  # one entry for each time that a `Counted` was unpickled


def count_reading():
    READ.append(threading.get_ident())
    return len(READ)


class Counted:
    def __reduce__(self):
        return count_reading, ()


class Counting(Counter):
    def counted(self):
        return Counted()


def test_a_result_is_read_once_by_several_threads_that_wait_for_it():
    with ea.spawn(Counting) as actor:
        actor.add(1).result(SOON)
        for turn in range(20):
            READ.clear()
            results, gate = [], threading.Barrier(4)
            futures = []

            def ask(gate=gate, futures=futures, results=results):
                gate.wait()
                results.append(futures[0].result(SOON))

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            futures.append(actor.counted())
            gate.wait()
            for thread in threads:
                thread.join()
            assert (turn, results) == (turn, [1, 1, 1])


def wait_for_another_thread():
    being_read.set()
    assert has_stepped.wait(SOON)
    return "read"


class Waiting:
    """Unpickling it ends once another thread has stepped."""

    def __reduce__(self):
        return wait_for_another_thread, ()


class WaitingEnv(EchoEnv):
    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "waiting": Waiting()} if action == 8 else info


has_stepped = threading.Event()


@pytest.mark.parametrize("ask", ["step", "send"])
def test_other_threads_step_other_envs_while_a_result_is_read(ask):
    with ea.VectorEnv([WaitingEnv] * 2) as envs, concurrent.futures.ThreadPoolExecutor(1) as threads:
        envs.reset()
        for event in (being_read, has_stepped):
            event.clear()
        if ask == "send":
            envs.send([8], env_ids=[0])
        slow = threads.submit(envs.recv) if ask == "send" else threads.submit(envs.step, [8], env_ids=[0])
        assert being_read.wait(SOON)
        envs.step([1], env_ids=[1], timeout=SOON)
        has_stepped.set()
        infos = slow.result(SOON)[-1] if ask == "step" else slow.result(SOON).infos
        assert infos[0]["waiting"] == "read"


class SluggishReset(Counter):
    def reset(self):
        return Slow()


def test_a_reset_between_two_sessions_that_takes_long_to_read_delays_no_deadline():
    with ea.SessionPool(SluggishReset, 1, fresh="reset") as pool:

        def end_session():
            with pool.session() as env:
                assert env.add(1).result(SOON) == 1
            being_read.clear()
            being_read.wait(0.3)

        check_deadlines_beside(end_session)
        with pool.session(timeout=SOON) as env:
            assert env.add(1).result(SOON) == 2
