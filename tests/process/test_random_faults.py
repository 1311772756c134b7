"""Random faults over the echo env: no result is lost, repeated, or mixed up, and nothing stalls or stays."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from helpers import FORK_SERVER, promised

import envactors as ea
from envactors.testing import EchoEnv, FaultyEnv, expected_checksum

DEADLINE = 0.3
FAULTS = ["crash", "segfault", "exit", "hang_in_c", "sleep", "stop", "raise", "unpicklable"]


class Account:
    """What an env's results should be, from the actions that were sent and the marks that came back."""

    def __init__(self, env_id, autoreset):
        self.env_id = env_id
        self.autoreset = autoreset
        self.actions: list[int] = []
        self.seed = None
        self.resetting = False
        self.incarnation = 0
        self.marked = 0

    def begin(self, seed):
        self.actions, self.seed, self.resetting = [], seed, False

    def expected(self):
        last = self.actions[-1] if self.actions else -1
        return [self.env_id, len(self.actions), last, expected_checksum(self.seed, self.actions)]

    def check_reset(self, obs, info):
        self.marked += "failure" in info
        self.begin(info["seed"])
        assert obs.tolist() == self.expected()

    def check_step(self, action, obs, reward, terminated, truncated, info, incarnation):
        assert incarnation >= self.incarnation
        marked = "failure" in info
        assert marked or incarnation == self.incarnation or self.resetting, "a new process is always announced"
        self.incarnation = incarnation
        self.marked += marked
        if self.resetting and not marked:
            assert (reward, terminated, truncated) == (0.0, False, False)
            self.begin(info["seed"])
            assert obs.tolist() == self.expected()
            return
        if marked:
            assert (reward, terminated, truncated) == (0.0, False, True)
            if self.autoreset == "same_step":
                if "final_obs" in info:
                    self.check_last(info["final_obs"])
                self.begin(info["seed"])
                assert obs.tolist() == self.expected()
            else:
                self.check_last(obs)
                self.resetting = True
            return
        self.actions.append(action)
        assert reward == action
        if terminated and self.autoreset == "same_step":
            assert info["final_obs"].tolist() == self.expected()
            self.begin(info["seed"])
        assert obs.tolist() == self.expected()
        self.resetting = terminated and self.autoreset == "next_step"

    def check_last(self, obs):
        """The last complete observation: the step that failed is not in it."""
        assert obs.tolist() == self.expected()


def run_random_faults(faults, seed, *, autoreset="next_step", envs_per_actor=1, count=6, backend=FORK_SERVER):
    dice = random.Random(seed)
    injected = 0
    accounts = [Account(i, autoreset) for i in range(count)]
    deadlines = ea.Deadlines(step=DEADLINE, reset=DEADLINE, call=DEADLINE)
    with ea.VectorEnv(
        [lambda i=i: FaultyEnv(EchoEnv(i, 7)) for i in range(count)],
        on_failure="renew",
        autoreset=autoreset,
        envs_per_actor=envs_per_actor,
        backend=backend,
        deadlines=deadlines,
        restart=ea.RestartPolicy(max_restarts=10**6, backoff=0.0),
    ) as envs:
        obs, infos = envs.reset(seed=seed)
        for account, row, info in zip(accounts, obs, infos, strict=True):
            account.check_reset(row, info)
        turn = 0
        while injected < faults:
            for i in dice.sample(range(count), dice.randint(0, count)):
                injected += inject(envs, i, dice)
            actions = [turn * count + i for i in range(count)]
            begun = time.monotonic()
            envs.send(actions)
            left = set(range(count))
            while left:
                batch = envs.recv(min_envs=dice.randint(1, len(left)))
                for row, env_id in enumerate(batch.env_ids.tolist()):
                    left.remove(env_id)
                    accounts[env_id].check_step(
                        actions[env_id],
                        batch.obs[row],
                        batch.rewards[row],
                        batch.terminated[row],
                        batch.truncated[row],
                        batch.infos[row],
                        batch.incarnations[row],
                    )
            # Every fault may cost its deadline, and another one in the reset after it.
            assert time.monotonic() - begun < promised(2 * envs_per_actor * (DEADLINE + 2.0))
            turn += 1
        assert sum(account.marked for account in accounts) >= faults // 3
    return injected


def inject(envs, env_id, dice):
    """One fault of a random kind at a random place; 0 when the env could not be reached any more."""
    if dice.random() < 0.15:
        pid = envs[env_id].pid
        if pid is None:
            return 0
        try:
            os.kill(pid, signal.SIGKILL)  # while idle
        except ProcessLookupError:
            return 0
        return 1
    fault, where = dice.choice(FAULTS), "reset" if dice.random() < 0.25 else "step"
    try:
        envs[env_id].arm(fault, where).result(10)
    except ea.ActorError:
        return 0
    return 1


@pytest.mark.soak
@pytest.mark.timeout(150)
def test_two_hundred_random_faults():
    assert run_random_faults(200, seed=1, count=12) >= 200  # as many envs wait for a deadline side by side


@pytest.mark.timeout(120)
@pytest.mark.parametrize("autoreset", ["next_step", pytest.param("same_step", marks=pytest.mark.soak)])
def test_random_faults_with_three_envs_an_actor(autoreset):
    run_random_faults(40, seed=2, autoreset=autoreset, envs_per_actor=3)


def test_random_faults_under_same_step():
    run_random_faults(40, seed=3, autoreset="same_step")


@pytest.mark.fresh_processes
@pytest.mark.soak
def test_random_faults_under_same_step_in_fresh_processes():
    run_random_faults(40, seed=3, autoreset="same_step", backend="process")


@pytest.mark.fresh_processes
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10, 16))
def test_long_runs(seed):
    run_random_faults(
        200, seed, autoreset=("next_step", "same_step")[seed % 2], envs_per_actor=(1, 2, 3)[seed % 3], backend="process"
    )
