"""Until when workers of a node may run, as the node and as the caller know it.

The agent stamps each heartbeat with its own clock, and the caller echoes the newest stamp. Workers may run until
(echoed stamp + lease) by the agent's clock, so a heartbeat that was long on its way prolongs nothing, and neither does
a link that is cut in one direction. The stamp is older than the echo; so once 1.1 leases have passed since the caller
sent its last echo, no worker runs, and another process may take its place. A tenth is for clocks that differ in speed,
and for the time it takes to end processes. Times are those of `envactors.system.clocks.boot_clock`, or of any clock of
a test.
"""

from __future__ import annotations

# How much longer than a lease the caller waits after its last echo.
_MARGIN = 1.1


class WorkerLease:
    """The agent's side.

    Args:
        lease: Its length, in seconds.
        now: The stamp that the caller has not echoed yet.

    Attributes:
        until: When workers may no longer run, in seconds of the agent's clock.
    """

    def __init__(self, lease: float, now: float) -> None:
        self._lease = lease
        self.until: float = now + lease

    def renew(self, stamp: float) -> None:
        """Prolong it: the caller has echoed a stamp."""
        self.until = max(self.until, stamp + self._lease)


class NodeLease:
    """The caller's side.

    Args:
        lease: Its length, in seconds.
        now: The time, in seconds of the caller's clock.
    """

    def __init__(self, lease: float, now: float) -> None:
        self._lease = lease
        self._heard = self._echoed = now

    def hear(self, now: float) -> None:
        """Note that something has come from the node."""
        self._heard = now

    def echo(self, now: float) -> None:
        """Note that an echo is about to be sent."""
        self._echoed = now

    @property
    def silent_at(self) -> float:
        """When the node counts as lost if nothing comes until then."""
        return self._heard + self._lease

    @property
    def over_at(self) -> float:
        """When no worker of the node runs any more, if there is no further echo."""
        return self._echoed + _MARGIN * self._lease
