"""What every test shares: nothing may be left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.resource_tracker
import signal

import loky.backend.resource_tracker
import pytest
from helpers import FORK_SERVER, kept_fork_server
from portable import why_not_portable

import envactors as ea
from envactors import backends
from envactors.system.choice import PORTABLE
from envactors.testing.leaks import describe, inventory, settled_inventory

# Which import what is not for a process that forks: it may have threads.
OF_FRAMEWORKS = {"test_dask", "test_mlagents", "test_sb3", "test_tianshou", "test_torchrl"}
# Whose point is how processes start, or that run programs of their own.
OF_FRESH_PROCESSES = {
    *(
        "test_backends",
        "test_bench",
        "test_demo",
        "test_docs",
        "test_fork_server",
        "test_notebooks",
        "test_scripts",
        "test_top",
    )
}


def pytest_configure():
    """Has the programs that tests start get Ctrl-C, which shells ignore for what runs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Under the stand-in for other platforms, skips what it cannot do."""
    if PORTABLE:
        for item in items:
            if (reason := why_not_portable(item.nodeid)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def helper_processes(request):
    """Starts the processes that stay until the caller ends, so that they count as having been there."""
    # A worker that gets an object of a test's module imports that module, and with it pytest and hypothesis: a quarter
    # of a second of a core, which copies of a server that has imported them are spared.
    modules = {item.module.__name__ for item in request.session.items} - OF_FRESH_PROCESSES - OF_FRAMEWORKS
    if not PORTABLE:
        FORK_SERVER._preload = ("helpers", *sorted(modules))
    loky.backend.resource_tracker.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    with contextlib.suppress(ImportError):
        import gymnasium  # noqa: F401 # the server for callers that have it is another one
    with kept_fork_server({}):
        gc.collect()
        gc.freeze()  # what the imports made stays: collecting is quick from here on
        yield


@pytest.fixture(autouse=True)
def quick_starts(request, monkeypatch):
    """Where it does not matter how processes start, "process" stands for the session's fork server."""
    if request.module.__name__ not in OF_FRESH_PROCESSES and "fresh_processes" not in request.keywords:
        resolve = backends.resolve
        monkeypatch.setattr(backends, "resolve", lambda name: FORK_SERVER if name == "process" else resolve(name))


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.soak)], ids=["shared memory", "channels"])
def both_planes(request, monkeypatch):
    """Runs a test with shared memory, and among the long runs without it too."""
    monkeypatch.setitem(ea.VectorEnv.__init__.__kwdefaults__, "shared_memory", request.param)


@pytest.fixture(autouse=True)
def nothing_left_behind(helper_processes):
    """Every test: as many descriptors, threads, processes and shared memory entries as before."""
    before = inventory()
    yield
    after = settled_inventory(before)
    assert after == before, "\n".join(describe(pid) for pid in {*after.children} - {*before.children})
