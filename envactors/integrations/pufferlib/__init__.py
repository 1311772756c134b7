"""Drop-in for PufferLib 3: `make` replaces ``pufferlib.vector.make``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.pufferlib.making import make as make
    from envactors.integrations.pufferlib.vec_env import ActorVecEnv as ActorVecEnv
else:
    __getattr__ = exports(__name__, {"making": "make", "vec_env": "ActorVecEnv"}, needs="PufferLib 3")

__all__ = ["ActorVecEnv", "make"]
