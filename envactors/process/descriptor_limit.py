"""The limit of open files, which this process raises for itself when it starts more workers."""

from __future__ import annotations

import logging
import threading

from envactors.process.refusal import LaunchRefusedError
from envactors.system.descriptors import count_descriptors, descriptor_limits, limit_descriptors

_log = logging.getLogger("envactors")
# How many descriptors a start may need, including doorbells, those that are open for a moment, and a reserve.
_NEEDED = 100
# The smallest increase of the limit, so that it is not raised for each worker.
_STEP = 1024


class DescriptorLimit:
    """The limit of this process. It is thread-safe.

    Attributes:
        original: The soft limit before it was raised, which workers get; None if it was not raised.
    """

    def __init__(self) -> None:
        self.original: int | None = None
        self._lock = threading.Lock()

    def make_room(self) -> None:
        """Raise the soft limit if another worker would not fit below it.

        Raises:
            LaunchRefusedError: The hard limit is not enough.
        """
        with self._lock:
            count = count_descriptors()
            soft, hard = descriptor_limits()
            wanted = count + _NEEDED
            if wanted <= soft:
                return
            if wanted > hard:
                raise LaunchRefusedError(
                    f"{count} file descriptors are open, {wanted} are wanted to start another worker, and {hard} are "
                    f"allowed: raise the hard limit (ulimit -Hn), or have several envs per process (envs_per_actor)"
                )
            raised = min(hard, max(wanted, soft + _STEP))
            limit_descriptors(raised)
            self.original = soft if self.original is None else self.original
        _log.info("raised the limit of open file descriptors from %d to %d, since %d are open", soft, raised, count)

    def give_back(self, pid: int) -> None:
        """Give a worker the original limit of this process."""
        if self.original is not None:
            limit_descriptors(self.original, pid)


DESCRIPTOR_LIMIT = DescriptorLimit()
