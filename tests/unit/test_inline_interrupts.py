"""Interrupts between what in-line workers are asked and what they run."""

from __future__ import annotations

from typing import ClassVar

import pytest

import envactors as ea
from envactors.actor.supervisor import Supervisor
from envactors.backends.local import InlineLoop
from envactors.testing import EchoEnv


@pytest.fixture
def interrupt_once(monkeypatch):
    """Returns a function after which the next run of an in-line worker is interrupted before it begins."""
    due = []

    def interrupt(run):
        def interrupted(*args):
            if due:
                due.clear()
                raise KeyboardInterrupt
            run(*args)

        return interrupted

    monkeypatch.setattr(Supervisor, "_run_inline", interrupt(Supervisor._run_inline))
    monkeypatch.setattr(InlineLoop, "run", interrupt(InlineLoop.run))
    return lambda: due.append(True)


def test_recv_runs_a_step_that_an_interrupt_delayed(interrupt_once):
    with ea.VectorEnv([EchoEnv] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        interrupt_once()
        with pytest.raises(KeyboardInterrupt):
            envs.send([3], env_ids=[1])
        assert envs.recv(timeout=1).obs[:, 2].tolist() == [3]


def test_results_of_an_interrupted_step_are_not_taken_for_the_next_ones(interrupt_once):
    with ea.VectorEnv([EchoEnv] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        interrupt_once()
        with pytest.raises(KeyboardInterrupt):
            envs.step([3, 4])
        for env_id in (0, 1):
            with pytest.raises(ea.AlreadyPendingError):
                envs.step([5], env_ids=[env_id])
        batch = envs.recv(min_envs=2, timeout=1)
        assert dict(zip(batch.env_ids.tolist(), batch.obs[:, 2].tolist(), strict=True)) == {0: 3, 1: 4}
        assert envs.step([6], env_ids=[1])[0][:, 2].tolist() == [6]


class Recording(EchoEnv):
    """Writes down that it has stepped."""

    STEPS: ClassVar[list[object]] = []

    def step(self, action):
        self.STEPS.append(action)
        return super().step(action)


def test_looking_at_an_actor_runs_nothing(interrupt_once):
    """A debugger does so at any moment, and without being asked."""
    Recording.STEPS.clear()
    with ea.VectorEnv([Recording], backend="inline") as envs:
        envs.reset(seed=0)
        interrupt_once()
        with pytest.raises(KeyboardInterrupt):
            envs.send([3])
        for actor in (envs[0], envs.actors[0]):
            assert actor.state is ea.ActorState.BUSY
            assert "busy" in repr(actor)
        assert not Recording.STEPS
        assert envs.recv(timeout=1).obs[:, 2].tolist() == [3]
        assert envs.actors[0].state is ea.ActorState.IDLE
        assert len(Recording.STEPS) == 1
