"""Drop-in for ML-Agents: `ActorEnvManager` replaces ``SubprocessEnvManager``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.mlagents.env_manager import ActionInfo as ActionInfo
    from envactors.integrations.mlagents.env_manager import ActorEnvManager as ActorEnvManager
    from envactors.integrations.mlagents.env_manager import EnvironmentStep as EnvironmentStep
    from envactors.integrations.mlagents.env_manager import EnvManager as EnvManager
else:
    __getattr__ = exports(
        __name__, {"env_manager": "ActionInfo ActorEnvManager EnvManager EnvironmentStep"}, needs="mlagents_envs"
    )

__all__ = ["ActionInfo", "ActorEnvManager", "EnvManager", "EnvironmentStep"]
