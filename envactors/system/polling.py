"""Waiting for many descriptors at once, and waking a thread or process that waits for them."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from envactors.system.choice import PORTABLE

if TYPE_CHECKING or not PORTABLE:
    from envactors.system.linux.polling import *
else:
    from envactors.system.portable.polling import *

# The longest time-out of one wait, in seconds: system calls refuse much longer ones. With a later deadline, wait again.
LONGEST_WAIT = 1e6


def remaining(deadline: float | None) -> float | None:
    """Return the seconds left until a time of `time.monotonic`, from 0 to `LONGEST_WAIT`; None for no deadline."""
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)


def is_disconnect(error: OSError) -> bool:
    """Return whether an error of a socket only says that the other end is gone."""
    return error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
