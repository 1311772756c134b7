"""A factory that raises at its actor's first start is not called again on nodes either."""

from __future__ import annotations

import pytest

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
