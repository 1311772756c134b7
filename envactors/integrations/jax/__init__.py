"""Calls from compiled JAX code: `callbacks` steps a vector env from inside ``jax.jit`` and ``jax.lax.scan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envactors.integrations.exports import exports

if TYPE_CHECKING:
    from envactors.integrations.jax.host_calls import Callbacks as Callbacks
    from envactors.integrations.jax.host_calls import callbacks as callbacks
else:
    __getattr__ = exports(__name__, {"host_calls": "Callbacks callbacks"}, needs="JAX")

__all__ = ["Callbacks", "callbacks"]
