"""The deprecated name of the module `envactors.integrations.alf.rotation`."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Rotation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from envactors.integrations.alf.rotation import Rotation

    warnings.warn(
        "envactors.integrations.alf_rotation is deprecated: import Rotation from envactors.integrations.alf.rotation",
        DeprecationWarning,
        stacklevel=2,
    )
    return Rotation
