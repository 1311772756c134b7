"""Envs with the interface of ALF's ``AlfEnvironment``; workers import this module, and no torch with it."""

from __future__ import annotations

import collections
import functools
import itertools
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from envactors.integrations.alf.adapter import StepType, TimeStep


class TensorSpec:
    """The part of ALF's class that is used here; the dtype is a string, or torch's."""

    def __init__(self, shape, dtype="float32", top=None):
        self.shape, self.dtype, self.top = tuple(shape), dtype, top

    def __eq__(self, other):
        return (self.shape, self.dtype, self.top) == (other.shape, other.dtype, other.top)

    __hash__ = None

    def __repr__(self):
        return f"TensorSpec({self.shape}, {self.dtype}, top={self.top})"


class AlfEnv:
    """An env whose observation says which step it is from: ``[env id, episode, steps in it, last action]``.

    An episode has as many steps as `length` says for its number. `wants` says how to misbehave in the next step.
    """

    num_tasks = 2
    task_names = ("walk", "run")
    is_tensor_based = False
    batched = False
    batch_size = 1

    def __init__(self, env_id, length=lambda episode: 3, **differs):
        self.env_id = env_id
        self.length = length if callable(length) else lambda episode: length
        self.differs = differs
        self.batched = differs.get("batched", self.batched)
        self.batch_size = differs.get("batch_size", self.batch_size)
        self.is_tensor_based = differs.get("is_tensor_based", False)
        self.episode = self.steps = 0
        self.rng = np.random.default_rng(0)
        self.draw = 0.0
        self.wants = None
        self.synced = 0
        self.metadata = {"render_fps": 7}

    def observation_spec(self):
        return TensorSpec((4,), self.differs.get("observation", "float32"))

    def action_spec(self):
        return TensorSpec((), "int64", top=self.differs.get("action"))

    def reward_spec(self):
        return TensorSpec(self.differs.get("reward", ()))

    def env_info_spec(self):
        return self.differs.get("env_info", {"draw": TensorSpec((), "float64")})

    def time_step_spec(self):
        spec = TimeStep(TensorSpec((), "int32"), self.reward_spec(), TensorSpec(()), self.observation_spec())
        return spec._replace(prev_action=self.action_spec(), env_id=TensorSpec((), "int32"))

    def seed(self, seed):
        self.rng = np.random.default_rng(seed)
        return f"seeded with {seed}"

    def reset(self):
        self.episode += 1
        self.steps = 0
        return self.show(StepType.FIRST, 0, np.int64(0))

    def step(self, action):
        wants, self.wants = self.wants, None
        if wants is not None:
            wants()
        if self.steps >= self.length(self.episode):
            return self.reset()
        self.steps += 1
        last = self.steps >= self.length(self.episode)
        return self.show(StepType.LAST if last else StepType.MID, self.steps, action)

    def show(self, step_type, reward, action):
        self.draw = self.rng.random()
        observation = np.array([self.env_id, self.episode, self.steps, action], np.float32)
        discount = np.float32(step_type != StepType.LAST)
        return TimeStep(
            step_type,
            np.float32(reward),
            discount,
            observation,
            action,
            np.int32(77),
            (),
            {"draw": np.float64(self.draw)},
        )

    def render(self, mode):
        return np.full((2, 2, 3), self.env_id, np.uint8) if mode == "rgb_array" else mode

    def sync_progress(self):
        self.synced += 1

    def want(self, what, *args):
        """Make the next step misbehave."""
        self.wants = {"die": lambda: os.kill(os.getpid(), 9), "hang": hang_in_c, "raise": complain}[what]

    def add(self, n, times=1):
        return self.env_id + n * times

    def wait_for(self, path):
        wait_for(Path(path))
        return self.env_id

    def environ(self, name):
        return os.environ.get(name)

    def torch_threads(self):
        import torch

        return torch.get_num_threads()

    def loaded(self, module):
        return module in sys.modules

    def pid(self):
        return os.getpid()


def uneven_length(env_id, episode):
    return 1 + (3 * episode + 2 * env_id) % 5


def uneven(env_id):
    return AlfEnv(env_id, length=functools.partial(uneven_length, env_id))


class Complaint(Exception):
    """The exception of an env."""


def complain():
    raise Complaint("no more steps")


def hang_in_c():
    collections.deque(itertools.repeat(0), maxlen=0)


def wait_for(path):
    while not path.exists():
        time.sleep(0.002)


class Logged(AlfEnv):
    """Logs when its constructor begins and ends; the constructor waits for a file, if it is given one."""

    def __init__(self, log, env_id, gates=()):
        self.log = log
        self.tell(f"begin {env_id}")
        Path(f"{log}.{env_id}").touch()
        for gate in gates:
            wait_for(gate)
        super().__init__(env_id)
        self.tell(f"end {env_id}")

    def tell(self, line):
        with self.log.open("a") as file:
            file.write(f"{line}\n")

    def close(self):
        self.tell(f"close {self.env_id}")


class Gated(AlfEnv):
    """Its resets, but for the first, wait for a file, and leave a mark when they begin."""

    def __init__(self, gate, env_id, length):
        super().__init__(env_id, length)
        self.gate = gate

    def reset(self):
        if self.episode:
            Path(f"{self.gate}.{self.env_id}").touch()
            wait_for(self.gate)
        return super().reset()


class Ticking(AlfEnv):
    """Its resets, but for the first, take 20 steps: as many ticks of a clock that its user moves on with each step."""

    RESET = 20

    def __init__(self, clock, env_id, length):
        super().__init__(env_id, length)
        self.clock = np.memmap(clock, np.int64, "r", shape=(1,))

    def reset(self):
        until = int(self.clock[0]) + self.RESET
        while self.episode and self.clock[0] < until:
            time.sleep(0.001)
        return super().reset()


class Many(AlfEnv):
    """A batch of envs whose episodes end independently, as in ALF's ``BatchEnvironmentWrapper``."""

    def __init__(self, env_id, size=3):
        super().__init__(env_id, batched=True, batch_size=size)
        self.envs = [AlfEnv(env_id * size + i, length=2 + i) for i in range(size)]

    def reset(self):
        return self.stacked([env.reset() for env in self.envs])

    def step(self, action):
        if self.wants is not None:
            self.wants()
        return self.stacked([env.step(one) for env, one in zip(self.envs, action, strict=True)])

    def stacked(self, rows):
        columns = [
            () if isinstance(column[0], tuple) else np.stack(column) for column in list(zip(*rows, strict=True))[:-1]
        ]
        return TimeStep(*columns, {"draw": np.stack([row.env_info["draw"] for row in rows])})


class Camera(NamedTuple):
    """A part of an observation."""

    rgb: object
    depth: object


class Nested(AlfEnv):
    """Observations, actions and infos in dicts, lists, tuples and named tuples."""

    def observation_spec(self):
        return {
            "camera": Camera(TensorSpec((2, 2, 3), "uint8"), [TensorSpec((2,), "float64")]),
            "flags": (TensorSpec((), "bool"),),
        }

    def action_spec(self):
        return {"steer": TensorSpec((2,)), "gear": (TensorSpec((), "int32"),)}

    def env_info_spec(self):
        return {}

    def reset(self):
        return self.seen({"steer": np.zeros(2, np.float32), "gear": (np.int32(0),)}, StepType.FIRST)

    def step(self, action):
        assert action["steer"].dtype == np.float32
        return self.seen(action, StepType.MID)

    def seen(self, action, step_type):
        gear = action["gear"][0]
        observation = {
            "flags": (np.bool_(gear % 2),),
            "camera": Camera(np.full((2, 2, 3), gear, np.uint8), [action["steer"].astype(np.float64)]),
        }
        return TimeStep(step_type, 1.5, np.float32(1), observation, action, env_info={"not": "in the spec"})
