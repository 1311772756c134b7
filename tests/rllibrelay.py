"""The relay as a ``MultiAgentEnv``, which RLlib's own env runner takes too."""

from __future__ import annotations

from ray.rllib.env.multi_agent_env import MultiAgentEnv
from rllibagents import Relay


class RelayOfRay(Relay, MultiAgentEnv):
    def __init__(self, config):
        MultiAgentEnv.__init__(self)
        Relay.__init__(self, config)
