"""Drop-in for TorchRL: `ActorEnv` replaces ``ParallelEnv`` and ``SerialEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.torchrl.env import ActorEnv as ActorEnv
else:
    __getattr__ = exports(__name__, {"env": "ActorEnv"}, needs="TorchRL and Gymnasium")

__all__ = ["ActorEnv"]
