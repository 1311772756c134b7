"""The number of open file descriptors."""

from __future__ import annotations

import os


def count_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 # there may be thousands, and each start counts them
