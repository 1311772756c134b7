"""What the operating system provides: waiting, waking, processes, memory without a name, cores.

Everything that only Linux has is in this package, one file per concern, and nothing else in it. Other modules import
the names below from here and never from the files, so that a stand-in for another platform replaces files and nothing
else. A stand-in has to provide, per file:

- ``clock``: `LONGEST_WAIT`, the longest time-out that the system's calls accept, and `remaining`.
- ``cpus``: `cores`, `yield_cpu`, `pinned_while_sleeping` (may do nothing), the three spins (may return False at once),
  and `STORES_IN_ORDER` (False is always right, and makes every waiter sleep).
- ``layout``: `fixed_layout` and `restore_random_layout` (may do nothing).
- ``memory``: `SharedFile`, `anonymous_file`, `map_file`. Nothing may be left behind by a process that is killed.
- ``polling``: `Poller`, which can be polled by another poller, its `READABLE` and `WRITABLE`, and `Doorbell`, which may
  be rung and heard in different processes.
- ``processes``: `Process`, whose end can be polled for and which is never mistaken for another, `open_sentinel`,
  `await_exit`, `kill_group`, `start_detached`, `die_with_parent`, `leave_terminal`, `resident_memory` (0 if unknown).
- ``signals``: `SIGKILL`, and `STACKS_SIGNAL`, which env code does not use.
- ``sockets``: `packet_pair`, `unread_by_peer` (False means that a call may have begun), `is_disconnect`.
"""

from __future__ import annotations

from envactors.system.clock import LONGEST_WAIT, remaining
from envactors.system.cpus import (
    STORES_IN_ORDER,
    cores,
    pinned_while_sleeping,
    spin_until,
    spin_until_all,
    spin_until_changed,
    yield_cpu,
)
from envactors.system.layout import fixed_layout, restore_random_layout
from envactors.system.memory import SharedFile, anonymous_file, map_file
from envactors.system.polling import READABLE, WRITABLE, Doorbell, Poller
from envactors.system.processes import (
    Process,
    await_exit,
    die_with_parent,
    kill_group,
    leave_terminal,
    open_sentinel,
    resident_memory,
    start_detached,
)
from envactors.system.signals import SIGKILL, STACKS_SIGNAL
from envactors.system.sockets import is_disconnect, packet_pair, unread_by_peer

__all__ = [
    "LONGEST_WAIT",
    "READABLE",
    "SIGKILL",
    "STACKS_SIGNAL",
    "STORES_IN_ORDER",
    "WRITABLE",
    "Doorbell",
    "Poller",
    "Process",
    "SharedFile",
    "anonymous_file",
    "await_exit",
    "cores",
    "die_with_parent",
    "fixed_layout",
    "is_disconnect",
    "kill_group",
    "leave_terminal",
    "map_file",
    "open_sentinel",
    "packet_pair",
    "pinned_while_sleeping",
    "remaining",
    "resident_memory",
    "restore_random_layout",
    "spin_until",
    "spin_until_all",
    "spin_until_changed",
    "start_detached",
    "unread_by_peer",
    "yield_cpu",
]
