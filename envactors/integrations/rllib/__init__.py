"""RLlib's new API stack: the envs of an env runner in actors.

Import `on_actors` from here. It needs Gymnasium, and does not import Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.rllib.creator import on_actors as on_actors
else:
    __getattr__ = exports(__name__, {"creator": "on_actors"})

__all__ = ["on_actors"]
