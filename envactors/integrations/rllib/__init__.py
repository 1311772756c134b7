"""RLlib's new API stack: the envs of an env runner in actors.

Import `on_actors` from here, and for multi-agent envs `ActorMultiAgentEnvRunner`. Only the latter imports Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.rllib.creator import on_actors as on_actors
    from envactors.integrations.rllib.multi_agent import ActorMultiAgentEnvRunner as ActorMultiAgentEnvRunner
else:
    __getattr__ = exports(__name__, {"creator": "on_actors", "multi_agent": "ActorMultiAgentEnvRunner"})

__all__ = ["ActorMultiAgentEnvRunner", "on_actors"]
