"""The limit of open files, which this process raises for itself when it starts workers. These get the original one."""

from __future__ import annotations

import logging
import resource
import sys
import threading

from envactors.process.refusal import LaunchRefusedError
from envactors.system.descriptors import count_descriptors

_log = logging.getLogger("envactors")
# How many descriptors a start may need, including doorbells, those that are open for a moment, and a reserve.
_NEEDED = 100
# The smallest increase of the limit, so that it is not raised for each worker.
_STEP = 1024
_lock = threading.Lock()
# The soft limit before it was raised; None if it was not raised.
_original: int | None = None


def make_room() -> int | None:
    """Raise the soft limit if another worker would not fit below it; return the limit for workers, None for the same.

    Raises:
        LaunchRefusedError: The hard limit is not enough.
    """
    global _original
    with _lock:
        count = count_descriptors()
        wanted = count + _NEEDED
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        if soft == resource.RLIM_INFINITY or wanted <= soft:
            return _original
        if wanted > highest:
            raise LaunchRefusedError(
                f"{count} file descriptors are open, and a worker is started only if {_NEEDED} more fit below the hard "
                f"limit of {hard} (ulimit -Hn): for the start, which opens some for a moment, and as a reserve for the "
                "program's own files. Raise the hard limit, or start fewer processes (envs_per_actor, max_workers)"
            )
        raised = min(highest, max(wanted, soft + _STEP))
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        _original = soft if _original is None else _original
    _log.info("raised the limit of open file descriptors from %d to %d, since %d are open", soft, raised, count)
    return _original
