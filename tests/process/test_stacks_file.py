"""A worker whose stacks are read again and again does not keep them all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from helpers import SOON, Counter, park, wait_until

import envactors as ea
from envactors.process.stacks import READY, ProcessStacks, StacksFile
from envactors.system.choice import PORTABLE


class Crowd(Counter):
    def gather(self, count):
        for _ in range(count):
            threading.Thread(target=park, daemon=True).start()


def size_of_stacks(pid):
    (size,) = (
        path.stat().st_size for path in Path(f"/proc/{pid}/fd").iterdir() if "envactors-stacks" in str(path.readlink())
    )
    return size


@pytest.mark.skipif(PORTABLE, reason="the file is found through /proc")
def test_the_stacks_of_a_worker_take_a_bounded_amount_of_memory():
    with ea.spawn(Crowd) as actor:
        actor.gather(30).result(SOON)
        wait_until(lambda: actor.stacks(SOON).count("in park") == 30)
        lengths = []
        for _ in range(40):
            lengths.append(len(actor.stacks(SOON)))
            assert "in park" in actor.stacks(SOON)
        assert size_of_stacks(actor.pid) < 1 << 17
        assert 80 * min(lengths) > 1 << 17  # all of them together would not fit


class Busy:
    """A process that ignores the first signal, as while another thread is at the end of an earlier answer."""

    pid = os.getpid()

    def __init__(self, file):
        self.file = file
        self.signals = 0

    def send_signal(self, _number):
        self.signals += 1
        if self.signals == 2:
            os.pwrite(self.file.fileno(), b"Thread 1 (most recent call first):\n", len(READY))


def test_a_request_that_was_ignored_is_made_again():
    file = StacksFile()
    os.pwrite(file.fileno(), READY, 0)
    assert ProcessStacks(Busy(file), file, may_interrupt=True).wait(SOON).startswith("Thread 1")
