"""How much the property tests try."""

from __future__ import annotations

import os

# Set to try as much as is worth while, with other values each time, rather than the same few values.
LONG = os.environ.get("TESTS_BUDGET") == "long"


def examples(most: int) -> int:
    """How many examples a property is tried with: so many in long runs, and a fifth of them in others."""
    return most if LONG else min(most, max(10, most // 5))
