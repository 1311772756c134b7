"""Prints what the reaper and the keeper take at the end of a worker, in milliseconds of a core.

    python docs/figures/reaping.py [OTHERS]

OTHERS processes that sleep are started first, so that there is something to look through.
"""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

import envactors as ea
from envactors.testing import EchoEnv

WORKERS = 100


def taken() -> dict[str, float]:
    """Return the seconds of a core that each of the two has taken."""
    found = {}
    for child in psutil.Process().children():
        program = next((word for word in child.cmdline() if word.endswith(("reaper.py", "keeper.py"))), None)
        if program is not None:
            found[program.rpartition("/")[2]] = sum(child.cpu_times()[:2])
    return found


def main() -> None:
    """Start and end workers one after the other."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    others = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(count)]
    try:
        with ea.spawn(EchoEnv) as lasting:  # keeps the two and the fork server
            lasting.reset().result()
            before = taken()
            for _ in range(WORKERS):
                with ea.spawn(EchoEnv) as actor:
                    actor.reset().result()
            time.sleep(1.0)  # they look once more a moment after the last end
            after = taken()
            for program, seconds in after.items():
                print(f"{program}: {(seconds - before[program]) / WORKERS * 1e3:.2f} ms per worker")
            print(f"{len(psutil.pids())} processes")
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
