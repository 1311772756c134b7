"""What the operating system provides: waiting, waking, processes, memory without a name, cores.

Everything that only Linux has is in this package, one file per concern, and nothing else in it, so that a stand-in for
another platform replaces files and nothing else. It has to provide, per file:

- ``cpus``: `cores`, `usable_cores`, `yield_cpu`, `pinned_while_sleeping` (may do nothing), `spin_until_all` (may
  return False at once), and `STORES_IN_ORDER` (False is always right, and makes every waiter sleep).
- ``descriptors``: `count_descriptors`, `descriptor_limits`, `limit_descriptors` (of another process: may do nothing).
- ``memory``: `SharedFile`, `map_file`. Nothing may be left behind by a process that is killed.
- ``polling``: `Poller`, which can be polled by another poller, its `READABLE` and `WRITABLE`; `Doorbell`, which may be
  rung and heard in different processes; `LONGEST_WAIT`, the longest time-out that the system's calls accept, and
  `remaining`; `wait_readable`; `packet_pair` and `is_disconnect`.
- ``processes``: `Process`, whose end can be polled for and which is never mistaken for another, `open_sentinel`,
  `await_exit`, `kill_group`, `detach`, `count_threads`, `resident_memory` (0 if unknown);
  `fixed_layout` and `restore_random_layout` (may do nothing); `SIGKILL`, and `STACKS_SIGNAL`, which env code does not
  use.
"""
