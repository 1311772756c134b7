"""A helper process that cannot be started for want of descriptors."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from envactors.process.helper import Helper, Settings
from envactors.system.choice import PORTABLE


@pytest.fixture
def few_descriptors():
    """Returns a function that leaves this many descriptors to be opened."""
    taken = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count):
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())

    def give_back():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while taken:
            os.close(taken.pop())

    try:
        yield leave, give_back
    finally:
        give_back()


@pytest.mark.skipif(PORTABLE, reason="helpers fork nothing")
@pytest.mark.parametrize("left", range(6))
def test_a_helper_without_descriptors_reports_it_and_leaks_none(few_descriptors, left):
    """What prevents its start is one error, and nothing is written about it later, when it is collected."""
    leave, give_back = few_descriptors
    leave(left)
    with pytest.raises(OSError) as raised:
        Helper(Settings(forks=True), None)
    give_back()
    assert raised.value.errno == errno.EMFILE
