"""Drop-ins for DI-engine: `AsyncActorEnvManager`, `SyncActorEnvManager`, and `ActorEnvManagerV2`.

The managers work with any object that has ``reset``, ``step``, ``seed``, and ``close``. If DI-engine is installed, they
derive from its `BaseEnvManager`, return its `BaseEnvTimestep`, and are registered as ``async_actor``, ``actor``, and
``actor_v2``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports
from envactors.worker import context

# DI-engine finds a manager only if importing this package registers it. A worker, which imports the package for the
# adapter, must not load the managers.
if TYPE_CHECKING or context.of_process is None:
    from envactors.integrations.ding.async_manager import AsyncActorEnvManager as AsyncActorEnvManager
    from envactors.integrations.ding.managers import ActorEnvManagerV2 as ActorEnvManagerV2
    from envactors.integrations.ding.managers import SyncActorEnvManager as SyncActorEnvManager
else:
    __getattr__ = exports(
        __name__, {"async_manager": "AsyncActorEnvManager", "managers": "ActorEnvManagerV2 SyncActorEnvManager"}
    )

__all__ = ["ActorEnvManagerV2", "AsyncActorEnvManager", "SyncActorEnvManager"]
