"""Program that measures how late this machine lets a plain process run; see `chaos.machine_watch`.

It imports nothing else, so that it is small and starts at once.
"""

import mmap
import os
import struct
import sys
import time

SLEEP = 0.02  # seconds per round
WORK = 0.0002  # seconds of a core per round


def main() -> None:
    """Sleep and compute in turn, and write how much longer each round took, until the parent ends."""
    path, parent = sys.argv[1], int(sys.argv[2])
    with open(path, "r+b") as file:  # noqa: PTH123 # not pathlib, which takes longer to import than all else
        memory = mmap.mmap(file.fileno(), 0)
    place = 0
    while os.getppid() == parent:
        begun, computed = time.monotonic(), time.thread_time()
        time.sleep(SLEEP)
        while time.thread_time() < computed + WORK:
            pass
        ended = time.monotonic()
        struct.pack_into("dd", memory, place, ended, max(0.0, ended - begun - SLEEP - WORK))
        place = (place + 16) % len(memory)


if __name__ == "__main__":
    main()
