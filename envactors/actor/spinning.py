"""When threads and workers spin for a short time before they sleep."""

from __future__ import annotations

from envactors.mailbox.control_page import NO_SPIN, SPINNING
from envactors.system.cpus import STORES_IN_ORDER

# A pause between two requests, in seconds, that is short enough for a worker to spin through.
_SHORT_PAUSE = 200e-6
# If the last result came within this many seconds, it pays off to spin for the next one.
_SHORT_WAIT = 1e-3


class SpinPolicy:
    """Decides from the times of the last request whether to spin for the next one.

    Args:
        may_spin: Whether the backend lets threads spin.

    Attributes:
        enabled: Whether callers and workers may spin: the backend and the processor allow it.
        caller_spins: Whether the caller spins for the result before it sleeps.
    """

    __slots__ = ("_completed_at", "_started_at", "caller_spins", "enabled")

    def __init__(self, may_spin: bool) -> None:
        self.enabled: bool = may_spin and STORES_IN_ORDER
        self._started_at = self._completed_at = 0.0
        self.caller_spins: bool = False

    def record_start(self, now: float) -> int:
        """Record the start of a request; return how the worker waits for the one after it."""
        self._started_at = now
        return SPINNING if self.enabled and now - self._completed_at < _SHORT_PAUSE else NO_SPIN

    def complete(self, now: float) -> None:
        """Record that the caller has the result."""
        self._completed_at = now
        self.caller_spins = self.enabled and now - self._started_at < _SHORT_WAIT
