"""Memory on a node: if an env overwrites what it shares with the agent, only its worker is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import SOON
from vandals import Vandal, overwrite

import envactors as ea
from envactors.remote import LocalNodes
from envactors.system.choice import PORTABLE

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)
pytestmark = pytest.mark.skipif(PORTABLE, reason="finds the memory by its name in /proc")


class Victim(Vandal):
    def get_oom_score_adj(self):
        return int(Path("/proc/self/oom_score_adj").read_text())


def test_a_worker_that_overwrites_its_memory_does_not_end_its_node():
    launcher = LocalNodes(1)
    backend = ea.RemoteBackend(launcher)
    deadlines = ea.Deadlines(step=2.0, reset=SOON, call=SOON)
    with (
        ea.VectorEnv([Victim] * 2, backend=backend, on_failure="renew", restart=ALWAYS, deadlines=deadlines) as envs,
        ea.spawn(Victim, backend=backend) as neighbor,
    ):
        envs.reset(seed=0)
        (agent,) = launcher.agents.values()
        expected = min(int(Path("/proc/self/oom_score_adj").read_text()) + 500, 1000)
        assert neighbor.get_oom_score_adj().result(SOON) == expected
        for seed, what in enumerate(("random", "nan")):
            envs.reset(seed=0)
            envs[0].prepare(overwrite, "page", what, seed).result(SOON)
            envs.step([1, 1])
            envs.step([2, 2])
            assert neighbor.echo(seed).result(SOON) == seed
        envs.actors[0].kill(restart=True)
        envs.step([0, 0])
        envs.reset(seed=0)
        assert envs.step([5, 6])[1].tolist() == [5.0, 6.0]
        assert agent.poll() is None, "the agent goes on"
