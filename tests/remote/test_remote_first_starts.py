"""Starts on nodes: a factory that raises is not called again, and only so many workers start at a time."""

from __future__ import annotations

import contextlib

import pytest
from helpers import SOON, Counter, wait_until

import envactors as ea
from envactors.remote import LocalNodes

pytestmark = pytest.mark.timeout(120)


def test_a_factory_that_raises_on_a_node_is_called_once(tmp_path):
    def make():
        with (tmp_path / "calls").open("a") as file:
            file.write("x")
        raise LookupError("no such env")

    policy = ea.RestartPolicy(max_restarts=3, backoff=0.0)
    with ea.spawn(make, backend=ea.RemoteBackend(LocalNodes(1)), restart=policy) as actor:
        error = actor.reset().exception(60)
        assert isinstance(error, ea.ActorStartError)
        assert isinstance(error.__cause__, LookupError)
        assert actor.stats().restarts == 0
    assert (tmp_path / "calls").read_text() == "x"


def counter_after(path):
    """Return a factory that waits for a file."""

    def make():
        wait_until(path.exists)
        return Counter()

    return make


def test_a_node_starts_the_next_worker_once_one_is_ready(tmp_path):
    backend = ea.RemoteBackend(LocalNodes(1), max_starting=1)
    path = tmp_path / "go"
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(ea.spawn(counter_after(path), backend=backend)) for _ in range(3)]
        futures = [actor.add(1) for actor in actors]
        path.touch()
        assert [future.result(SOON) for future in futures] == [1, 1, 1]


def test_the_start_deadline_of_a_worker_that_waits_on_its_node_begins_with_its_own_start(tmp_path):
    backend = ea.RemoteBackend(LocalNodes(1), max_starting=1)
    deadlines = ea.Deadlines(start=3.0)
    with ea.spawn(counter_after(tmp_path / "go"), backend=backend) as first:
        wait_until(lambda: first.pid)
        with ea.spawn(Counter, backend=backend, deadlines=deadlines) as second:
            # It has the same deadline, and begins later.
            witness = ea.spawn(counter_after(tmp_path / "never"), deadlines=deadlines)
            assert isinstance(witness.add(1).exception(SOON), ea.ActorStartError)
            (tmp_path / "go").touch()
            assert first.add(1).result(SOON) == 1
            assert second.add(1).result(SOON) == 1
            assert second.incarnation == 0


def test_a_worker_that_has_waited_on_its_node_has_a_start_deadline(tmp_path):
    backend = ea.RemoteBackend(LocalNodes(1), max_starting=1)
    with ea.spawn(counter_after(tmp_path / "go"), backend=backend) as first:
        wait_until(lambda: first.pid)
        second = ea.spawn(counter_after(tmp_path / "never"), backend=backend, deadlines=ea.Deadlines(start=0.3))
        (tmp_path / "go").touch()
        error = second.add(1).exception(SOON)
        assert isinstance(error, ea.ActorStartError)
        assert "was not ready within its start deadline of 0.3 s" in str(error)
