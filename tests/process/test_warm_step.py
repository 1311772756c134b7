"""A warm step takes few calls in few files."""

from __future__ import annotations

import collections
import sys
from pathlib import Path

import numpy as np
import pytest
from envactors.actor.wait_tuner import BOTH_SPIN, WaitTuner
from helpers import FORK_SERVER

import envactors as ea

PACKAGE = Path(ea.__file__).parent
# One warm step of eight envs in two processes: files and Python calls in the caller, calls in a worker.
MOST_STEP_FILES = 10
MOST_CALLER_CALLS = 30
MOST_WORKER_CALLS = 15

STEPS = 500


class Box:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


class Calls:
    """Counts calls of the package's functions in this thread, by file, from one lap to the next."""

    def __init__(self):
        self.seen = collections.Counter()
        self.laps = []
        sys.setprofile(self.note)

    def note(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.seen[frame.f_code.co_filename[len(str(PACKAGE)) :]] += 1

    def lap(self):
        self.laps.append(self.seen)
        self.seen = collections.Counter()

    def least(self):
        """Returns the calls of the lap that had the fewest, without the first and the last one."""
        sys.setprofile(None)
        return dict(min(self.laps[1:-1], key=lambda lap: sum(lap.values())))


class Watched:
    """Does nothing; can count the calls in its worker, from one step to the next."""

    calls = None

    def __init__(self):
        self.observation_space, self.action_space = Box((4,), np.float32), Box((), np.int64)
        self.obs = np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        if self.calls is not None:
            self.calls.lap()
        return self.obs, 0.0, False, False, {}

    def watch(self):
        self.calls = Calls()

    def report(self):
        calls, self.calls = self.calls, None
        return calls.least()


@pytest.fixture(scope="module")
def step_calls():
    """The calls of one warm step in the caller, and in a worker of four envs, by file: the least of many steps.

    On a busy machine many steps sleep, which takes more; so the one strategy to choose from is to spin.
    """
    before = sys.getprofile()
    try:
        with ea.VectorEnv([Watched] * 8, envs_per_actor=4, backend=FORK_SERVER) as envs:
            envs.reset(seed=0)
            actions, tuner = np.zeros(8, np.int64), WaitTuner(may_spin=True)
            tuner._short = tuner._long = tuner._candidates = (BOTH_SPIN,)
            envs._stepper.tuner = tuner

            def make_steps(after_each):
                for _ in range(STEPS):
                    envs.step(actions)
                    after_each()

            make_steps(lambda: None)
            calls = Calls()
            make_steps(calls.lap)
            in_caller = calls.least()
            envs[0].watch().result()
            make_steps(lambda: None)
            in_worker = envs[0].report().result()
            envs.set_policy(lambda: lambda obs, context: np.zeros(len(obs), np.int64))
            envs.rollout(2)
            make_steps(lambda: None)
            calls = Calls()
            make_steps(calls.lap)
            return {"caller": in_caller, "worker": in_worker, "caller after a rollout": calls.least()}
    finally:
        sys.setprofile(before)


def test_a_warm_step_goes_through_few_files(step_calls):
    assert len(step_calls["caller"]) <= MOST_STEP_FILES, step_calls["caller"]


@pytest.mark.parametrize(("half", "most"), [("caller", MOST_CALLER_CALLS), ("worker", MOST_WORKER_CALLS)])
def test_a_warm_step_makes_few_calls(step_calls, half, most):
    assert 3 < sum(step_calls[half].values()) <= most, step_calls[half]


def test_rollouts_add_no_call_to_a_step(step_calls):
    assert step_calls["caller after a rollout"] == step_calls["caller"]
