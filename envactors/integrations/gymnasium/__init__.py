"""Drop-in for Gymnasium: `ActorVectorEnv` replaces ``gymnasium.vector.AsyncVectorEnv``.

This package translates between Gymnasium and `envactors.vector`, which runs the envs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.gymnasium.registration import make_vec as make_vec
    from envactors.integrations.gymnasium.registration import register as register
    from envactors.integrations.gymnasium.vector_env import ActorVectorEnv as ActorVectorEnv
else:
    __getattr__ = exports(
        __name__, {"registration": "make_vec register", "vector_env": "ActorVectorEnv"}, needs="Gymnasium"
    )

__all__ = ["ActorVectorEnv", "make_vec", "register"]
