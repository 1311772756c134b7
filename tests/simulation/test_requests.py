"""Requests of a vector whose processes end at the wrong moment, as histories have found them."""

from __future__ import annotations

import envactors as ea
from envactors.testing import EchoEnv
from simulation.processes import SimulatedBackend


class Failing(EchoEnv):
    """An env whose step 13 raises, and that counts its resets."""

    resets = 0

    def reset(self, **options):
        self.resets += 1
        return super().reset(**options)

    def step(self, action):
        if action == 13:
            raise ValueError(action)
        return super().step(action)

    def count_resets(self):
        return self.resets


def test_a_submitted_step_that_has_raised_gets_its_exception_although_its_process_is_killed(world):
    with ea.VectorEnv([Failing], backend=SimulatedBackend(world)) as envs:
        envs.reset()
        (future,) = envs.submit([13])
        table = envs._engine.table
        while table.rows.written_ids[0] != table.rows.posted_ids[0]:
            world.run_processes(1)
        envs.actors[0].kill(restart=True)
        assert isinstance(future.exception(), ValueError)


def test_a_call_runs_before_a_later_reset_although_an_earlier_step_has_failed_in_the_queue(world):
    options = {"on_failure": "renew", "autoreset": "disabled", "restart": ea.RestartPolicy(backoff=5.0)}
    with ea.VectorEnv([Failing], backend=SimulatedBackend(world), **options) as envs:
        envs.reset()
        envs.step([1])
        world.processes[0].kill()
        while envs.actors[0].pid is not None:
            world.step()
        (failed,) = envs.submit([2])
        call = envs[0].count_resets()
        assert failed.result().truncated
        envs.reset()
        assert call.result() == 0, "it was made before the reset"
