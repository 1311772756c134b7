"""Processes that are replaced at an episode's end, after this many steps or above so much memory."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import SOON, wait_until

import envactors as ea


class Leaky(gymnasium.Env):
    """Episodes of four steps; each leaks as much as its action says, in MiB."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(100)
    leaked: list[bytes] = []  # noqa: RUF012 # leaking is the point

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([0, self.np_random.random()]), {"pid": os.getpid()}

    def step(self, action):
        self.leaked.append(b"\1" * (int(action) << 20))  # written to, so that it takes memory
        self.count += 1
        info = {"pid": os.getpid()}
        return np.array([self.count, self.np_random.random()]), 1.0, self.count == 4, False, info


def derived(seed, incarnation):
    return int(np.random.SeedSequence(seed, spawn_key=(incarnation,)).generate_state(1)[0])


def first_of(seed):
    return Leaky().reset(seed=seed)[0].tolist()


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_after_so_many_steps_the_next_episode_has_a_process_of_its_own(autoreset, on_failure):
    policy = ea.RecyclePolicy(max_steps=6)
    with ea.VectorEnv([Leaky] * 2, autoreset=autoreset, on_failure=on_failure, recycle=policy) as envs:
        obs, infos = envs.reset(seed=5)
        pids = [[info["pid"]] for info in infos]
        starts, numbers, ended = [obs.tolist()], [], 0
        # Six steps are over at the end of the second episode; where the same step resets, the next one knows of it.
        last = 3 if autoreset == "same_step" else 2
        while len(starts) <= 2 * last:
            obs, rewards, terminated, truncated, infos = envs.step([0, 0])
            assert not truncated.any()
            assert (terminated[0], rewards[0]) in [(False, 0.0), (False, 1.0), (True, 1.0)]
            if autoreset == "same_step" and terminated.any():
                assert [info["final_obs"][0] for info in infos] == [4, 4]
            if autoreset == "disabled" and terminated.any():
                obs, infos = envs.reset()
            numbers.append(obs[0][0])
            ended += terminated[0]
            if obs[0][0] == 0:
                starts.append(obs.tolist())
                for env in range(2):
                    pids[env].append(infos[env]["pid"])
        for env in range(2):
            assert [pids[env].index(pid) for pid in pids[env]] == [0] * last + [last] * last + [2 * last]
            assert starts[last][env] == first_of(derived(5 + env, 1))
            assert starts[2 * last][env] == first_of(derived(5 + env, 2))
        assert ended == 2 * last
        assert envs.stats().episodes == [2 * last] * 2
        assert [actor.restarts for actor in envs.stats().actors] == [0, 0]
        assert envs[0].incarnation == 2


def test_above_max_rss_a_process_is_replaced_at_the_end_of_the_episode():
    with ea.VectorEnv([Leaky] * 2, recycle=ea.RecyclePolicy(max_rss=250 << 20)) as envs:
        pids = [info["pid"] for info in envs.reset(seed=0)[1]]
        for turn in range(10):
            *_, infos = envs.step([60, 0])
            if turn < 4:
                assert [info["pid"] for info in infos] == pids
        assert infos[0]["pid"] != pids[0]
        assert infos[1]["pid"] == pids[1]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (ea.RecyclePolicy(max_steps=4), r"4 steps >= 4"),
        (ea.RecyclePolicy(max_rss=250 << 20), r"RSS (\d+) MB > 262 MB"),
    ],
    ids=["steps", "memory"],
)
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_the_log_says_why_a_process_is_replaced(policy, reason, autoreset, caplog):
    caplog.set_level(logging.INFO, "envactors")
    with ea.VectorEnv([Leaky], autoreset=autoreset, recycle=policy) as envs:
        envs.reset()
        while envs[0].incarnation == 0:
            envs.step([0 if policy.max_rss is None else 60])
    replaced = re.compile(rf"actor '.*' gets a new process: {reason}")
    wait_until(lambda: any(map(replaced.fullmatch, caplog.messages)), SOON)


def test_the_log_says_that_a_process_is_replaced_on_request(caplog):
    caplog.set_level(logging.INFO, "envactors")
    with ea.spawn(Leaky, name="leaky") as actor:
        actor.renew().result(SOON)
        wait_until(lambda: "actor 'leaky' gets a new process: on request" in caplog.messages, SOON)


def test_a_restarted_process_counts_from_zero():
    policy = ea.RecyclePolicy(max_steps=6)
    with ea.VectorEnv([Leaky], on_failure="renew", restart=ea.RestartPolicy(9, backoff=0.0), recycle=policy) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step([0])
        envs[0].kill(restart=True)
        envs.step([0])
        pid = envs.step([0])[4][0]["pid"]
        pids = [envs.step([0])[4][0]["pid"] for _ in range(10)]
        assert [one == pid for one in pids] == [True] * 9 + [False]


def test_a_process_that_was_lost_before_it_was_replaced_is_not_replaced_again():
    policy = ea.RecyclePolicy(max_steps=4)
    with ea.VectorEnv(
        [Leaky], autoreset="same_step", on_failure="renew", restart=ea.RestartPolicy(9, backoff=0.0), recycle=policy
    ) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step([0])  # the next end of an episode shall replace the process
        envs[0].kill(restart=True)
        assert "failure" in envs.step([0])[4][0]
        pids = [envs.step([0])[4][0]["pid"] for _ in range(4)]
        assert len(set(pids)) == 1
        assert envs[0].incarnation == 1


def test_by_send_and_by_futures_as_well():
    policy = ea.RecyclePolicy(max_steps=1)
    with ea.VectorEnv([Leaky] * 2, recycle=policy) as envs:
        first = [info["pid"] for info in envs.reset(seed=0)[1]]
        for _ in range(5):
            envs.send([0, 0])
            batch = envs.recv()
        pids = [info["pid"] for info in batch.infos]
        assert not set(pids) & set(first)
        assert batch.incarnations.tolist() == [1, 1]
        for _ in range(5):
            steps = [future.result(SOON) for future in envs.submit([0, 0])]
        assert [step.incarnation for step in steps] == [2, 2]


def test_replay_continues_from_where_the_new_process_began():
    def run(kills):
        with ea.VectorEnv(
            [Leaky],
            on_failure="replay",
            restart=ea.RestartPolicy(9, backoff=0.0),
            recycle=ea.RecyclePolicy(max_steps=4),
        ) as envs:
            seen = [envs.reset(seed=0)[0].tolist()]
            for turn in range(14):
                if kills and turn in (2, 8):
                    os.kill(envs[0].pid, signal.SIGKILL)
                seen.append(envs.step([0])[0].tolist())
            return seen

    with_kills, without = run(True), run(False)
    assert with_kills[:5] == without[:5]
    # Seeds follow from the incarnation, which crashes take further too.
    assert [obs[0][0] for obs in with_kills] == [obs[0][0] for obs in without]


@pytest.mark.parametrize("options", [{"max_steps": 0}, {"max_memory": -1}, {"max_steps": 2.5}, {"max_rss": True}])
def test_limits_are_checked(options):
    with pytest.raises(ValueError, match=rf"RecyclePolicy\({next(iter(options))}="):
        ea.RecyclePolicy(**options)


@pytest.mark.parametrize("options", [{"envs_per_actor": 2}, {"backend": "thread"}])
def test_recycle_raises_where_it_is_not_supported(options):
    with pytest.raises(ValueError, match="recycle"):
        ea.VectorEnv([functools.partial(Leaky)] * 2, recycle=ea.RecyclePolicy(max_steps=1), **options)
