"""Unit tests start no processes."""

from __future__ import annotations

import sys

import pytest

# What Python reports before it starts a process.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}

_watched = False


def _refuse_processes(event, arguments):
    if _watched and event in STARTS:
        raise AssertionError(f"a unit test starts a process ({event} of {arguments}): move it to tests/process")


@pytest.fixture(scope="session")
def helper_processes():
    """None: those of the session are for tests that start processes."""
    sys.addaudithook(_refuse_processes)  # which stays as long as this process does, and makes it slower


@pytest.fixture(autouse=True)
def no_processes(nothing_left_behind):
    """Fails a test that starts a process, when it does so."""
    global _watched
    _watched = True
    yield
    _watched = False
