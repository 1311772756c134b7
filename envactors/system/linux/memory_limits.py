"""The memory that is left, on the machine and in each memory cgroup (version 1 or 2) of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

# Version 1 says "no limit" with about 2**63.
_NO_LIMIT: Final = 1 << 60


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
    for version, mount_root, mount_point in _find_mounts(root):
        own = _find_own_path(root, version)
        # A container in the host's cgroup namespace sees its path from the host's root, and mounts only a part.
        own = "" if own is None or ".." in own else own
        inside = own[len(mount_root.rstrip("/")) :] if own.startswith(mount_root) else ""
        top = root / mount_point.lstrip("/")
        place = top / inside.strip("/")
        for directory in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):
                read = _read_version_2 if version == 2 else _read_version_1
                room = read(directory, swap)
                if room.limit < _NO_LIMIT:
                    yield room
            if directory == top:
                break


def _find_mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (version, path of the mounted part, mount point) for each mounted memory hierarchy."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            kind, *_, options = rest.split(" ")
            if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
                mount_root, mount_point = (field.replace("\\040", " ") for field in fields.split(" ")[3:5])
                yield 2 if kind == "cgroup2" else 1, mount_root, mount_point


def _find_own_path(root: Path, version: int) -> str | None:
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" if version == 2 else "memory" in controllers.split(","):
                return path
    return None


def _read_version_1(directory: Path, swap: int) -> MemoryRoom:
    limit, usage = (int((directory / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
    cache = _read_fields(directory / "memory.stat")
    used = usage - cache.get("total_inactive_file", 0) - cache.get("total_active_file", 0)
    with contextlib.suppress(OSError):  # the limit of memory and swap together, and their usage
        both, usage_of_both = (
            int((directory / f"memory.memsw.{name}_in_bytes").read_text()) for name in ("limit", "usage")
        )
        swap = max(0, min(swap, both - limit - (usage_of_both - usage)))
    return MemoryRoom(f"the memory cgroup {directory}", limit, max(0, used), swap)


def _read_version_2(directory: Path, swap: int) -> MemoryRoom:
    text = (directory / "memory.max").read_text().strip()
    usage = int((directory / "memory.current").read_text())
    cache = _read_fields(directory / "memory.stat")
    used = usage - sum(cache.get(name, 0) for name in ("inactive_file", "active_file", "slab_reclaimable"))
    with contextlib.suppress(OSError):
        most = (directory / "memory.swap.max").read_text().strip()
        if most != "max":
            swap = max(0, min(swap, int(most) - int((directory / "memory.swap.current").read_text())))
    return MemoryRoom(f"the memory cgroup {directory}", _NO_LIMIT if text == "max" else int(text), max(0, used), swap)


def _read_fields(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers in a file that has a name and a number in each line."""
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                fields[words[0]] = int(words[1]) * unit
    return fields
