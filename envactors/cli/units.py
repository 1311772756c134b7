"""Durations, sizes, rates, and counts in a few characters."""

from __future__ import annotations

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration(seconds: float) -> str:
    """Return a duration, such as ``"18 ms"`` or ``"3m05s"``."""
    if seconds < 0.0000995:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 0.9995:
        milliseconds = 1000 * seconds
        return f"{milliseconds:.{_decimals(milliseconds)}f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02}h"


def size(count: int) -> str:
    """Return a number of bytes, such as ``"123 MB"``."""
    if count < 1_000_000:
        return f"{count / 1000:.0f} kB" if count >= 1000 else f"{count} bytes"
    value = count / 1e6
    return f"{value:.0f} MB" if value < 1000 else f"{value / 1000:.1f} GB"


def rate(per_second: float) -> str:
    """Return how often something happens in a second, such as ``"1,234"``."""
    return f"{per_second:,.{_decimals(per_second) if per_second else 0}f}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 actor``, ``2 actors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _decimals(value: float) -> int:
    """Return how many decimals show at least two digits of a value."""
    return 0 if value >= 9.95 else 1 if value >= 0.995 else 2
