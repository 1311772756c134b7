# ruff: noqa: RUF012
"""What the page for users of PettingZoo imports: an env whose agents leave at different times."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv


class Race(ParallelEnv):
    """An agent that has reached the goal leaves."""

    metadata = {"name": "race_v0"}
    possible_agents = ["hare", "tortoise"]
    render_mode = None

    def observation_space(self, agent):
        return Box(0, 20, (1,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def observe(self):
        return {agent: np.array([self.places[agent]], np.float32) for agent in self.agents}

    def reset(self, seed=None, options=None):
        self.agents, self.places = list(self.possible_agents), {"hare": 0, "tortoise": 0}
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        for agent, action in actions.items():
            self.places[agent] += action * (3 if agent == "hare" else 1)
        observations, there = self.observe(), {agent: self.places[agent] >= 6 for agent in self.agents}
        results = observations, {agent: float(there[agent]) for agent in there}, there, dict.fromkeys(there, False)
        infos = {agent: {} for agent in there}
        self.agents = [agent for agent in self.agents if not there[agent]]
        return *results, infos
