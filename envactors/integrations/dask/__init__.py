"""Actors on the machines of a Dask cluster: `DaskBackend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.dask.backend import DaskBackend as DaskBackend
    from envactors.integrations.dask.backend import DaskNodes as DaskNodes
else:
    __getattr__ = exports(__name__, {"backend": "DaskBackend DaskNodes"}, needs="distributed")

__all__ = ["DaskBackend", "DaskNodes"]
