"""The keeper of a node: ends the agent when the lease is over and the agent, stopped or stuck, cannot do so itself.

With the agent end its workers, as with any caller: the kernel and the reaper see to that.

usage: python -m envactors.remote.keeper AGENT_PIDFD LEASE_FD
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import sys
import time
from typing import Final

# The lease in the file that agent and keeper share: until when workers may run, a time of the boot clock.
LEASE_FORMAT: Final = struct.Struct("<d")


def end_agent_in_time(agent: int, lease: mmap.mmap) -> None:
    """Return once the agent has ended, by itself or by this process.

    Args:
        agent: A pidfd of the agent.
        lease: Where it writes until when workers may run.
    """
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    while True:
        (until,) = LEASE_FORMAT.unpack_from(lease)
        left = until - time.clock_gettime(time.CLOCK_BOOTTIME)
        if left <= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(agent, signal.SIGKILL)
            return
        if poll.poll(1000 * left):
            return


def main() -> None:
    """Run a keeper: see the module."""
    # Ctrl-C in the terminal of the caller is not meant for it, nor for the agent that it keeps.
    os.setpgid(0, 0)
    end_agent_in_time(int(sys.argv[1]), mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE))


if __name__ == "__main__":
    main()
