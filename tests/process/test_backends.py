"""The conformance suite on every backend, and tests of each backend."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from conformance import BackendConformance
from helpers import FORK_SERVER, SOON, Counter, promised, run_script, wait_until

import envactors as ea
from envactors.process.starting import THREAD_CAPS
from envactors.system.cpus import cores
from envactors.testing import EchoEnv


class TestLoky(BackendConformance):
    def make_backend(self):
        return ea.ProcessBackend(start_method="loky")


class TestForkServer(BackendConformance):
    def make_backend(self):
        return FORK_SERVER


class TestThread(BackendConformance):
    def make_backend(self):
        return "thread"


class TestInline(BackendConformance):
    def make_backend(self):
        return "inline"


def test_names_stand_for_backends():
    assert repr(ea.ProcessBackend(start_method="loky")) == "ProcessBackend(start_method='loky', spin=True)"


@pytest.mark.parametrize("method", ["magic", "spawn", "fork", None, 3])
def test_an_unknown_start_method_is_a_value_error(method):
    expected = re.escape(f"start_method is {method!r}: expected 'forkserver' (on Linux) or 'loky'")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        ea.ProcessBackend(start_method=method)


@pytest.mark.parametrize("wrong", [0, 1, None, "no"])
def test_spin_must_be_a_bool(wrong):
    with pytest.raises(TypeError, match=f"spin is {wrong!r}: expected True or False"):
        ea.ProcessBackend(spin=wrong)


def test_inline_a_call_has_run_when_its_future_is_there():
    with ea.spawn(Counter, backend="inline") as actor:
        assert actor.add(2).done()
        assert actor.pid == os.getpid()
        calls = [actor.call("environ", "HOME") for _ in range(3)]
        assert all(call.done() for call in calls)


def test_inline_env_code_runs_in_the_callers_thread():
    class Env(Counter):
        def thread(self):
            return threading.get_ident()

    with ea.spawn(Env, backend="inline") as actor:
        assert actor.thread().result(0) == threading.get_ident()
    with ea.spawn(Env, backend="thread") as actor:
        assert actor.thread().result(SOON) != threading.get_ident()


def test_inline_a_step_can_be_interrupted():
    class Hangs(EchoEnv):
        def step(self, action):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(SOON)
            return super().step(action)

    with ea.VectorEnv([Hangs], backend="inline") as envs:
        envs.reset(seed=0)
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            envs.step([1])
        assert time.monotonic() - begun < SOON


def test_inline_calls_from_many_threads_run_one_at_a_time():
    with ea.spawn(Counter, backend="inline") as actor:
        threads = [threading.Thread(target=lambda: [actor.add().result(SOON) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert actor.get("count").result(0) == 200


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_backends_that_cannot_kill_reject_env_vars_abort_and_kill(backend):
    with pytest.raises(ValueError, match="shares the caller's environment"):
        ea.spawn(Counter, backend=backend, env_vars={"A": "b"})
    if backend == "thread":
        go, begun = threading.Event(), threading.Event()
        GATES["gate"] = (begun, go)
        with ea.spawn(Gated, backend=backend) as actor:
            running = actor.wait()
            assert begun.wait(SOON)
            for refused in (running.abort, actor.kill, lambda: actor.kill(restart=True)):
                with pytest.raises(ea.ActorError, match="cannot"):
                    refused()
            go.set()
            assert running.result(SOON) == "through"
    with ea.spawn(Counter, backend=backend) as actor:
        actor.add().result(SOON)
        actor.kill()
        with pytest.raises(ea.ActorClosedError):
            actor.add()


GATES: dict[str, tuple[threading.Event, threading.Event]] = {}


class Gated:
    """An env of this process: threads can share more than pickles."""

    def wait(self):
        begun, go = GATES["gate"]
        begun.set()
        assert go.wait(SOON)
        return "through"


def test_closing_a_thread_that_hangs_returns_in_time():
    begun, go = threading.Event(), threading.Event()
    GATES["gate"] = (begun, go)
    actor = ea.spawn(Gated, backend="thread")
    running = actor.wait()
    assert begun.wait(SOON)
    before = time.monotonic()
    actor.close(0.2)
    assert time.monotonic() - before < promised(1.2)
    error = running.exception(SOON)
    assert isinstance(error, ea.ActorDiedError)
    assert error.aborted
    go.set()


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_every_start_method_caps_threads_and_sets_variables(method, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    backend = ea.ProcessBackend(start_method=method)
    with ea.spawn(Counter, backend=backend, env_vars={"FLAVOUR": "salt"}) as actor:
        assert actor.environ("OMP_NUM_THREADS").result(SOON) == "1"
        assert actor.environ("FLAVOUR").result(SOON) == "salt"


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_an_actors_variables_reach_no_other_actor(method):
    backend = ea.ProcessBackend(start_method=method)
    with ea.spawn(Counter, backend=backend, env_vars={"FLAVOUR": "salt"}) as first:
        assert first.environ("FLAVOUR").result(SOON) == "salt"
        with ea.spawn(Counter, backend=backend) as second:
            assert second.environ("FLAVOUR").result(SOON) is None
        with ea.spawn(Counter, backend=backend, env_vars={"FLAVOUR": "sugar", "SIZE": "large"}) as third:
            assert third.environ("FLAVOUR").result(SOON) == "sugar"
            assert third.environ("SIZE").result(SOON) == "large"
        assert first.environ("SIZE").result(SOON) is None
        first.renew().result(SOON)
        assert first.environ("FLAVOUR").result(SOON) == "salt"


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_a_worker_has_the_callers_variables_as_they_are_when_it_starts(method, monkeypatch):
    backend = ea.ProcessBackend(start_method=method)
    monkeypatch.setenv("FLAVOUR", "salt")
    with ea.spawn(Counter, backend=backend) as actor:
        assert actor.environ("FLAVOUR").result(SOON) == "salt"
        for later in ("sugar", None):
            monkeypatch.delenv("FLAVOUR") if later is None else monkeypatch.setenv("FLAVOUR", later)
            actor.renew().result(SOON)
            assert actor.environ("FLAVOUR").result(SOON) == later


class Multiplies(Counter):
    def threads(self):
        large = np.ones((700, 700))
        large @ large
        return psutil.Process().num_threads()


@pytest.mark.fresh_processes
@pytest.mark.skipif(cores() < 2, reason="BLAS starts no more threads than there are cores")
@pytest.mark.parametrize("method", ["loky", "forkserver"])
@pytest.mark.parametrize("numbers", [("2", None), (None, "2")])
def test_the_number_of_threads_is_each_actors_own(method, numbers, monkeypatch):
    """This also holds for code that read it before the actor's process was forked."""
    for name in THREAD_CAPS:
        monkeypatch.delenv(name, raising=False)
    backend = ea.ProcessBackend(start_method=method)
    with contextlib.ExitStack() as cleanup:
        for number in numbers:
            env_vars = None if number is None else {"OMP_NUM_THREADS": number}
            actor = cleanup.enter_context(ea.spawn(Multiplies, backend=backend, env_vars=env_vars))
            assert actor.environ("OMP_NUM_THREADS").result(SOON) == (number or "1")
            assert actor.environ("OPENBLAS_NUM_THREADS").result(SOON) == (None if number else "1")
            assert actor.threads().result(SOON) == int(number or 1)


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_scripts_without_a_guard_under_every_start_method(method):
    done = run_script(
        """
        import sys
        import envactors as ea
        print("top level")

        class Env:
            def hello(self):
                return "hello"

        with ea.spawn(lambda: Env(), backend=ea.ProcessBackend(start_method=sys.argv[1])) as actor:
            print(actor.hello().result(30))
        """,
        method,
    )
    assert (done.stdout, done.stderr) == ("top level\nhello\n", "")


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_a_crash_is_noticed_while_siblings_hold_copies_of_descriptors(method):
    backend = ea.ProcessBackend(start_method=method)
    restart = ea.RestartPolicy(backoff=0.0)
    with ea.spawn(Counter, backend=backend, restart=restart) as one, ea.spawn(Counter, backend=backend) as sibling:
        assert [actor.add().result(SOON) for actor in (one, sibling)] == [1, 1]
        begun = time.monotonic()
        error = one.exit_now(5).exception(SOON)
        assert time.monotonic() - begun < promised(3.0)
        assert isinstance(error, ea.ActorDiedError)
        assert error.exitcode == 5
        os.kill(one.pid or one.call("pid").result(SOON), 9)
        assert one.add().result(SOON) == 1
        assert sibling.add().result(SOON) == 2


class Gambler:
    def rolls(self):
        return random.random(), np.random.rand()  # noqa: NPY002 # many envs do


@pytest.fixture(params=[np.random.MT19937, pytest.param(np.random.PCG64, marks=pytest.mark.soak)])
def global_bit_generator(request):
    """What `np.random.rand` and its like use, in the caller."""
    before, ours = np.random.get_bit_generator(), request.param(1)
    np.random.set_bit_generator(ours)
    yield ours
    np.random.set_bit_generator(before)


@pytest.mark.fresh_processes
@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_workers_have_global_random_numbers_of_their_own(method, global_bit_generator):
    before = random.getstate(), str(global_bit_generator.state)
    with ea.ActorPool(Gambler, 2, backend=ea.ProcessBackend(start_method=method)) as pool:
        rolls = [actor.rolls().result(SOON) for actor in pool.actors]
        pool.actors[0].renew().result(SOON)
        rolls.append(pool.actors[0].rolls().result(SOON))
    assert all(len({*numbers}) == 3 for numbers in zip(*rolls, strict=True)), rolls
    assert (random.getstate(), str(global_bit_generator.state)) == before  # the caller's are left alone


def test_env_code_may_start_processes_of_its_own():
    class Env(Counter):
        def pool(self):
            from concurrent.futures import ProcessPoolExecutor

            with ProcessPoolExecutor(1) as pool:
                return pool.submit(abs, -3).result(30)

        def spawned(self):
            import multiprocessing

            process = multiprocessing.get_context("spawn").Process(target=print, args=("grandchild",))
            process.start()
            process.join(30)
            return process.exitcode

        def nested(self):
            import envactors as ea

            with ea.spawn(Counter) as actor:
                return actor.add(5).result(30)

    with ea.spawn(Env) as actor:
        assert actor.pool().result(40) == 3
        assert actor.spawned().result(40) == 0
        assert actor.nested().result(40) == 5


@pytest.mark.parametrize("backend", ["process", "thread", "inline"])
def test_a_pool(backend):
    with ea.ActorPool(Counter, 3, backend=backend) as pool:
        assert len(pool) == 3
        assert list(pool.map("echo", range(20))) == list(range(20))
        assert sorted(pool.map_unordered("echo", range(20))) == list(range(20))
        assert pool.submit("echo", 1, b=2).result(SOON) == ((1,), {"b": 2})
        failed = pool.submit("fail", KeyError, "k")
        assert isinstance(failed.exception(SOON), KeyError)
    with pytest.raises(ea.ActorClosedError):
        pool.submit("echo", 1)


def test_a_pool_keeps_every_actor_busy_and_calls_can_be_cancelled(tmp_path):
    gate = tmp_path / "gate"
    with ea.ActorPool(Counter, 2, restart=ea.RestartPolicy(backoff=0.0)) as pool:
        blocked = pool.submit("wait_for_file", str(gate))
        assert [future.result(SOON) for future in [pool.submit("echo", i) for i in range(10)]] == list(range(10))
        second = pool.submit("wait_for_file", str(gate))
        waiting = pool.submit("echo", "never")
        assert waiting.cancel()
        assert waiting.cancelled()
        gate.touch()
        assert blocked.result(SOON) == second.result(SOON) == str(gate)
        assert isinstance(pool.submit("exit_now", 3).exception(SOON), ea.ActorDiedError)
        assert list(pool.map("echo", range(6))) == list(range(6))


def test_a_pool_rejects_invalid_sizes_and_options():
    for n in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="expected an int >= 1"):
            ea.ActorPool(Counter, n)
    with pytest.raises(TypeError):
        ea.ActorPool(Counter, 1, no_such_option=1)


def test_equal_results_in_every_backend():
    outcomes = []
    for backend in ("process", "thread", "inline"):
        with ea.VectorEnv([lambda i=i: EchoEnv(i, 4) for i in range(3)], backend=backend, envs_per_actor=2) as envs:
            rows = [envs.reset(seed=3)[0]]
            rows += [envs.step(np.full(3, i))[0] for i in range(10)]
            outcomes.append(np.stack(rows))
    assert all(np.array_equal(outcomes[0], other) for other in outcomes[1:])


class Unreachable(ea.ThreadBackend):
    def use(self, env_vars, runtime):
        raise OSError("no node answers")


def test_no_thread_is_left_if_a_backend_cannot_be_used():
    with pytest.raises(OSError, match="no node answers"):
        ea.spawn(EchoEnv, backend=Unreachable())
    wait_until(lambda: "envactors-loop" not in [thread.name for thread in threading.enumerate()])
