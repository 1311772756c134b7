"""Nodes that several tests share, since starting an agent takes more than half a second of CPU time."""

from __future__ import annotations

import contextlib

from helpers import SOON, Counter

import envactors as ea
from envactors.system.choice import PORTABLE


def preloading_backend(launcher, *modules, **options):
    """Return a backend whose nodes have already imported these modules of the tests."""
    preload = () if PORTABLE else ("helpers", *modules)
    return ea.RemoteBackend(launcher, preload=preload, **options)


@contextlib.contextmanager
def standing(backend):
    """Keeps an idle actor on each node of a backend: agents end with the last actor otherwise.

    The fixture that uses it depends on `helper_processes`: what it starts then counts as having been there.
    As long as it stands, the end of another actor does not mean that all lines and log records have been written.
    """
    count = backend.launcher.count
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(ea.spawn(Counter, backend=backend)) for _ in range(count)]
        assert [actor.add(1).result(SOON) for actor in actors] == [1] * count
        assert len({actor.node for actor in actors}) == count
        yield
