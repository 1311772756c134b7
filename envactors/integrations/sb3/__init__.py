"""Drop-in for stable-baselines3: `ActorVecEnv` replaces ``SubprocVecEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.sb3.vec_env import ActorVecEnv as ActorVecEnv
else:
    __getattr__ = exports(__name__, {"vec_env": "ActorVecEnv"}, needs="stable-baselines3")

__all__ = ["ActorVecEnv"]
