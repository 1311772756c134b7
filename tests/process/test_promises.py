"""Promises of `docs/guides/reliability.md` without other test modules: all start methods, and the texts of errors."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest
from helpers import (
    FORK_SERVER,
    SOON,
    START_METHODS,
    UP,
    Counter,
    ExplodesOnArrival,
    FaultyEcho,
    Mortal,
    is_gone,
    park,
    promised,
    run_script,
    wait_until,
)

import envactors as ea
from envactors.process.starting import THREAD_CAPS
from envactors.testing import FAULTS, EchoEnv, FaultyEnv

METHODS = START_METHODS
MANY = ea.RestartPolicy(max_restarts=50, backoff=0.0)
NEVER = ea.RestartPolicy(max_restarts=0)
DEATHS = {"kill": (None, signal.SIGKILL), "segfault": (None, signal.SIGSEGV), "exit": (3, None)}


@pytest.fixture(params=METHODS)
def backend(request):
    return FORK_SERVER if request.param == "forkserver" else ea.ProcessBackend(start_method=request.param)


@contextlib.contextmanager
def forked_copy():
    """A process that was forked off this one, as a data loader's are: it holds copies of all descriptors."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# 1, 2: a worker crashes or hangs ----------------------------------------------------------------------------


def test_a_crash_is_reported_within_a_second_however_processes_start(backend):
    """In a call, and while idle; siblings, and a fork of the caller, hold copies of descriptors."""
    with (
        ea.spawn(Mortal, name="mortal", restart=MANY, backend=backend) as actor,
        ea.spawn(Counter, backend=backend) as sibling,
    ):
        took = []
        for number, (how, status) in enumerate(DEATHS.items(), 1):
            assert actor.add().result(SOON) == 1
            assert sibling.add().result(SOON) == number
            pid, incarnation = actor.pid, actor.incarnation
            with forked_copy():
                begun = time.monotonic()
                error = actor.end(how).exception(SOON)
                took.append(time.monotonic() - begun)
            assert isinstance(error, ea.ActorDiedError)
            assert (error.exitcode, error.signal) == status
            assert (error.actor, error.index, error.method) == ("mortal", 0, "end")
            assert (error.pid, error.incarnation) == (pid, incarnation)
            assert "last words" in error.stderr_tail
        assert actor.add().result(SOON) == 1
        with forked_copy():
            os.kill(actor.pid, signal.SIGKILL)
            begun = time.monotonic()
            wait_until(lambda: actor.incarnation == len(DEATHS) + 1)
            took.append(time.monotonic() - begun)
        assert [actor.add().result(SOON), sibling.add().result(SOON)] == [1, len(DEATHS) + 1]
        assert sibling.incarnation == 0
    assert min(took) < promised(1.0), took  # the others may have waited for a core


def test_a_crash_in_the_factory_is_reported_within_a_second_however_processes_start(backend, tmp_path):
    def broken(how):
        (tmp_path / how).write_text(repr(time.monotonic()))
        Mortal().end(how)

    with ea.spawn(Counter, backend=backend) as sibling:
        assert sibling.add().result(SOON) == 1
        actors = {how: ea.spawn(lambda how=how: broken(how), backend=backend) for how in DEATHS}
        told, took = {}, []
        for how, actor in actors.items():
            # Called as soon as it is told, while the others may do anything.
            actor.add().add_done_callback(lambda future, how=how: told.update({how: (time.monotonic(), future)}))
        wait_until(lambda: told.keys() == DEATHS.keys())
        for how, (when, future) in told.items():
            error = future.exception()
            assert isinstance(error, ea.ActorStartError)
            assert (error.exitcode, error.signal) == DEATHS[how]
            took.append(when - float((tmp_path / how).read_text()))
            assert "last words" in error.stderr_tail
            assert "last words" in str(error)
            assert actors[how].state is ea.ActorState.DEAD
        assert sibling.add().result(SOON) == 2
        for actor in actors.values():
            actor.close()
    assert min(took) < promised(1.0), took  # the others may have waited for a core


def test_a_deadline_is_enforced_however_processes_start(backend):
    class Env(Counter):
        def hang(self):
            threading.Thread(target=park, daemon=True).start()
            FAULTS["hang_in_c"]()

    with ea.spawn(Env, restart=MANY, backend=backend, deadlines=ea.Deadlines(call=0.4)) as actor:
        took = []
        for how in ("C", "stopped"):
            assert actor.options(deadline=SOON).add().result(SOON) == 1
            pid = actor.pid
            if how == "stopped":
                os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            error = (actor.hang() if how == "C" else actor.add()).exception(SOON)
            took.append(time.monotonic() - begun)
            assert isinstance(error, ea.ActorTimeoutError)
            assert is_gone(pid)
            if how == "C":
                assert "in hang" in error.stacks
                assert "in park" in error.stacks, "of all threads"
                assert error.stacks.rstrip() in str(error)
    assert 0.4 <= min(took) < promised(1.4), took


def test_the_start_deadline_ends_c_code_too():
    def hang():
        FAULTS["hang_in_c"]()

    with ea.spawn(hang, deadlines=ea.Deadlines(start=UP)) as actor:
        error = actor.add().exception(SOON)
        assert UP <= error.elapsed < UP + 1.5
        assert isinstance(error, ea.ActorStartError)
        assert isinstance(error.__cause__, ea.ActorTimeoutError)
        assert "in hang" in error.__cause__.stacks
        assert "in hang" in str(error)


# 4, 5, 20: renewal ---------------------------------------------------------------------------------------


class Watchful(ea.ProcessBackend):
    """Notes, whenever it starts a process, whether one that it has started is still there."""

    def __init__(self):
        super().__init__(start_method="loky")
        self.pids = []
        self.alive = []

    def use(self, *arguments):
        use = super().use(*arguments)
        start = use.start

        def start_watched(*arguments):
            self.alive += [pid for pid in self.pids if not is_gone(pid)]
            worker = start(*arguments)
            self.pids.append(worker.pid)
            return worker

        use.start = start_watched
        return use


@pytest.mark.fresh_processes
def test_a_process_is_started_only_after_the_one_that_it_replaces_has_ended(tmp_path):
    made = tmp_path / "made"

    def factory():
        with made.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return FaultyEnv()

    backend = Watchful()
    with ea.VectorEnv(
        [factory], on_failure="renew", restart=MANY, deadlines=ea.Deadlines(step=0.3), backend=backend
    ) as envs:
        envs.reset(seed=0)
        for fault in ("crash", "exit", "stop", "raise", "unpicklable"):
            envs[0].arm(fault).result(SOON)
            assert "failure" in envs.step([1])[4][0]
            assert envs.step([1])[0][0, 1] == 0
        envs[0].renew().result(SOON)
        envs[0].arm("sleep").result(SOON)
        envs.send([1])
        envs[0].kill(restart=True)
        assert "failure" in envs.recv().infos[0]
        envs.step([1])
        assert envs[0].incarnation == 7
    assert backend.alive == []
    # Each env was made in its own process, and none in the caller's.
    assert [int(pid) for pid in made.read_text().split()] == backend.pids
    assert len({*backend.pids, os.getpid()}) == 9


# 12: wrong input -----------------------------------------------------------------------------------------


def test_actions_of_another_shape_or_dtype_are_rejected_in_one_line():
    with ea.VectorEnv([EchoEnv] * 2) as envs:
        envs.reset(seed=0)
        for actions, said in (
            (np.zeros((2, 3), np.int64), r"\(2, 3\): expected \(2,\), dtype int64"),
            ([0.5, 1.5], "float64.*expected int64"),
            (["left", "right"], "expected int64"),
            (np.zeros(3, np.int64), "3 actions for 2 envs"),
        ):
            for call in (envs.step, envs.send, envs.submit):
                with pytest.raises(ea.SpaceMismatchError, match=said) as caught:
                    call(actions)
                assert "\n" not in str(caught.value)
        assert envs.step([1, 2])[0][:, 1].tolist() == [1, 1], "nothing was sent"


# 16, 17: the end -----------------------------------------------------------------------------------------


def test_close_closes_the_healthy_beside_the_hung(tmp_path):
    class Env(FaultyEcho):
        def close(self):
            (tmp_path / f"closed {self.env_id}").touch()

    envs = ea.VectorEnv([lambda i=i: Env(EchoEnv(i)) for i in range(4)], deadlines=ea.Deadlines())
    envs.reset(seed=0)
    envs[1].arm("hang_in_c").result(SOON)
    envs[2].arm("crash").result(SOON)
    envs.send([1] * 4)
    begun = time.monotonic()
    envs.close(1.0)
    assert time.monotonic() - begun < promised(3.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed 0", "closed 3"]
    envs.close()


@pytest.mark.parametrize("when", ["atexit before", "atexit after", "__del__", "global __del__", "never", "twice"])
def test_close_may_come_from_anywhere(when, tmp_path):
    begun = time.monotonic()
    done = run_script(
        """
        import atexit, sys, pathlib
        when, directory = sys.argv[1], pathlib.Path(sys.argv[2])
        late = []
        if when == "atexit before":  # then it runs after everything of the library's
            atexit.register(lambda: [envs.close() for envs in late])
        import envactors as ea
        from envactors.testing import FaultyEnv

        class Env(FaultyEnv):
            def close(self):
                (directory / str(ea.current_actor().index)).touch()

        class Trainer:
            def __init__(self):
                self.envs = ea.VectorEnv([Env] * 3)
                self.envs.reset()
            def __del__(self):
                if "__del__" in when:
                    self.envs.close(1.0)

        trainer = Trainer()
        late.append(trainer.envs)
        trainer.envs[1].arm("hang_in_c").result(20)
        trainer.envs.send([1] * 3)
        if when == "atexit after":
            atexit.register(trainer.envs.close, 1.0)
        elif when == "__del__":
            late.clear()
            del trainer
        elif when == "twice":
            trainer.envs.close(1.0)
            trainer.envs.close(1.0)
        """,
        when,
        str(tmp_path),
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert time.monotonic() - begun < SOON
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


@pytest.mark.parametrize("method", METHODS)
def test_helper_processes_end_with_the_caller_without_leak_warnings(method):
    code = """
        import json, sys
        import psutil
        import envactors as ea
        from envactors.testing import EchoEnv

        backend = ea.ProcessBackend(start_method=sys.argv[1])
        seen = set()
        for turn in range(2):
            with ea.VectorEnv([EchoEnv] * 2, backend=backend) as envs:
                envs.reset(seed=0)
                envs[0].renew().result(30)
                seen |= {process.pid for process in psutil.Process().children(recursive=True)}
            if sys.argv[1] != "loky":  # whose resource tracker stays until the caller ends
                assert psutil.Process().children(recursive=True) == []
        print(json.dumps(sorted(seen)))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), method],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    pids = json.loads(done.stdout)
    assert len(pids) >= 6  # four workers and two helpers
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), patience=5.0)


# 19, 23: the caller's world ------------------------------------------------------------------------------


@pytest.mark.fresh_processes
def test_the_caller_is_never_forked():
    forks = []
    os.register_at_fork(before=lambda: forks.append(threading.current_thread().name))
    for method in METHODS:
        with ea.spawn(Counter, restart=MANY, backend=ea.ProcessBackend(start_method=method)) as actor:
            actor.add().result(SOON)
            os.kill(actor.pid, signal.SIGKILL)
            assert actor.add().result(SOON) == 1
        assert forks == []


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_numerical_libraries_use_one_thread_from_the_first(method, tmp_path, monkeypatch):
    """The number is set before anything is imported: what the library has started by then counts too."""
    for name in THREAD_CAPS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "asks_when_imported.py").write_text("import os\nASKED = os.environ.get('FLAVOUR')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def factory():
        import asks_when_imported

        class Env:
            def asked(self):
                return asks_when_imported.ASKED

            def threads(self):
                large = np.ones((700, 700))
                large @ large
                return psutil.Process().num_threads()

        return Env()

    backend = ea.ProcessBackend(start_method=method)
    with ea.spawn(factory, backend=backend, env_vars={"FLAVOUR": "salt"}) as actor:
        assert actor.threads().result(SOON) == 1
        assert actor.asked().result(SOON) == "salt"
    assert "OMP_NUM_THREADS" not in os.environ
    assert "FLAVOUR" not in os.environ


# Errors ----------------------------------------------------------------------------------------


def tells(error, actor, env, incarnation, method, pid, elapsed):
    """Whether an error says all this, in its first line too."""
    line = str(error).partition("\n")[0]
    assert (error.actor, error.index, error.incarnation, error.method) == (actor, env, incarnation, method)
    assert error.pid == pid
    for part in (f"{actor!r}", f"env {env}", f"pid {pid}", f"incarnation {incarnation}", *([method] if method else [])):
        assert part in line, (part, line)
    if elapsed is None:
        assert error.elapsed is None
    else:
        assert elapsed <= error.elapsed < elapsed + 3.0
        assert f"after {error.elapsed:.3f} s" in line
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again).keys()) == (str(error), vars(error).keys())


class Witness(Counter):
    def sleep_and(self, what):
        print("evidence", file=sys.stderr)
        time.sleep(0.2)
        if what == "exit":
            os._exit(5)
        return {"lock": threading.Lock, "bomb": ExplodesOnArrival}[what]()


def test_every_actor_error_names_the_actor_the_call_and_the_time():
    with ea.spawn(Witness, name="witness", restart=ea.RestartPolicy(max_restarts=2, backoff=0.0)) as actor:
        actor.add().result(SOON)
        pid = actor.pid
        for what, verb in (("lock", "pickled"), ("bomb", "unpickled")):
            error = actor.sleep_and(what).exception(SOON)
            assert isinstance(error, ea.SerializationError)
            tells(error, "witness", 0, 0, "sleep_and", pid, 0.2)
            assert f"cannot be {verb}" in str(error)
        error = actor.echo(threading.Lock()).exception(SOON)
        assert (error.actor, error.index, error.method, error.elapsed) == ("witness", 0, "echo", None)
        error = actor.sleep_and("exit").exception(SOON)
        tells(error, "witness", 0, 0, "sleep_and", pid, 0.2)
        assert "exit code 5" in str(error)
        assert str(error).endswith("evidence")
        actor.add().result(SOON)
        pid = actor.pid
        error = actor.options(deadline=0.3).hang_in_c().exception(SOON)
        tells(error, "witness", 0, 1, "hang_in_c", pid, 0.3)
        assert "deadline of 0.3 s" in str(error)
        actor.add().result(SOON)
        pid = actor.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: actor.state is ea.ActorState.DEAD)
        error = actor.add().exception(SOON)
        assert isinstance(error, ea.RestartsExhaustedError)
        tells(error, "witness", 0, 2, "add", pid, None)
        tells(error.causes[-1], "witness", 0, 2, None, pid, None)
        assert "while idle" in str(error.causes[-1])
        assert "SIGKILL" in str(error)


@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
@pytest.mark.parametrize("incarnation", [0, 1])
def test_errors_of_a_start_tell_whose_factory_it_was(how, incarnation):
    def factory(index):
        print(f"making {index}", file=sys.stderr)
        if index == 1 and ea.current_actor().incarnation == incarnation:
            time.sleep(0.1)
            if how == "raise":
                raise LookupError("no such ROM")
            if how == "exit":
                os._exit(4)
            time.sleep(100)
        return EchoEnv(index)

    options = {"envs_per_actor": 3, "restart": NEVER, "deadlines": ea.Deadlines(start=UP + 0.1), "backend": FORK_SERVER}
    factories = [lambda i=i: factory(i) for i in range(3)]
    if incarnation == 0:
        with pytest.raises(ea.ActorStartError) as caught:
            ea.VectorEnv(factories, **options)
        error = caught.value
    else:
        with ea.VectorEnv(factories, **options) as envs:
            error = envs.actors[0].renew().exception(SOON)
    tells(error, "envs-0-2", 1, incarnation, None, error.pid, 0.1)
    assert error.stderr_tail == "making 0\nmaking 1"
    assert str(error).endswith("making 0\nmaking 1")
    if how == "raise":
        assert "LookupError('no such ROM')" in str(error)
        assert isinstance(error.__cause__, LookupError)
    elif how == "exit":
        assert "exit code 4" in str(error)
    else:
        tells(error.__cause__, "envs-0-2", 1, incarnation, None, error.pid, 0.6)
        assert "in factory" in error.__cause__.stacks


def test_errors_of_a_vector_tell_which_env_and_where():
    with ea.VectorEnv(
        [lambda i=i: FaultyEnv(EchoEnv(i)) for i in range(3)], envs_per_actor=3, deadlines=ea.Deadlines(step=0.5)
    ) as envs:
        envs.reset(seed=0)
        pid = envs[1].pid
        envs[1].arm("raise").result(SOON)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1] * 3)
        said = f"1 of 3 envs failed in step; env 1 (actor 'envs-0-2', pid {pid}, incarnation 0): RuntimeError: raised"
        assert str(caught.value).startswith(said)
        envs[1].arm("sleep").result(SOON)
        with pytest.raises(ea.VectorTimeoutError) as late:
            envs.step([1] * 3, timeout=0.2)
        assert 1 in late.value.env_ids
        assert late.value.timeout == 0.2
        assert f"Env {late.value.env_ids[0]} is in actor 'envs-0-2', pid {pid}, incarnation 0" in str(late.value)
        failures = {}
        while len(failures) < 2:
            with pytest.raises(ea.VectorStepError) as caught:
                envs.recv()
            failures |= caught.value.failures
        tells(failures[1], "envs-0-2", 1, 0, "step", pid, 0.5)
        tells(failures[1].__cause__ or failures[1], "envs-0-2", 1, 0, "step", pid, 0.5)
        assert (failures[2].index, failures[2].pid, failures[2].elapsed) == (2, pid, None)
        assert "step of env 1" in str(failures[2])
