"""Snapshots of Gymnasium envs: all state that the current episode and later ones depend on.

Workers take and restore snapshots. This package never imports Gymnasium, ALE, or MuJoCo: the envs that use them do.
"""

from __future__ import annotations

from envactors.state.gymnasium_state import gymnasium_snapshot as gymnasium_snapshot

__all__ = ["gymnasium_snapshot"]
