"""The environment variables of workers."""

from __future__ import annotations

import os
from collections.abc import Mapping

# The variables that set the number of threads of numerical libraries, which read them once, when they are imported.
THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit numerical libraries to one thread each.

    Variables that the caller's environment sets are left out. If it or ``env_vars`` sets ``OMP_NUM_THREADS``, all are.
    """
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in THREAD_CAPS if name not in os.environ}


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes from one environment to another: variables to set, and with None to unset."""
    changes: dict[str, str | None] = {name: None for name in before if name not in after}
    changes.update((name, value) for name, value in after.items() if before.get(name) != value)
    return changes
