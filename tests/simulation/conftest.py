"""The world of tests that play one history by hand."""

from __future__ import annotations

import gc
import logging

import pytest

from simulation import processes
from simulation.runtime import installed
from simulation.world import World


@pytest.fixture(params=range(5))
def world(request, monkeypatch):
    world = World(request.param)
    monkeypatch.setattr(processes, "REFUSALS", 0.0)
    gc.disable()  # finalizers do not run in simulated processes
    logging.disable()
    with installed(world):
        try:
            yield world
        finally:
            world.end()
            gc.enable()
            logging.disable(logging.NOTSET)
