"""Actors on other machines: a node agent per machine, one link to each, and a backend like any other.

    caller                                       node
    Actor ─────── RemoteWorker ─┐
    Actor ─────── RemoteWorker ─┼── Node ══ link ══ agent ─┬─ worker
                                                    │      └─ worker
                                      helper process (ends the agent when its lease is over)

The entry is `envactors.remote.backend`. `envactors.remote.lease` says why two processes of one actor never run at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envactors.remote.local_nodes import LocalNodes as LocalNodes

__all__ = ["LocalNodes"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'envactors.remote' has no attribute {name!r}")
    return importlib.import_module("envactors.remote.local_nodes").LocalNodes
