"""LeRobot: evaluation with its envs in actors, which start when their task does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.lerobot.evaluation import eval_policy_all as eval_policy_all
    from envactors.integrations.lerobot.lazy import LazyActorVectorEnv as LazyActorVectorEnv
else:
    __getattr__ = exports(__name__, {"evaluation": "eval_policy_all", "lazy": "LazyActorVectorEnv"})

__all__ = ["LazyActorVectorEnv", "eval_policy_all"]
