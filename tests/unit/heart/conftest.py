from __future__ import annotations

import contextlib

import pytest
from fakes import SOON, make_actor


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
