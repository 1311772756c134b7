"""The memory that is left, on the machine and in each memory cgroup of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class MemoryRoom(NamedTuple):
    """A limited amount of memory. All sizes are in bytes.

    Attributes:
        whose: What has this limit: the machine or a cgroup.
        limit: The limit.
        used: How much is used and cannot be reclaimed.
        swap: How much of that can still be swapped out.
    """

    whose: str
    limit: int
    used: int
    swap: int

    @property
    def free(self) -> int:
        """The size that can still be used."""
        return max(0, self.limit - self.used + self.swap)


def find_tightest(root: Path = Path("/")) -> MemoryRoom | None:
    """Return the limit that leaves the least memory; None if the system does not tell.

    Args:
        root: The root of the file system.
    """
    machine = _read_fields(root / "proc/meminfo", 1024)
    swap = machine.get("SwapFree", 0)
    rooms = list(_read_cgroups(root, swap))
    if "MemAvailable" in machine and "MemTotal" in machine:
        total = machine["MemTotal"]
        rooms.append(MemoryRoom("the machine", total, total - machine["MemAvailable"], swap))
    return min(rooms, key=lambda room: room.free, default=None)


def _read_cgroups(root: Path, swap: int) -> Iterator[MemoryRoom]:
    """Yield the limits of the cgroups of this process, from the innermost to the outermost that is visible."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    top = root / "sys/fs/cgroup"
    for path in (line.removeprefix("0::") for line in lines if line.startswith("0::")):
        # A container in the host's cgroup namespace sees its path from the host's root, but only its own cgroup at the
        # top: the directories between them do not exist.
        place = top if ".." in path else top / path.strip("/")
        for directory in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # ValueError: there is no limit
                yield _read_cgroup(directory, swap)
            if directory == top:
                break


def _read_cgroup(directory: Path, swap: int) -> MemoryRoom:
    limit = int((directory / "memory.max").read_text())
    usage = int((directory / "memory.current").read_text())
    cache = _read_fields(directory / "memory.stat")
    used = usage - sum(cache.get(name, 0) for name in ("inactive_file", "active_file", "slab_reclaimable"))
    with contextlib.suppress(OSError):
        most = (directory / "memory.swap.max").read_text().strip()
        if most != "max":
            swap = max(0, min(swap, int(most) - int((directory / "memory.swap.current").read_text())))
    return MemoryRoom(f"the memory cgroup {directory}", limit, max(0, used), swap)


def _read_fields(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers in a file that has a name and a number in each line."""
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                fields[words[0]] = int(words[1]) * unit
    return fields
