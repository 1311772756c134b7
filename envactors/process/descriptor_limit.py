"""The limit of open files, which this process raises for itself when it starts more workers."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading

from envactors.process.refusal import LaunchRefusedError
from envactors.system.choice import PORTABLE
from envactors.system.descriptors import count_descriptors

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
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            wanted = count + _NEEDED
            if soft == resource.RLIM_INFINITY or wanted <= soft:
                return
            raised = max(wanted, soft + _STEP)
            if hard != resource.RLIM_INFINITY:
                if wanted > hard:
                    raise LaunchRefusedError(
                        f"{count} file descriptors are open, {wanted} are wanted to start another worker, and {hard} "
                        "are allowed: raise the hard limit (ulimit -Hn), or have several envs per process "
                        "(envs_per_actor)"
                    )
                raised = min(hard, raised)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            self.original = soft if self.original is None else self.original
        _log.info("raised the limit of open file descriptors from %d to %d, since %d are open", soft, raised, count)

    def give_back(self, pid: int) -> None:
        """Give a worker the original limit of this process, if the system can limit other processes."""
        if self.original is not None and not PORTABLE:
            with contextlib.suppress(ProcessLookupError):
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (self.original, hard))


DESCRIPTOR_LIMIT = DescriptorLimit()
