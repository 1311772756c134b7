from __future__ import annotations

import contextlib
import gc

import pytest
from fakes import SOON, Stage, make_actor


@pytest.fixture
def actors():
    """Return a function that makes actors, which are killed at the end."""
    made = []

    def make(**options):
        pair = make_actor(**options)
        made.append(pair[0])
        return pair

    yield make
    for actor in made:
        with contextlib.suppress(Exception):
            actor.kill(restart=False)
        actor.wait_closed(SOON)


@pytest.fixture
def stages():
    """Return a function that makes vectors whose workers the test plays; they are killed at the end."""
    made = []

    def make(*args, **options):
        stage = Stage(*args, **options)
        made.append(stage)
        return stage

    yield make
    for stage in made:
        for handle in stage.envs.actors:
            handle.kill()
        stage.envs.close(SOON)
        assert all(handle._actor.closed.is_set for handle in stage.envs.actors), "it has closed"
    made.clear()
    stage = None
    gc.collect()  # waiters close their descriptors at their end
