"""Snapshots of envs: everything that the rest of an episode, and the episodes after it, depend on.

They are taken and restored in the worker. Gymnasium, ALE, and MuJoCo are never imported here, only by the envs that use
them.
"""

from __future__ import annotations

from envactors.state.capture import gymnasium_snapshot as gymnasium_snapshot

__all__ = ["gymnasium_snapshot"]
