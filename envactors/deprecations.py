"""Warnings about old names, which keep working for one release."""

from __future__ import annotations

import inspect
import warnings


def warn_deprecated(message: str) -> None:
    """Emit a `DeprecationWarning` that points to the line of the first caller outside this package."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "envactors":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, DeprecationWarning, stacklevel=level + 1)
