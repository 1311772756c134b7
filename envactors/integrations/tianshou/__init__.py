"""Drop-ins for tianshou: `ActorVectorEnv` replaces ``SubprocVectorEnv``, `ActorEnvWorker` its worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.tianshou.vector_env import ActorEnvWorker as ActorEnvWorker
    from envactors.integrations.tianshou.vector_env import ActorVectorEnv as ActorVectorEnv
else:
    __getattr__ = exports(__name__, {"vector_env": "ActorEnvWorker ActorVectorEnv"}, needs="tianshou")

__all__ = ["ActorEnvWorker", "ActorVectorEnv"]
