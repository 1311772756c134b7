"""The keeper of a node: ends the agent when the lease is over and the agent, stopped or stuck, cannot do so itself.

With the agent end its workers, as with any caller.

usage: python -m envactors.remote.keeper AGENT_PID SENTINEL_FD LEASE_FD
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from typing import Final

from envactors.system.clocks import boot_clock
from envactors.system.polling import wait_readable
from envactors.system.processes import SIGKILL, Process

# The lease in the file that agent and keeper share: until when workers may run, a time of the boot clock.
LEASE_FORMAT: Final = struct.Struct("<d")


def end_agent_in_time(agent: Process, lease: mmap.mmap) -> None:
    """Return once the agent has ended, by itself or by this process.

    Args:
        agent: The agent.
        lease: Where it writes until when workers may run.
    """
    while True:
        (until,) = LEASE_FORMAT.unpack_from(lease)
        left = until - boot_clock()
        if left <= 0:
            agent.send_signal(SIGKILL)
            return
        if wait_readable(agent.fileno(), left):
            return


def main() -> None:
    """Run a keeper: see the module."""
    # Ctrl-C in the terminal of the caller is not meant for it, nor for the agent that it keeps.
    os.setpgid(0, 0)
    pid, sentinel, lease = map(int, sys.argv[1:])
    end_agent_in_time(Process(pid, sentinel, lambda: None), mmap.mmap(lease, mmap.PAGESIZE))


if __name__ == "__main__":
    main()
