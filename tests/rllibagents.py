"""Multi-agent envs for RLlib, of which those with faults do not import Ray, so that their workers start quickly."""

from __future__ import annotations

import os
import signal

import numpy as np
from gymnasium import spaces

import envactors as ea


class WithoutRay:
    """What RLlib's ``MultiAgentEnv`` adds to its subclasses."""

    def get_observation_space(self, agent):
        return self.observation_spaces[agent]

    def get_action_space(self, agent):
        return self.action_spaces[agent]

    def render(self):
        pass

    def close(self):
        pass


class Relay(WithoutRay):
    """Ends after ten steps. ``quick`` acts in each step, ``slow`` in every third, and ``late`` in steps 4 to 6.

    Args:
        config: ``killed_at`` or ``raises_at``: the step, counted over all episodes, in which its first incarnation is
            killed or raises.
    """

    def __init__(self, config):
        self.possible_agents = self.agents = ["quick", "slow", "late"]
        self.observation_spaces = {agent: spaces.Box(-np.inf, np.inf, (2,)) for agent in self.agents}
        self.action_spaces = {agent: spaces.Discrete(2) for agent in self.agents}
        actor = ea.current_actor()
        self.faults = config if actor is not None and actor.incarnation == 0 else {}
        self.total = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.steps, self.summed = 0, 0
        return self.observe("quick", "slow"), {}

    def step(self, action_dict):
        self.total += 1
        if self.total == self.faults.get("killed_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.total == self.faults.get("raises_at"):
            raise RuntimeError("relay")
        self.steps += 1
        self.summed += sum(action_dict.values())
        present = ["quick"]
        if self.steps % 3 == 0:
            present.append("slow")
        if 4 <= self.steps <= 6:
            present.append("late")
        is_over = self.steps == 10
        if is_over:
            present = ["quick", "slow"]
        rewards = {agent: float(self.summed) for agent in present}
        terminateds = {"late": True} if self.steps == 6 else {}
        infos = {"quick": {"steps": self.steps}}
        return self.observe(*present), rewards, {**terminateds, "__all__": False}, {"__all__": is_over}, infos

    def observe(self, *agents):
        return {agent: np.array([self.summed, self.random.normal()], np.float32) for agent in agents}


class FailsToReset(Relay):
    """Raises in its second reset."""

    def __init__(self, config):
        super().__init__(config)
        self.resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        if self.resets == 2:
            raise RuntimeError("reset")
        return super().reset(**kwargs)


class Endless(Relay):
    """Does not tell whether an episode is over."""

    def step(self, action_dict):
        observations, rewards, _, truncateds, infos = super().step(action_dict)
        return observations, rewards, {}, truncateds, infos


class Unlisted(Relay):
    """Names its agents only in its spaces."""

    def __init__(self, config):
        super().__init__(config)
        self.possible_agents = []


class Pair(WithoutRay):
    """Two CartPoles, the first of which may fail; an episode ends with the first that falls.

    Args:
        pole: Class of the CartPoles.
        config: The config of the first one.
    """

    def __init__(self, pole, config):
        self.poles = {"left": pole(config), "right": pole({})}
        self.possible_agents = self.agents = list(self.poles)
        self.observation_spaces = {agent: pole.observation_space for agent, pole in self.poles.items()}
        self.action_spaces = {agent: pole.action_space for agent, pole in self.poles.items()}

    def reset(self, *, seed=None, options=None):
        results = {agent: pole.reset(seed=seed) for agent, pole in self.poles.items()}
        return {agent: result[0] for agent, result in results.items()}, {}

    def step(self, action_dict):
        results = {agent: self.poles[agent].step(action) for agent, action in action_dict.items()}
        observations, rewards, terminateds, truncateds = (
            {agent: result[i] for agent, result in results.items()} for i in range(4)
        )
        terminateds = {"__all__": any(terminateds.values())}
        return observations, rewards, terminateds, {"__all__": any(truncateds.values())}, {}
