"""Long runs of a vector whose workers are killed all the while, and what is compared of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import zlib

import numpy as np
from helpers import SOON, journals

import envactors as ea

COUNT = 8
PACKED = 4


class Storm:
    """Kills the process of some actor again and again while a run goes on.

    A kill waits until the run has gone on since the one before: on a busy machine it takes long to replace a process,
    and the next kill would hit the new one before it has done anything.

    Args:
        envs: The vector.
        seconds: From one kill to the next, if the run goes on; None for no kills but those of `kill`.
    """

    def __init__(self, envs, seconds):
        self._envs = envs
        self._seconds = seconds
        self._dice = random.Random(3)
        self._goes_on = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        if self._seconds is not None:
            self._thread.join(SOON)

    def go_on(self):
        """Tell that the run has a result more."""
        self._goes_on.set()

    def kill(self):
        """Kill the process of some actor."""
        pid = self._dice.choice(self._envs.actors).pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since
                os.kill(pid, signal.SIGKILL)

    def _run(self):
        while not self._stop.wait(self._seconds):
            if self._goes_on.is_set():
                self._goes_on.clear()
                self.kill()


def make_storm(make, **options):
    """Return a vector of envs that are restored, however often they are lost."""
    restart = ea.RestartPolicy(max_restarts=100_000, backoff=0.0)
    return ea.VectorEnv(
        [make] * COUNT, **{"on_failure": "replay", "envs_per_actor": PACKED, "restart": restart, **options}
    )


def longest_journal(envs):
    return max(journal._cost for actor in envs.actors for journal in journals(actor))


def restarts_of(envs):
    return sum(actor.stats().restarts for actor in envs.actors)


def checksum_of_run(make, actions, steps, seconds=None, every=None, **options):
    """Return the checksum over all observations and rewards of that many steps, the longest replay, and the restarts.

    Args:
        make: Makes an env.
        actions: The actions of 8 envs, by step; they come again.
        steps: How many steps of all envs together.
        seconds: From one kill to the next, if the run goes on; None for none.
        every: Steps of the vector from one kill to the next, however long they take; None for none.
        options: Those of the vector.
    """
    with make_storm(make, **options) as envs:
        check = zlib.crc32(envs.reset(seed=1)[0])
        with Storm(envs, seconds) as storm:
            longest = 0
            for turn in range(steps // COUNT):
                if every is not None and turn % every == every // 2:
                    storm.kill()
                obs, rewards, _, _, infos = envs.step(actions[turn % len(actions)])
                check = zlib.crc32(rewards, zlib.crc32(np.ascontiguousarray(obs), check))
                assert not any("failure" in info for info in infos)
                storm.go_on()
                if turn % 997 == 0:  # at no multiple of the steps between snapshots
                    longest = max(longest, longest_journal(envs))
        return check, longest, restarts_of(envs)


def checksum_of_rollouts(make, make_policy, rollouts, steps, seconds=None, **options):
    """Return the checksum over all columns of this many rollouts, two in flight, the longest replay, and the restarts.

    Args:
        make: Makes an env.
        make_policy: Makes the policy.
        rollouts: How many.
        steps: How many steps each has.
        seconds: From one kill to the next, if the run goes on; None for none.
        options: Those of the vector.
    """
    with make_storm(make, **options) as envs:
        check = zlib.crc32(envs.reset(seed=1)[0])
        envs.set_policy(make_policy, seed=5)
        longest = 0
        with Storm(envs, seconds) as storm:
            future = envs.rollout_async(steps)
            for number in range(rollouts):
                following = envs.rollout_async(steps) if number + 1 < rollouts else None
                rollout = future.result(10 * SOON)
                assert not rollout.failures
                storm.go_on()
                columns = rollout.actions, rollout.rewards, rollout.terminated, rollout.truncated, rollout.starts
                check = add_columns(check, rollout.obs, *columns, rollout.valid, *rollout.extras.values())
                longest = max(longest, longest_journal(envs))
                future = following
        return check, longest, restarts_of(envs)


def checksum_of_loop(make, make_policy, rollouts, steps, **options):
    """Return the checksum of `checksum_of_rollouts`, with the policy called here between two steps."""
    with make_storm(make, **options) as envs:
        obs, _ = envs.reset(seed=1)
        check = zlib.crc32(obs)
        groups = [np.arange(first, first + PACKED) for first in range(0, COUNT, PACKED)]
        policies = [make_policy() for _ in groups]
        starts, resets = np.ones(COUNT, bool), np.zeros(COUNT, bool)
        for number in range(rollouts):
            rows = []
            for step in range(steps):
                chosen = []
                for policy, group in zip(policies, groups, strict=True):
                    rng = np.random.Generator(np.random.Philox(key=5, counter=[0, step, number, int(group[0])]))
                    chosen.append(policy(obs[group], ea.PolicyContext(group, starts[group], step, rng)))
                actions = np.concatenate([actions for actions, _ in chosen])
                extras = [np.concatenate([extras[name] for _, extras in chosen]) for name in chosen[0][1]]
                after, rewards, terminated, truncated, _ = envs.step(actions)
                rows.append((obs, actions, rewards, terminated, truncated, starts, ~resets, *extras))
                obs, starts, resets = after, resets, terminated | truncated
            check = add_columns(check, *map(np.stack, zip(*rows, strict=True)))
        return check


def add_columns(check, *columns):
    """Return the checksum, continued over arrays."""
    for column in columns:
        check = zlib.crc32(np.ascontiguousarray(column), check)
    return check
