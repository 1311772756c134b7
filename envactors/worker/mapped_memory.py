"""The memory of a vector, as the worker processes of this machine map it."""

from __future__ import annotations

from envactors.mailbox.info_codec import Infos
from envactors.mailbox.slab import Layout, Slab
from envactors.system.memory import map_part


class MappedParts:
    """The memory of a vector, whose parts a worker maps; see `envactors.worker.main.OpenMemory`.

    Args:
        fd: The file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open(self, layout: Layout) -> tuple[Slab, Infos]:
        slab = Slab(layout, self.open_region((0, layout.size), writable=True))
        return slab, Infos(slab)

    def open_region(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        start, size = place
        part = map_part(self._fd, size, start)
        return part if writable else part.toreadonly()
