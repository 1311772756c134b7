"""Workers that are threads."""

from __future__ import annotations

import os
import threading

import pytest

import envactors as ea


def test_a_thread_that_cannot_start_leaves_no_descriptors(monkeypatch):
    backend = ea.ThreadBackend()

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        backend.launch("actor", {}, None, 1)
    assert os.listdir("/proc/self/fd") == before
