"""Gymnasium envs in wrappers that have states of every kind, and what they return."""

from __future__ import annotations

import functools
import random

import gymnasium
import numpy as np
from gymnasium import wrappers

CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]


class Noise(gymnasium.Wrapper):
    """Draws from the env's generator, from one of its own, from NumPy's old one and from Python's."""

    def __init__(self, env):
        super().__init__(env)
        self.own, self.old, self.python = np.random.default_rng(3), np.random.RandomState(4), random.Random(5)
        self.shared = None

    def step(self, action):
        self.shared = self.np_random
        obs, reward, *rest = self.env.step(action)
        extra = self.own.normal() + self.old.rand() + self.python.random() + self.shared.random()
        return obs, float(reward) + extra, *rest


WRAPPERS = {
    "time limit": lambda env: wrappers.TimeLimit(env, 17),
    "frame stack": lambda env: wrappers.FrameStackObservation(env, 3),
    "normal observation": wrappers.NormalizeObservation,
    "normal reward": wrappers.NormalizeReward,
    "statistics": wrappers.RecordEpisodeStatistics,
    "lambda": lambda env: wrappers.TransformObservation(env, lambda obs: obs * 2, env.observation_space),
    "flat": wrappers.FlattenObservation,
    "sticky": lambda env: wrappers.StickyAction(env, 0.3),
    "delay": lambda env: wrappers.DelayObservation(env, 2),
    "clock": wrappers.TimeAwareObservation,
    "noise": Noise,
    "clipped": lambda env: wrappers.ClipReward(env, -0.5, 0.5),
}


def make(name, stack=(), **kwargs):
    env = gymnasium.make(name, **kwargs)
    return functools.reduce(lambda inner, wrapper: WRAPPERS[wrapper](inner), stack, env)


def bits(obs):
    array = np.asarray(obs)
    return array.shape, str(array.dtype), array.tobytes()


def run(env, steps, seed):
    """Steps an env, resets it after each end, and returns all that it has returned."""
    rng, seen = np.random.default_rng(seed), []
    space = env.action_space
    for _ in range(steps):
        if isinstance(space, gymnasium.spaces.Discrete):
            action = int(rng.integers(space.n))
        else:
            action = rng.uniform(space.low, space.high).astype(space.dtype)
        obs, reward, terminated, truncated, info = env.step(action)
        if "episode" in info:
            info["episode"].pop("t")  # the time that it took
        seen.append((bits(obs), float(reward), bool(terminated), bool(truncated), repr(info)))
        if terminated or truncated:
            seen.append(bits(env.reset()[0]))
    return seen
