"""Several threads wait for the same futures, pool, and vector: none sleeps once its condition holds."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
from helpers import FORK_SERVER, SOON, Counter, Gated, wait_until
from interleaving import Lines, StoppingThread

import envactors as ea
from envactors.testing import EchoEnv
from envactors.vector.table import POSTED

BACKENDS = [ea.ThreadBackend(), FORK_SERVER]
SECONDS_TO_END = 60.0  # for all of a round, on a machine that does much else besides


@pytest.fixture
def many_switches():
    """Threads take turns after each few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_side_by_side(*functions):
    """Runs each function in a thread; all of them have to end."""
    threads = [StoppingThread(function).start() for function in functions]
    late = [thread for thread in threads if not thread.ends_within(SECONDS_TO_END)]
    assert not late, f"{len(late)} of {len(threads)} threads sleep for ever"
    for thread in threads:
        if thread.error is not None:
            raise thread.error


def wait_for_the_same_futures(backend, rounds):
    with ea.spawn(Counter, backend=backend) as first, ea.spawn(Counter, backend=backend) as second:
        for _ in range(rounds):
            futures = [actor.add() for _ in range(3) for actor in (first, second)]

            def read(futures=futures):
                for future in random.sample(futures, len(futures)):
                    assert isinstance(future.result(), int)

            run_side_by_side(read, read, read, functools.partial(concurrent.futures.wait, futures))


def use_the_same_pool(backend, rounds):
    with ea.ActorPool(Counter, 3, backend=backend) as pool:

        def submit():
            futures = [pool.submit("echo", i) for i in range(10)]
            assert [future.result() for future in futures] == list(range(10))

        def go_through():
            assert list(pool.map("echo", range(10))) == list(range(10))
            assert sorted(pool.map_unordered("echo", range(10))) == list(range(10))

        def cancel():
            futures = [pool.submit("echo", i) for i in range(10)]
            for future in reversed(futures):
                future.cancel()
            for i, future in enumerate(futures):
                try:
                    assert future.result() == i
                except concurrent.futures.CancelledError:
                    assert future.cancelled()

        def look():
            for actor in pool.actors:
                assert actor.state in ea.ActorState
                assert actor.stats().failed == 0

        for _ in range(rounds):
            run_side_by_side(submit, go_through, cancel, cancel, look)


def wait_for_the_same_vector(backend, rounds):
    """One thread uses the facade, one after the other; the others wait for the futures that it has made."""
    with ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2, backend=backend) as envs:
        envs.reset(seed=0)
        facade = threading.Lock()

        def step():
            for _ in range(3):
                with facade:
                    envs.step([1, 2, 3, 4])
                    envs.send([5, 6], env_ids=[0, 2])
                    received = 0
                    while received < 2:
                        received += len(envs.recv(min_envs=1).env_ids)

        for _ in range(rounds):
            futures = envs.submit([1, 2, 3, 4])

            def read(futures=futures):
                for future in futures:
                    assert np.shape(future.result().obs) == np.shape(futures[0].result().obs)

            run_side_by_side(read, read, functools.partial(concurrent.futures.wait, futures))
            run_side_by_side(step, step, envs[0].get("env_id").result)


class Stuck(EchoEnv):
    """An env whose steps never end."""

    def step(self, action):
        while True:
            time.sleep(SOON)


USES = [wait_for_the_same_futures, use_the_same_pool, wait_for_the_same_vector]


@pytest.mark.parametrize("backend", BACKENDS, ids=["thread", "process"])
@pytest.mark.parametrize("use", USES)
def test_threads_that_wait_for_the_same_things_all_wake(many_switches, backend, use):
    use(backend, 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS, ids=["thread", "process"])
@pytest.mark.parametrize("use", USES)
def test_threads_that_wait_for_the_same_things_all_wake_for_long(many_switches, backend, use):
    use(backend, 300)


def test_a_step_may_stop_at_any_line_on_its_way_to_sleep():
    """Two processes end one after the other, the first one while the thread is about to wait for both."""
    restart = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
    with ea.VectorEnv([Stuck] * 2, backend=FORK_SERVER, restart=restart) as envs:
        lines = Lines()
        for line in lines:
            envs.reset()
            stepping = StoppingThread(lambda: envs.step([0, 0]), line, ("vector/waiting.py",)).start()
            lines.has_stopped = stepping.stops(or_sleeps=True)
            for actor in envs.actors:
                before = actor.incarnation
                os.kill(actor.pid, signal.SIGKILL)
                wait_until(lambda actor=actor, before=before: actor.incarnation > before)
                stepping.go_on()
                stepping.wait_asleep()
            assert stepping.ends_within(SECONDS_TO_END), f"stopped after {line} lines"
            assert isinstance(stepping.error, ea.VectorStepError)
    assert lines.count > 5


@pytest.mark.parametrize("backend", BACKENDS, ids=["thread", "process"])
def test_two_threads_step_different_envs_whatever_line_they_are_at(backend):
    modules = "vector_env.py", "vector/engine.py", "vector/waiting.py"
    with ea.VectorEnv([functools.partial(EchoEnv, 0), functools.partial(EchoEnv, 1)], backend=backend) as envs:
        envs.reset(seed=0)
        lines = Lines()
        for line in lines:
            threads, stopped = [], []
            for number in range(2):
                step = functools.partial(envs.step, [number + 3], env_ids=[number])
                threads.append(StoppingThread(step, line, modules).start())
                # The second thread sleeps if the first one has stopped with the lock of the vector.
                stopped.append(threads[number].stops(or_sleeps=True))
            lines.has_stopped = any(stopped)
            for thread in threads:
                thread.go_on()
                thread.wait_asleep()  # or until its end; it sleeps if the other one has the lock
            for number, thread in enumerate(threads):
                assert thread.ends_within(SECONDS_TO_END), f"stopped after {line} lines"
                assert thread.error is None, f"stopped after {line} lines"
                assert thread.result[0][0, [0, 2]].tolist() == [number, number + 3], f"stopped after {line} lines"
        assert lines.count > 50


@pytest.mark.parametrize("backend", BACKENDS, ids=["thread", "process"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_no_thread_waits_for_an_env_that_another_one_has_stepped(backend, order, tmp_path):
    paths = [tmp_path / str(number) for number in order]
    factories = [functools.partial(Gated, number, tmp_path / str(number)) for number in range(2)]
    with ea.VectorEnv(factories, backend=backend) as envs:
        envs.reset(seed=0)
        threads = []
        for number in order:
            step = functools.partial(envs.step, [number], env_ids=[number])
            threads.append(StoppingThread(step).start())
            threads[-1].wait_asleep()
        for number, path, thread in zip(order, paths, threads, strict=True):
            path.touch()
            assert thread.ends_within(SECONDS_TO_END), f"the step of env {number} sleeps on"
            assert thread.result[0][0, 0] == number


class Hanging(EchoEnv):
    def step(self, action):
        time.sleep(2 * SOON)


@pytest.mark.parametrize("rounds", [5, pytest.param(15, marks=pytest.mark.slow)])
def test_each_of_many_threads_that_step_different_envs_wakes_when_its_worker_dies(rounds):
    """They sleep at the same time, and no ring is for two of them."""
    restart = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)
    with ea.VectorEnv([Hanging] * 5, restart=restart) as envs:
        for _ in range(rounds):
            envs.reset()
            pids = [actor.pid for actor in envs.actors]

            def step(env_id):
                with pytest.raises(ea.VectorStepError):
                    envs.step([0], env_ids=[env_id])

            threads = [StoppingThread(functools.partial(step, env_id)).start() for env_id in range(5)]
            wait_until(lambda: envs._engine.table.status == bytes([POSTED]) * 5)
            for env_id in random.sample(range(5), 5):
                os.kill(pids[env_id], signal.SIGKILL)
                assert threads[env_id].ends_within(20.0), env_id  # something else wakes it some time later
                assert threads[env_id].error is None
