"""What an actor does with the process of a standby."""

from __future__ import annotations

import pytest

import envactors as ea
from envactors.actor.states import Phase
from envactors.backends.base import ExitStatus, NodeLoss
from envactors.testing import EchoEnv
from simulation.processes import SimulatedBackend

_NO_LIMITS = ea.Deadlines(start=None, close=None, slow=None)
_UNCERTAIN = ExitStatus(loss=NodeLoss("far", "which was silent"), is_certain=False)


@pytest.fixture
def vector(world):
    """A vector of one env with a standby whose process is ready, and the actor of the env."""
    options = {"backend": SimulatedBackend(world), "deadlines": _NO_LIMITS, "standbys": 1}
    with ea.VectorEnv([EchoEnv], restart=ea.RestartPolicy(max_restarts=9, backoff=1.0), **options) as envs:
        envs.reset()
        while world.step():
            pass
        assert [process.has_ended for process in world.processes] == [False, False]
        yield envs, envs.actors[0]._actor


def test_an_actor_whose_standby_was_lost_with_its_node_waits_for_the_certain_end_of_that(world, vector):
    _, actor = vector
    world.processes[0].kill()
    while not actor.process.was_standby:
        assert world.step()
    spare = actor.process.worker
    spare._status = _UNCERTAIN
    spare.end()
    while world.step():
        pass
    assert (actor.phase, actor.pid) == (Phase.STARTING, None), "code of the lost process may still be running"
    assert len(world.processes) == 3, "the standby has another one"
    actor.on_certain_end(spare)
    while actor.phase is not Phase.LIVE:
        assert world.step()
    assert (actor.process.incarnation, actor.stats().restarts) == (1, 1)


def test_an_actor_that_takes_the_process_of_a_standby_does_not_wait_for_its_backoff(world, vector, monkeypatch):
    _, actor = vector
    timers = []
    monkeypatch.setattr(actor.timers, "set", lambda name, *_: timers.append(name))
    world.processes[0].kill()
    while not actor.process.has_started or actor.process.incarnation == 0:
        assert world.step()
    assert "backoff" not in timers
    assert (actor.process.was_standby, actor.stats().restarts) == (True, 1)
