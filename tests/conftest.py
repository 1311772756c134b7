"""Fixtures of all tests; one checks that a test leaves nothing behind."""

from __future__ import annotations

import os

# Before NumPy is imported here or in any program of the tests: the threads that OpenBLAS would start in each of them
# spin for a tenth of a second of a core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import compileall
import contextlib
import gc
import importlib
import multiprocessing.resource_tracker
import shutil
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import cloudpickle
import loky.backend.resource_tracker
import pytest
from agents import AgentServer
from budget import LONG, examples
from helpers import FORK_SERVER, kept_fork_server
from hypothesis import HealthCheck, settings
from leaks import describe, inventory, settled_inventory, targets
from portable import why_not_portable
from program_server import OF_SCRIPTS, ProgramServer
from slow import is_slow

from envactors import backends
from envactors.backends import process
from envactors.remote import local_nodes
from envactors.system.choice import PORTABLE

# Modules that import something with threads, which a process that forks must not have.
OF_FRAMEWORKS = {
    "test_dask",
    "test_first_mistakes_with_dropins",
    "test_jax",
    "test_lerobot",
    "test_mlagents",
    "test_openenv",
    "test_recipes",
    "test_recipes_training",
    "test_rllib_multi_agent",
    "test_sb3",
    "test_tianshou",
    "test_torchrl",
}
# Modules that test how processes start, or that run their own programs.
OF_FRESH_PROCESSES = {
    *(
        "test_backends",
        "test_docs",
        "test_notebooks",
        "test_scripts",
        "test_top",
    )
}

# Modules that test how agents of nodes start, or their helpers.
OF_FRESH_AGENTS = {"test_node_helpers", "test_odd_callers", "test_remote_starting"}


# Modules of which workers get nothing.
OF_COMMANDS = {"test_demo"}


# Folders of tests whose files are handed out first. What waits a lot comes first, so that there is something to do
# meanwhile; many small files come last, so that all processes end at about the same time.
FIRST = ("remote", "docs", "chaos", "process", "integrations", "simulation", "typing", "unit", "heart")


# Nothing here depends on the load of the machine or, except in long runs, on chance.
settings.register_profile(
    "tests",
    max_examples=examples(100),
    deadline=None,
    derandomize=not LONG,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("tests")


def pytest_configure():
    """Prepares this process and the programs that tests start."""
    # These get Ctrl-C, which shells ignore for what runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of interpreters import this package: none of them should have to compile it again.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Every program with actors listens there. Tests that look for programs must not find those of tests beside them,
    # whose monitors would start their threads.
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="ea")


def pytest_unconfigure():
    """Removes the directory of the sockets."""
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


def pytest_collection(session):
    """Where several processes collect the same tests, has each of them begin with other modules.

    Pytest rewrites the asserts of a module when it first imports it, which takes longer than anything else, and
    keeps the result on disk. So each process rewrites its share, and takes the rest from there. It also compiles its
    share for fork servers, which import modules with plain asserts.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    gc.disable()  # until all is imported
    folders = [path for path in map(Path, session.config.args) if path.is_dir()]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        sys.path.insert(0, str(file.parent))
        # Errors of a module are reported when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)
        sys.path.remove(str(file.parent))
        if "unit" not in file.parts:
            compileall.compile_file(file, quiet=1)


def pytest_collection_finish():
    """Excludes what the imports created from garbage collections, which makes them fast."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Orders files, marks slow tests, and on the portable system skips what it cannot do."""
    items.sort(key=lambda item: FIRST.index(item.path.parent.name))
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
    if PORTABLE:
        for item in items:
            if (reason := why_not_portable(item.nodeid)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def helper_processes(request):
    """Starts the processes that live as long as the caller, so that they do not count as leaks."""
    # A worker that gets an object of a test's module imports that module, and with it pytest and hypothesis: a quarter
    # of a second of a core, which copies of a server that has imported them are spared.
    items = [item for item in request.session.items if not item.nodeid.startswith("tests/unit/")]
    modules = {item.module.__name__ for item in items} - OF_FRESH_PROCESSES - OF_FRAMEWORKS - OF_COMMANDS
    if not PORTABLE:
        FORK_SERVER._preload = ("helpers", *sorted(modules))
    loky.backend.resource_tracker.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    with contextlib.suppress(ImportError):
        import gymnasium  # noqa: F401 # the server for callers that have it is another one
    with kept_fork_server({}):
        yield


def starts_nodes(module):
    """Return whether tests of a module start nodes, and it does not matter how their agents start."""
    names = vars(module)
    is_fresh = names["__name__"] in OF_FRESH_PROCESSES | OF_FRESH_AGENTS
    return not is_fresh and bool({"LocalNodes", "SlowNodes", "SessionStorm"} & {*names})


@pytest.fixture(scope="session")
def agent_server(request, helper_processes):
    """Starts the interpreter from which the agents of nodes are forked."""
    modules = {item.module for item in request.session.items}
    names = {module.__name__ for module in modules if starts_nodes(module)} - OF_FRAMEWORKS
    server = AgentServer(["helpers", *sorted(names)])
    yield server
    server.close()


@pytest.fixture(scope="session")
def program_server(helper_processes):
    """Starts the interpreter from which programs are forked to which it does not matter how they start."""
    server = ProgramServer("-W", "error", modules=OF_SCRIPTS)
    yield server
    server.close()


@pytest.fixture
def run_warm(program_server, tmp_path):
    """Does what `helpers.run_script` does, for scripts to which it does not matter how their interpreter starts."""

    def run(code, *arguments):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        return program_server.run(script, arguments, tmp_path, keeps_server=False)

    return run


@pytest.fixture(scope="module", autouse=True)
def quick_collections(helper_processes):
    """Excludes what has been imported since the tests were collected, and what earlier modules keep."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def quick_agents(request):
    """Where it does not matter how agents start, those of local nodes are forks of the session's server."""
    if PORTABLE or not starts_nodes(request.module):
        yield
        return
    server = request.getfixturevalue("agent_server")
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(local_nodes, "start_agent", server.start_agent)
        yield


@pytest.fixture(autouse=True)
def quick_starts(request, monkeypatch):
    """Where it does not matter how processes start, "process" stands for the session's helper.

    Where tests ask for fresh processes, what their module defines travels by value: each worker would otherwise import
    the module, and with it pytest, which takes a fifth of a second of a core. Nor do their helpers import gymnasium,
    which takes a tenth, although this process has.
    """
    module, is_fresh = request.module, "fresh_processes" in request.keywords
    if is_fresh:
        monkeypatch.setattr(process, "_LIKELY", "")
        cloudpickle.register_pickle_by_value(module)
    elif module.__name__ not in OF_FRESH_PROCESSES:
        resolve = backends.resolve
        monkeypatch.setattr(backends, "resolve", lambda name: FORK_SERVER if name == "process" else resolve(name))
    yield
    if is_fresh:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(autouse=True)
def nothing_left_behind(helper_processes, quick_agents):
    """Checks that each test leaves no descriptors, threads, processes, or shared memory entries behind."""
    before = inventory()
    yield
    after = settled_inventory(before)
    assert after == before, "\n".join([*(describe(pid) for pid in {*after.children} - {*before.children}), *targets()])
