"""Snapshots of envs: everything that the rest of an episode, and the episodes after it, depend on.

Runs in the worker. Gymnasium, ALE and MuJoCo are imported by the envs that need them,
never from here.
"""

from __future__ import annotations

from envactors.state.capture import gymnasium_snapshot as gymnasium_snapshot

__all__ = ["gymnasium_snapshot"]
