"""How much the property tests try."""

from __future__ import annotations

import os

# True to try many examples, new ones in each run, instead of the same few.
LONG = os.environ.get("TESTS_BUDGET") == "long"


def examples(most: int) -> int:
    """Settings that try this many examples of a property in long runs, and a fifth of them in others."""
    return most if LONG else min(most, max(10, most // 5))
