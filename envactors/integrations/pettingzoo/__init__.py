"""Drop-in for PettingZoo: `ActorParallelEnv` steps many copies of a ``ParallelEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.pettingzoo.batches import AgentBatch as AgentBatch
    from envactors.integrations.pettingzoo.copies import ActorParallelEnvCopy as ActorParallelEnvCopy
    from envactors.integrations.pettingzoo.parallel_env import ActorParallelEnv as ActorParallelEnv
else:
    __getattr__ = exports(
        __name__,
        {"batches": "AgentBatch", "copies": "ActorParallelEnvCopy", "parallel_env": "ActorParallelEnv"},
        needs="PettingZoo",
    )

__all__ = ["ActorParallelEnv", "ActorParallelEnvCopy", "AgentBatch"]
