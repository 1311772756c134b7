"""envactors as scripts use it: no guard, piped, interrupted, killed.

They test the promises `caller-dies`, `ctrl-c`, `no-fork`, `main-script`, `threads`, and `import`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from helpers import promised, run_script, wait_until

UNGUARDED = """
import os
import envactors as ea

class Env:
    def whoami(self):
        return os.getpid(), __name__

print("top level")
actor = ea.spawn(lambda: Env())
pid, name = actor.whoami().result(20)
assert pid == actor.pid != os.getpid()
assert name == "__main__"
actor.close()
print("done")
"""


def run(arguments, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, timeout=100, check=False, **options
    )


def test_a_script_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = run([str(script)])
    assert (done.stdout, done.stderr, done.returncode) == ("top level\ndone\n", "", 0)


SPAWNING = """
import functools, multiprocessing
import gymnasium, numpy as np
import envactors as ea

@functools.cache
def zeros(count):
    return np.zeros(count, np.float32)

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return zeros(2), {}

gymnasium.register("Named-v0", entry_point=f"{__name__}:Mine")

def work():
    for make in (Mine, lambda: gymnasium.make("Named-v0", disable_env_checker=True)):
        with ea.VectorEnv([make]) as envs:
            envs.reset()
    with ea.Executor(max_workers=1) as pool:
        assert pool.submit(zeros, 2).result().size == 2
        assert type(pool.submit(Mine).result()) is Mine
    print(__name__)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""


def test_the_main_module_of_a_spawned_process(tmp_path):
    """`multiprocessing` imports the script again, under another name."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    done = run([str(script)])
    assert (done.stdout, done.stderr, done.returncode) == ("__mp_main__\n", "", 0)


def test_envs_that_main_has_registered(run_warm):
    done = run_warm(
        """
        import gymnasium, numpy as np
        import envactors as ea

        class Mine(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(-1, 1, (2,))
            action_space = gymnasium.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                return np.ones(2, np.float32), {}

        gymnasium.register("Mine-v0", entry_point=Mine)
        gymnasium.register("Pole-v9", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv")
        gymnasium.register("Other-v0", entry_point="__main__:Mine")
        with ea.VectorEnv([lambda: gymnasium.make("Mine-v0", disable_env_checker=True)] * 2) as envs:
            print(envs.reset()[0].sum())
        with ea.VectorEnv([lambda: gymnasium.make("Other-v0"), lambda: gymnasium.make("Other-v0")]) as envs:
            print(envs.reset()[0].sum())
        with ea.spawn(lambda: gymnasium.make("Pole-v9")) as actor:
            assert actor.reset().result(20)[0].shape == (4,)
        """
    )
    assert (done.stdout, done.stderr) == ("4.0\n4.0\n", "")


def test_the_same_piped_to_python():
    done = run(["-"], input=UNGUARDED)
    assert (done.stdout, done.stderr, done.returncode) == ("top level\ndone\n", "", 0)


def test_a_script_that_just_ends_closes_its_envs(tmp_path, run_warm):
    done = run_warm(
        """
        import sys, time, pathlib
        import envactors as ea

        class Env:
            def ping(self):
                return 1
            def close(self):
                pathlib.Path(sys.argv[1]).touch()

        actor = ea.spawn(lambda: Env())
        assert actor.ping().result(20) == 1
        """,
        str(tmp_path / "closed"),
    )
    # The worker has the caller's arguments, as a script's own functions would.
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert (tmp_path / "closed").exists()


def test_a_script_that_ends_with_hung_actors_ends_soon(run_warm):
    begun = time.monotonic()
    done = run_warm(
        """
        import time
        import envactors as ea
        from envactors.testing import FAULTS

        class Env:
            def ready(self):
                return True
            def hang(self):
                FAULTS["hang_in_c"]()
            def sleep(self):
                time.sleep(100)

        actors = [ea.spawn(Env) for _ in range(3)]
        [a.ready().result(20) for a in actors]
        futures = [actors[0].hang(), actors[1].sleep()]
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert time.monotonic() - begun < promised(10)


def start(code: str, *args: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


HANGING = """
    import json, sys, time
    import envactors as ea
    from envactors.testing import FAULTS

    class Env:
        def ready(self):
            return True
        def sleep(self):
            time.sleep(100)
        def hang_in_c(self):
            FAULTS["hang_in_c"]()

    backend = ea.ProcessBackend(start_method=sys.argv[1] if sys.argv[1:] else "loky")
    actors = [ea.spawn(lambda: Env(), backend=backend) for _ in range(3)]
    [actor.ready().result(20) for actor in actors]
    futures = [actors[0].hang_in_c(), actors[1].sleep()]
    time.sleep(0.2)
    print(json.dumps([actor.pid for actor in actors]), flush=True)
    futures[0].result()
"""


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_workers_have_no_terminal_which_would_stop_them(method):
    """Shells and password prompts look for a terminal beside the standard streams."""
    terminal, theirs = os.openpty()
    caller = start(
        """
        import fcntl, os, subprocess, sys, termios
        import envactors as ea

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.close(os.open("/dev/tty", os.O_RDWR))

        class Env:
            def read(self):
                try:
                    with open("/dev/tty", "rb", buffering=0) as file:
                        return file.read(1)
                except OSError as error:
                    return type(error).__name__
            def start_a_reader(self):
                return subprocess.run(["head", "-c1", "/dev/tty"], stderr=subprocess.DEVNULL).returncode

        backend = ea.ProcessBackend(start_method=sys.argv[1])
        with ea.spawn(Env, backend=backend, deadlines=ea.Deadlines(call=10.0)) as actor:
            print(actor.read().result(), actor.start_a_reader().result())
        """,
        method,
        stdin=theirs,
    )
    try:
        assert caller.communicate(timeout=100) == ("OSError 1\n", "")
    finally:
        os.close(theirs)
        os.close(terminal)


@pytest.mark.parametrize("also", ["caller only", "workers stopped"])
def test_when_the_caller_is_killed_everything_is_gone(also):
    caller = start(HANGING)
    pids = json.loads(caller.stdout.readline())
    family = [psutil.Process(caller.pid), *psutil.Process(caller.pid).children(recursive=True)]
    assert {*pids} <= {process.pid for process in family}
    if also == "workers stopped":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    os.kill(caller.pid, signal.SIGKILL)
    caller.communicate(timeout=100)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("method", ["loky", "forkserver"])
def test_ctrl_c_gives_one_traceback_and_a_quick_end(method):
    caller = start(HANGING, method)
    pids = json.loads(caller.stdout.readline())
    begun = time.monotonic()
    os.killpg(caller.pid, signal.SIGINT)  # what a terminal does: the whole foreground group
    out, err = caller.communicate(timeout=100)
    assert time.monotonic() - begun < promised(5)
    assert caller.returncode != 0
    assert out == ""
    assert err.count("Traceback (most recent call last)") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_caller_that_was_stopped_itself_blames_no_worker(run_warm):
    done = run_warm(
        """
        import os, signal, subprocess, sys, time
        import envactors as ea

        class Env:
            def nap(self):
                time.sleep(0.2)
                return "awake"

        with ea.spawn(Env, deadlines=ea.Deadlines(call=0.8)) as actor:
            actor.nap().result(20)
            stopper = subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 1.5; kill -CONT {os.getpid()}"])
            futures = [actor.nap()]
            print(futures[0].result(20))
            stopper.wait()
        """
    )
    assert (done.stdout, done.stderr) == ("awake\n", "")


def test_output_that_workers_print_before_they_exit_is_forwarded(run_warm):
    done = run_warm(
        """
        import envactors as ea

        class Env:
            def ready(self):
                return 1
            def close(self):
                print("good bye")

        actor = ea.spawn(Env, name="a")
        actor.ready().result(20)
        """
    )
    assert (done.stdout, done.stderr) == ("[a] good bye\n", "")


def test_ctrl_c_while_workers_start():
    caller = start(
        """
        import envactors as ea, time
        actors = [ea.spawn(lambda: object()) for _ in range(8)]
        print("spawned", flush=True)
        while True:
            time.sleep(0.1)  # a signal just before it begins does not end it
        """
    )
    caller.stdout.readline()
    begun = time.monotonic()
    os.killpg(caller.pid, signal.SIGINT)
    _, err = caller.communicate(timeout=100)
    assert time.monotonic() - begun < promised(5)
    assert err.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("backend", ["'loky'", "'forkserver'", "'forkserver', python=sys.executable"])
def test_workers_that_are_starting_survive_ctrl_c(backend):
    """The first start also starts helper processes, such as the resource trackers of multiprocessing and loky."""
    done = run_script(
        """
        import os, signal, sys, time
        import envactors as ea

        signal.signal(signal.SIGINT, lambda *_: None)  # as a notebook, the program survives Ctrl-C
        backend = eval(f"ea.ProcessBackend({sys.argv[1]})")
        with ea.ActorPool(lambda: object(), 3, backend=backend) as pool:
            while any(actor.state is ea.ActorState.STARTING for actor in pool.actors):
                os.killpg(0, signal.SIGINT)  # what a terminal does: the whole foreground group
                time.sleep(0.002)
            print([actor.state.value for actor in pool.actors], [actor.incarnation for actor in pool.actors])
        """,
        backend,
        start_new_session=True,
    )
    assert (done.stdout, done.stderr) == ("['idle', 'idle', 'idle'] [0, 0, 0]\n", "")


def test_an_interrupt_while_waiting_leaves_the_actors_usable(run_warm):
    """A notebook's user stops a cell and continues: no result is mixed up, nothing hangs."""
    done = run_warm(
        """
        import os, signal, threading, time
        import envactors as ea

        class Env:
            def echo(self, value):
                return value

        main = threading.main_thread().ident
        with ea.spawn(Env, restart=ea.RestartPolicy(max_restarts=10**6, backoff=0.0)) as actor:
            actor.echo(0).result(20)
            interrupts = wrong = 0
            for round in range(60):
                timer = threading.Timer(0.001 + 0.0003 * (round % 20), signal.pthread_kill, (main, signal.SIGINT))
                try:
                    timer.start()
                    i = 0
                    while True:
                        i += 1
                        wrong += actor.echo((round, i)).result(20) != (round, i)
                except KeyboardInterrupt:
                    interrupts += 1
                timer.join()
                try:
                    outcome = actor.echo(("after", round)).result(20)
                    wrong += outcome != ("after", round)
                except ea.ActorDiedError:
                    pass  # interrupted half-way through a change: the process was replaced
                assert actor.echo("fine").result(20) == "fine"
        print(interrupts, wrong)
        """,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["60", "0"]


def test_importing_is_light():
    measure = """
        import sys, time
        begun = time.process_time()  # which a busy machine does not prolong
        import {0}
        print(time.process_time() - begun)
        assert not {{"gymnasium", "torch", "loky"}} & sys.modules.keys()
    """

    def seconds(module):
        return min(float(run_script(measure.format(module)).stdout) for _ in range(3))

    assert seconds("envactors") < 2.5 * seconds("numpy")


def test_a_worker_never_loads_the_callers_half():
    done = run_script(
        """
        import sys
        import envactors as ea

        class Env:
            def modules(self):
                return [name for name in sys.modules if (name + ".").startswith(("envactors.actor.",
                        "envactors.vector.", "envactors.backends.", "envactors.process.starting.",
                        "envactors.process.helper.", "gymnasium.", "torch."))]

        with ea.spawn(Env) as actor:
            print(actor.modules().result(20))
        """
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_public_names_are_those_that_are_documented():
    import envactors as ea

    for name in ea.__all__:
        assert getattr(ea, name) is not None
        assert name in dir(ea)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ea.nothing  # noqa: B018
    assert ea.Future.__module__.startswith("concurrent.futures")


def test_torch_in_use_in_the_caller():
    torch = pytest.importorskip("torch")
    import envactors as ea

    torch.set_num_threads(2)
    torch.rand(500, 500) @ torch.rand(500, 500)

    class Env:
        def threads(self):
            import torch

            return torch.get_num_threads(), float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())

    with ea.spawn(Env) as actor:
        assert actor.threads().result(50) == (1, 300.0**3)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [
        ("gymnasium", "ActorVectorEnv", "gymnasium"),
        ("sb3", "ActorVecEnv", "stable_baselines3"),
        ("tianshou", "ActorVectorEnv", "tianshou"),
        ("torchrl", "ActorEnv", "torchrl"),
        ("mlagents", "ActorEnvManager", "mlagents_envs"),
        ("pettingzoo", "ActorParallelEnv", "pettingzoo"),
        ("dask", "DaskBackend", "distributed"),
    ],
)
def test_without_its_package_a_drop_in_says_which_extra_to_install(module, name, package, run_warm):
    done = run_warm(
        """
        import importlib, sys
        module, name, sys.modules[sys.argv[3]] = sys.argv[1], sys.argv[2], None
        package = importlib.import_module(f"envactors.integrations.{module}")
        try:
            getattr(package, name)
        except ImportError as error:
            assert f"pip install 'envactors[{module}]'" in str(error), error
        else:
            raise AssertionError
        """,
        module,
        name,
        package,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pool_of_sessions_that_nobody_closes_ends_with_the_program():
    done = run_script(
        """
        import atexit
        pools = []
        atexit.register(lambda: [pools[0].stats(), pools[0].close(), print("closed")])

        import envactors as ea

        pools.append(ea.SessionPool("envactors.testing:EchoEnv", 1))
        with pools[0].session() as env:
            print(env.echo(1).result(20))
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("1\nclosed\n", "", 0)
