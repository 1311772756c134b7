"""Programs that run in odd ways: isolated from planted modules, with long arguments, without a working directory."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from helpers import run_script

from envactors.system.choice import PORTABLE

pytestmark = pytest.mark.timeout(120)

# What interpreters import while they start and begin to work, and what workers need.
PLANTED = ("argparse", "cloudpickle", "json", "loky", "numpy", "pickle", "random", "socket", "threading", "typing")
BACKENDS = """
import os, sys
import envactors as ea
from envactors.remote import LocalNodes

def backends():
    yield from map(ea.ProcessBackend, METHODS)
    if REMOTE:
        yield ea.RemoteBackend(LocalNodes(1))

class Env:
    def flags(self):
        import sys
        return sys.flags.isolated, sys.flags.no_user_site, dict(os.environ)

    def last_argument(self):
        import sys
        return len(sys.argv[-1])
"""


def on_backends(code, methods, remote):
    """Returns a script that runs code with the actor of each backend."""
    head = BACKENDS.replace("METHODS", repr(methods)).replace("REMOTE", repr(remote and not PORTABLE))
    loop = "for backend in backends():\n    with ea.spawn(Env, backend=backend) as actor:\n"
    return head + loop + textwrap.indent(textwrap.dedent(code), " " * 8)


def methods_here(*methods):
    return [method for method in methods if method != "forkserver" or not PORTABLE]


def test_modules_planted_in_the_working_directory_are_not_imported(tmp_path):
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a planted module was imported')")
    methods = methods_here("forkserver", *(["loky"] if sys.version_info >= (3, 11) else []))
    code = """
    *flags, environ = actor.flags().result()
    isolated = getattr(backend, "start_method", None) != "loky"
    assert flags == [isolated, 1], (backend, flags)
    assert "PYTHONSAFEPATH" not in environ, backend
    """
    command = [sys.executable, "-I", "-c", on_backends(code, methods, remote=True)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_long_argument_reaches_workers():
    code = "import sys; sys.argv.append('x' * 150_000)\n"
    code += on_backends("assert actor.last_argument().result() == 150_000", methods_here("forkserver", "loky"), False)
    done = run_script(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_start_from_a_working_directory_that_was_removed(tmp_path):
    code = "import os; os.rmdir(os.getcwd())\n"
    code += on_backends("assert actor.last_argument().result() == 2", methods_here("forkserver"), True)
    code += """
with ea.spawn(Env, backend=ea.ProcessBackend("loky"), restart=ea.RestartPolicy(max_restarts=3, backoff=60)) as actor:
    error = actor.flags().exception()
assert isinstance(error, ea.ActorStartError), error
assert "the working directory was removed" in str(error), error
"""
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run_script(code, cwd=gone)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_daemonic_process_can_have_actors_over_loky():
    code = """
import multiprocessing
import envactors as ea

def work():
    with ea.spawn(lambda: "text", backend=ea.ProcessBackend("loky")) as actor:
        assert actor.upper().result() == "TEXT"
    assert multiprocessing.current_process().daemon

process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""
    done = run_script(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_caller_that_ignores_sigchld_gets_no_wrong_exit_code():
    code = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
import os, subprocess, sys
import envactors as ea

class Env:
    def run(self):
        return subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"]).returncode

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

for method in METHODS:
    with ea.spawn(Env, backend=ea.ProcessBackend(method)) as actor:
        assert actor.run().result() == 3, method  # workers do not ignore it
        error = actor.die().exception()
        known = (None, 9), "was killed by signal 9 (SIGKILL)"
        unknown = (None, None), "ended with an unknown status"
        status, text = known if method == "forkserver" else unknown
        assert (error.exitcode, error.signal) == status, (method, error)
        assert text in str(error), (method, error)
"""
    done = run_script(code.replace("METHODS", repr(methods_here("forkserver", "loky"))))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(PORTABLE, reason="nothing there needs /proc itself")
def test_without_proc_the_error_says_what_is_missing():
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not have a mount namespace of its own")
    code = """
import envactors as ea
with ea.spawn(list, restart=ea.RestartPolicy(max_restarts=3, backoff=60.0)) as actor:
    error = actor.copy().exception()
assert isinstance(error, ea.ActorStartError), error
assert "/proc is not mounted" in str(error), error
"""
    command = ["unshare", "-m", "sh", "-c", 'umount -l /proc; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("method", methods_here("forkserver", "loky"))
def test_an_actor_starts_while_its_caller_forks(method):
    """A child has copies of all pipes, also of the one at whose end `subprocess.Popen` waits."""
    code = """
    import os, sys, warnings
    import envactors as ea

    class Env:
        def answer(self):
            return 42

    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
    read, write = os.pipe()
    with ea.spawn(Env, backend=ea.ProcessBackend(sys.argv[1])) as actor:
        future, children = actor.answer(), []
        while not future.done() and len(children) < 100:
            pid = os.fork()
            if pid == 0:
                os.close(write)
                os.read(read, 1)  # until the caller has its result
                os._exit(0)
            children.append(pid)
        try:
            assert future.result(timeout=60) == 42
        finally:
            os.close(write)
            for pid in children:
                os.waitpid(pid, 0)
    """
    done = run_script(code, method)
    assert (done.returncode, done.stderr) == (0, "")
