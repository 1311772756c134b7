"""What the operating system provides: waiting, waking, processes, memory without a name, cores.

Everything that differs between platforms is in this package. What only Linux has is in ``linux``, and what stands in
for it elsewhere in ``portable``, which needs nothing but the standard library of a Unix; both have the same files with
the same names in them. The files here have what is common to both, and the names of the one that `choice` has chosen:
the rest of the library imports these alone.

- ``clocks``: `boot_clock`.
- ``cpus``: cores, yielding and spinning on them.
- ``descriptors``: how many of them there are and may be.
- ``memory``: `SharedFile`, `map_file`. Nothing is left behind by a process that is killed.
- ``polling``: `Poller`, which can be polled by another poller; `Doorbell`, which wakes those that poll it in this
  process or another; local sockets.
- ``processes``: `Process`, which can be polled for its end and is never mistaken for another, and what processes know
  of each other.
"""
