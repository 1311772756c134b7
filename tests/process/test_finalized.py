"""At an orderly end of a worker the env is closed, dropped, and finalized, and exit handlers of env code run."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import logging.handlers
import multiprocessing.util
import os
import tempfile
import time
import weakref
from pathlib import Path

import pytest
from helpers import SOON, START_METHODS, is_gone, promised, run_script, wait_until

import envactors as ea
from envactors.testing import EchoEnv

MANY = ea.RestartPolicy(max_restarts=10, backoff=0.0)


class Untidy(EchoEnv):
    """Leaves everything to finalizers, which write what they do to a file."""

    def __init__(self, path):
        super().__init__()
        self.path = Path(path)
        self.myself = self  # so that only the garbage collector frees it
        self.directory = tempfile.TemporaryDirectory()
        atexit.register(self.write, path, "atexit")
        weakref.finalize(self, self.write, path, "finalize")
        self.write(path, self.directory.name)

    @staticmethod
    def write(path, text):
        with Path(path).open("a") as file:
            file.write(f"{text}\n")

    def step(self, action):
        return *super().step(action)[:3], True, {}  # each step ends the episode

    def close(self):
        super().close()
        self.write(self.path, "close")

    def __del__(self):
        self.write(self.path, "del")

    def hang_at_exit(self):
        atexit.register(time.sleep, 1000)

    def log_at_exit(self):
        atexit.register(logging.getLogger("simulator").warning, "bye")


def make(path):
    return lambda: Untidy(str(path))


def assert_finalized(path):
    """Check that one env was finalized, in order; clear the file."""
    directory, *steps = path.read_text().split()
    path.write_text("")
    assert steps[0] == "close"
    assert sorted(steps[1:-1]) == ["del", "finalize"]
    assert steps[-1] == "atexit"
    assert not Path(directory).exists()


@pytest.mark.fresh_processes
@pytest.mark.parametrize("method", START_METHODS)
def test_an_env_is_finalized_when_its_actor_is_renewed_and_closed(tmp_path, method):
    path = tmp_path / "steps"
    with ea.spawn(make(path), backend=ea.ProcessBackend(method)) as actor:
        actor.reset().result(SOON)
        assert actor.renew().result(SOON) == 1
        first, second = path.read_text().rsplit("\n/", 1)
        path.write_text(first)
        assert_finalized(path)
        path.write_text(f"/{second}")
    assert_finalized(path)


def test_an_env_is_finalized_when_its_process_is_recycled(tmp_path):
    paths = [tmp_path / "0", tmp_path / "1"]
    with ea.VectorEnv([make(path) for path in paths], recycle=ea.RecyclePolicy(max_steps=2)) as envs:
        envs.reset(seed=0)
        while not envs[0].incarnation or not envs[1].incarnation:
            envs.step([1, 1])
        for path in paths:
            assert {"close", "del", "finalize", "atexit"} <= {*path.read_text().split()}


class Failing(Untidy):
    """Raises in its second step."""

    has_stepped = False

    def step(self, action):
        if self.has_stepped:
            raise ValueError("no second step")
        self.has_stepped = True
        return super().step(action)


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_envs_are_finalized_when_one_of_their_process_has_raised(tmp_path, on_failure):
    paths = [tmp_path / "0", tmp_path / "1"]
    factories = [lambda: Untidy(paths[0]), lambda: Failing(paths[1])]  # the last one raises: none of them runs then
    with ea.VectorEnv(factories, envs_per_actor=2, on_failure=on_failure, restart=MANY, autoreset="disabled") as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        envs.reset(seed=0)
        with contextlib.suppress(ea.ActorError):
            envs.step([1, 1])
        envs.reset(seed=0)  # waits for the next process
        assert envs[0].incarnation >= 1
        for path in paths:
            assert {"close", "del", "finalize", "atexit"} <= {*path.read_text().split()}


def test_envs_are_finalized_when_the_factory_of_another_raises(tmp_path):
    path = tmp_path / "steps"

    def fail():
        raise ValueError("no second env")

    with pytest.raises(ea.ActorStartError, match="no second env"):
        ea.VectorEnv([make(path), fail], envs_per_actor=2)
    assert_finalized(path)


def test_a_hang_in_close_delays_the_next_process_by_the_close_deadline(tmp_path):
    class Hanging(Failing):
        def close(self):
            time.sleep(1000)

    with ea.VectorEnv(
        [lambda: Hanging(tmp_path / "0")],
        deadlines=ea.Deadlines(close=1.0),
        on_failure="renew",
        restart=MANY,
        autoreset="disabled",
    ) as envs:
        envs.reset(seed=0)
        envs.step([1])
        envs.reset(seed=0)
        pid, begun = envs[0].pid, time.monotonic()
        _, _, _, truncated, infos = envs.step([1])
        assert envs[0].state is ea.ActorState.RENEWING
        envs.reset(seed=0)
        assert 1.0 <= time.monotonic() - begun < promised(2.0)
        assert truncated[0]
        assert "no second step" in str(infos[0]["failure"])
        assert is_gone(pid)


class Registered(EchoEnv):
    """Relies on modules that register an exit handler once, when they are imported, which may be in another process."""

    def __init__(self, path):
        super().__init__()
        multiprocessing.util.Finalize(None, Untidy.write, (path, "multiprocessing"), exitpriority=0)
        log = logging.getLogger("simulator")
        log.addHandler(logging.handlers.MemoryHandler(100, target=logging.FileHandler(path)))
        log.warning("logging")
        executor = concurrent.futures.ThreadPoolExecutor(1)
        executor.submit(time.sleep, 0.2)
        executor.submit(Untidy.write, path, "executor")


@pytest.mark.fresh_processes
@pytest.mark.parametrize("method", START_METHODS)
def test_modules_that_finalize_at_exit_do_so_in_each_worker(tmp_path, method):
    path = tmp_path / "steps"
    with ea.spawn(Registered, str(path), backend=ea.ProcessBackend(method)) as actor:
        actor.reset().result(SOON)
    assert sorted(path.read_text().split()) == ["executor", "logging", "multiprocessing"]


class Cached(Untidy):
    """Is referred to by a cache of its class, which lives in a module."""

    @functools.cache  # noqa: B019 # the usual idiom of PettingZoo
    def space_of(self, agent):
        return agent


@pytest.mark.fresh_processes  # else this module would be preloaded, and its objects would be frozen
def test_an_env_is_finalized_although_a_cache_of_its_class_refers_to_it(tmp_path):
    path = tmp_path / "steps"
    with ea.spawn(Cached, str(path)) as actor:
        assert actor.space_of("pistonball").result(SOON) == "pistonball"
    assert_finalized(path)


def test_an_env_is_not_finalized_when_its_process_is_killed(tmp_path):
    path = tmp_path / "steps"
    with ea.spawn(make(path), restart=MANY) as actor:
        actor.reset().result(SOON)
        directory = Path(path.read_text().strip())
        actor.kill(restart=True)
        wait_until(lambda: actor.incarnation == 1)
        assert directory.exists()
        directory.rmdir()


def test_finalizers_have_until_the_close_deadline(tmp_path):
    with ea.spawn(make(tmp_path / "steps"), deadlines=ea.Deadlines(close=1.0)) as actor:
        actor.hang_at_exit().result(SOON)
        begun, pid = time.monotonic(), actor.pid
        assert actor.renew().result(SOON) == 1
        assert 1.0 <= time.monotonic() - begun < promised(2.0)
        assert is_gone(pid)
        actor.hang_at_exit().result(SOON)
        begun, pid = time.monotonic(), actor.pid
        actor.close()
        assert 1.0 <= time.monotonic() - begun < promised(2.0)
        assert is_gone(pid)


def test_exit_handlers_may_log(tmp_path, caplog):
    with ea.spawn(make(tmp_path / "steps")) as actor:
        actor.log_at_exit().result(SOON)
    wait_until(lambda: "bye" in caplog.messages)


TIDY = """
import atexit, os, weakref

def note(kind):
    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{kind}} ")

class Thing:
    pass

thing = Thing()
atexit.register(note, "atexit")
weakref.finalize(thing, note, "finalize")
"""


@pytest.mark.fresh_processes
@pytest.mark.skipif("forkserver" not in START_METHODS, reason="nothing is preloaded")
def test_exit_handlers_of_preloaded_modules_run_once_in_the_helper(tmp_path):
    (tmp_path / "tidy.py").write_text(TIDY.format(path=str(tmp_path / "pids")))
    done = run_script(
        """
        import os
        import envactors as ea

        class Env:
            def ids(self):
                import tidy
                return os.getppid()

        with ea.ActorPool(Env, 2, backend=ea.ProcessBackend(preload=["tidy"])) as pool:
            (helper,) = {actor.ids().result(30) for actor in pool.actors}
            pool.actors[0].renew().result(30)
        print(helper)
        """,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stderr == ""
    helper = int(done.stdout)
    words = (tmp_path / "pids").read_text().split()
    assert sorted(zip(words[1::2], map(int, words[::2]), strict=True)) == [("atexit", helper), ("finalize", helper)]
