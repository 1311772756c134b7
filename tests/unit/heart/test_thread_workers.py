"""Workers that are threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from envactors.backends.thread import ThreadWorker


def test_a_thread_that_cannot_start_leaves_no_descriptors(monkeypatch):
    def count_descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    before = count_descriptors()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        ThreadWorker("actor", None, 1)
    assert count_descriptors() == before
