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


def test_an_actor_whose_worker_waits_on_its_node_past_its_start_deadline_starts_later(tmp_path):
    backend = ea.RemoteBackend(LocalNodes(1), max_starting=1)
    policy = ea.RestartPolicy(max_restarts=100, window=1.0, backoff=0.0)
    options = {"backend": backend, "restart": policy}
    with ea.spawn(counter_after(tmp_path / "go"), **options) as first:
        wait_until(lambda: first.pid)
        with ea.spawn(Counter, **options, deadlines=ea.Deadlines(start=0.3)) as second:
            wait_until(lambda: second.stats().restarts >= 2)
            (tmp_path / "go").touch()
            assert first.add(1).result(SOON) == 1
            assert second.add(1).result(SOON) == 1
