"""The warning about deprecated names and arguments, which keep working for one release.

The modules that define such names decide what to warn about.
"""

from __future__ import annotations

import inspect
import warnings


def warn_deprecated(message: str) -> None:
    """Emit a `DeprecationWarning` that points to the first caller outside this package."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "envactors":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, DeprecationWarning, stacklevel=level + 1)
