"""If env code overwrites shared memory, its worker is killed, and no other actor is affected."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from helpers import FORK_SERVER, SOON
from vandals import PATTERNS, Vandal, overwrite, shared_memory, write_cell

import envactors as ea
from envactors.mailbox.control_page import (
    BEGUN,
    ENV_INDEX,
    FINISHED,
    METHOD,
    POSTS,
    SINCE,
    STEP,
)
from envactors.system.choice import PORTABLE
from envactors.testing import EchoEnv, expected_checksum

pytestmark = pytest.mark.skipif(PORTABLE, reason="finds the memory by its name in /proc")
ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)
# Ends workers that no longer react; all other damage is noticed at once.
DEADLINE = 0.5


def step_and_catch(envs, actions):
    """The failure of env 0."""
    with pytest.raises(ea.VectorStepError) as caught:
        envs.step(actions)
    assert caught.value.failures.keys() == {0}
    return caught.value.failures[0]


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (FINISHED, 2**63 - 1),
        (FINISHED, -(2**63)),
        (SINCE, math.nan),
        (SINCE, 1e300),
        (METHOD, 77),
        (ENV_INDEX, -1),
        (BEGUN, 2**62),
        (POSTS, -1),
    ],
)
def test_an_invalid_control_page_kills_the_worker_with_an_error(cell, value):
    with ea.VectorEnv([Vandal] * 2, backend=FORK_SERVER, restart=ALWAYS, deadlines=ea.Deadlines(step=0.2)) as envs:
        envs.reset(seed=0)
        envs[0].prepare(write_cell, cell, value, then="hang").result(SOON)
        error = step_and_catch(envs, [1, 2])
        assert isinstance(error, ea.ActorDiedError)
        assert "has overwritten memory that it shares with the caller" in str(error)
        envs.reset(seed=0)
        assert envs.step([3, 4])[1].tolist() == [3.0, 4.0]


def claim_to_have_finished():
    """Says that the step that runs has finished."""
    ((address, _),) = shared_memory("page")
    write_cell(FINISHED, ctypes.c_int64.from_address(address + 8 * STEP).value)


def test_a_falsely_finished_step_does_not_return_the_row_of_the_step_before():
    with ea.VectorEnv([Vandal] * 2, backend=FORK_SERVER, restart=ALWAYS, deadlines=ea.Deadlines(step=0.5)) as envs:
        envs.reset(seed=0)
        envs.step([1, 2])
        envs[0].prepare(claim_to_have_finished, then="hang").result(SOON)
        assert "has overwritten memory that it shares with the caller" in str(step_and_catch(envs, [7, 8]))
        envs.reset(seed=0)
        assert envs.step([3, 4])[1].tolist() == [3.0, 4.0]


class Neighbors:
    """A vector and an actor of the same program, which nothing of all this may disturb."""

    def __init__(self):
        self.envs = ea.VectorEnv([EchoEnv] * 2, backend=FORK_SERVER)
        self.envs.reset(seed=0)
        self.actions = []

    def check(self):
        self.actions.append(len(self.actions))
        obs = self.envs.step([self.actions[-1]] * 2)[0]
        for i in range(2):
            assert obs[i].tolist() == [0, len(self.actions), self.actions[-1], expected_checksum(i, self.actions)]
        assert self.envs.stats().actors[0].restarts == 0


def fuzz(seeds, packed):
    neighbors = Neighbors()
    with (
        neighbors.envs,
        ea.VectorEnv(
            [Vandal] * 4,
            envs_per_actor=2 if packed else 1,
            backend=FORK_SERVER,
            on_failure="renew",
            restart=ALWAYS,
            deadlines=ea.Deadlines(step=DEADLINE, reset=DEADLINE * 5, call=DEADLINE * 5),
        ) as envs,
    ):
        for seed in seeds:
            dice = np.random.default_rng(seed)
            what = dice.choice([*PATTERNS, "random", "random"])
            envs.reset(seed=0)
            where, then = dice.choice(["page", "slab"]), dice.choice(["return", "hang", "go on"])
            envs[int(dice.integers(4))].prepare(overwrite, where, what, seed, then=then).result(SOON)
            if dice.random() < 0.5:
                envs.send([1] * 4)
                while envs._engine.receivable():
                    envs.recv(min_envs=1)
            else:
                envs.step([1] * 4)
            neighbors.check()
            envs.stats()
            envs.step([2] * 4)
            neighbors.check()
        # Once they are replaced, nothing of it is left.
        for actor in envs.actors:
            actor.kill(restart=True)
        envs.step([0] * 4)
        envs.reset(seed=0)
        assert envs.step([5] * 4)[0][:, :3].tolist() == [[0, 1, 5]] * 4


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_whatever_bytes_a_worker_leaves_in_shared_memory_others_continue(packed):
    fuzz(range(4), packed)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("first", [100, 200])
def test_whatever_bytes_a_worker_leaves_in_shared_memory_others_continue_for_long(packed, first):
    fuzz(range(first, first + 60), packed)
