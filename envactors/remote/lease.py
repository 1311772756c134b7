"""The lease of a node: until when its workers may run, as computed by the node and by the caller.

The agent stamps each heartbeat with its own clock, and the caller echoes the newest stamp. Workers may run until
(echoed stamp + lease) by the agent's clock, so a delayed heartbeat does not extend the lease, nor does a link that is
cut in one direction. The stamp is older than the echo, so no worker runs 1.1 leases after the caller's last echo, and
another process may take its place. The additional tenth covers clocks that differ in speed, and the time that it takes
to end processes. Times are those of `envactors.system.clocks.boot_clock`; tests use other clocks.
"""

from __future__ import annotations

# How many leases the caller waits after its last echo.
_MARGIN = 1.1


class WorkerLease:
    """The agent's side.

    Args:
        lease: Its length, in seconds.
        now: The time of the first stamp, in seconds of the agent's clock.

    Attributes:
        until: When workers must stop running, in seconds of the agent's clock.
    """

    def __init__(self, lease: float, now: float) -> None:
        self._lease = lease
        self.until: float = now + lease

    def renew(self, stamp: float) -> None:
        """Extend the lease: the caller has echoed a stamp."""
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
        """Record that the node has sent something."""
        self._heard = now

    def echo(self, now: float) -> None:
        """Record that an echo is about to be sent."""
        self._echoed = now

    @property
    def silent_at(self) -> float:
        """When the node counts as lost unless it sends something."""
        return self._heard + self._lease

    @property
    def over_at(self) -> float:
        """When no worker of the node can be running, unless another echo is sent."""
        return self._echoed + _MARGIN * self._lease
