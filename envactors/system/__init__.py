"""The services of the operating system: waiting, waking, processes, anonymous memory, cores.

Everything that differs between platforms is in this package: ``linux`` uses the calls that only Linux has, and
``portable`` replaces them by the standard library of any Unix. Both have the same files with the same names. The files
here contain what both share, and pass on the names of the implementation that `choice` has chosen. The rest of the
library imports only these files.

- ``clocks``: `boot_clock`.
- ``cpus``: cores, yielding and spinning on them.
- ``descriptors``: the number of open descriptors.
- ``memory``: `SharedFile`. A killed process leaves nothing of it behind.
- ``polling``: `Poller`, which can be polled by another poller; `Doorbell`, which wakes threads that poll it in this
  process or another one.
- ``processes``: `Process`, which can be polled for its end and is never mistaken for another process.
- ``sockets``: pairs of sockets; writing without SIGPIPE.
"""
