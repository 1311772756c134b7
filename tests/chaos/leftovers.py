"""The processes that a workload leaves behind."""

from __future__ import annotations

import time

import psutil


def descendants() -> set[int]:
    """Return the processes that this one has started, and those that they have."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def find_leftovers(before: set[int], patience: float) -> set[int]:
    """Return the descendants that were not there before and do not end in time.

    Args:
        before: The earlier result of `descendants`.
        patience: How long they may take to end, in seconds.
    """
    deadline = time.monotonic() + patience
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
