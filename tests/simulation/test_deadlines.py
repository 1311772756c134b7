"""Deadlines that have passed while their process writes its stacks, and what the user does meanwhile."""

from __future__ import annotations

import pytest

import envactors as ea
from envactors.testing import EchoEnv
from simulation.envs import Misbehaving
from simulation.processes import SimulatedBackend

_DEADLINES = ea.Deadlines(call=1.0, step=1.0, slow=None)


class Hanging(Misbehaving, EchoEnv):
    """An env whose steps and calls never end."""

    def __init__(self) -> None:
        Misbehaving.__init__(self)
        EchoEnv.__init__(self)

    def step(self, action):
        return self._process.sleep(None)

    def hang(self):
        self._process.sleep(None)


def pass_deadline(world, actor):
    """Let time pass until the process writes its stacks."""
    while "kill" not in actor._actor.timers._timers:
        assert world.step()


ENDS = {
    "kill": lambda actor, _: actor.kill(),
    "restart": lambda actor, _: actor.kill(restart=True),
    "close": lambda actor, _: actor.close(timeout=0.0),
    "abort": lambda _, future: future.abort(),
    "kill twice": lambda actor, _: (actor.kill(restart=True), actor.kill()),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_call_that_has_passed_its_deadline_fails_by_it_whatever_ends_its_process(world, end):
    actor = ea.spawn(Hanging, backend=SimulatedBackend(world), deadlines=_DEADLINES)
    future, later = actor.hang(), actor.hang()
    pass_deadline(world, actor)
    ENDS[end](actor, future)
    assert isinstance(future.exception(), ea.ActorTimeoutError)
    if end not in ("restart", "abort"):
        assert later.exception().aborted
    actor.close(timeout=0.0)


@pytest.mark.parametrize("end", ["restart", "abort"])
def test_another_process_starts_at_once_for_one_that_was_replaced_after_a_deadline(world, end):
    actor = ea.spawn(Hanging, backend=SimulatedBackend(world), deadlines=_DEADLINES)
    future = actor.options(retries=3).hang()
    pass_deadline(world, actor)
    ENDS[end](actor, future)
    assert isinstance(future.exception(), ea.ActorTimeoutError)
    assert actor.get("steps").result() == 0
    assert (actor.incarnation, actor.stats().restarts) == (1, 0)
    actor.close()


def test_a_step_that_has_passed_its_deadline_fails_by_it_if_its_process_is_replaced(world):
    backend = SimulatedBackend(world)
    with ea.VectorEnv([Hanging] * 2, envs_per_actor=2, backend=backend, deadlines=_DEADLINES) as envs:
        envs.reset()
        envs.send([0, 1])
        pass_deadline(world, envs.actors[0])
        envs.actors[0].kill(restart=True)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.recv(min_envs=2)
    failures = caught.value.failures
    late = [env_id for env_id in failures if isinstance(failures[env_id], ea.ActorTimeoutError)]
    assert len(late) == 1
