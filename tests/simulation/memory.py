"""Memory that simulated processes share: each store of a number may be interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np

from envactors.backends.base import RowMemory
from envactors.mailbox.control_page import STREAM
from envactors.mailbox.info_codec import FAILED, Infos
from envactors.mailbox.slab import Layout, Slab
from simulation.world import World


class Cells:
    """Shared memory as numbers, each store of which may be interrupted.

    Args:
        world: The world.
        cells: The memory.
    """

    __slots__ = ("_cells", "_world")

    def __init__(self, world: World, cells: memoryview) -> None:
        self._world = world
        self._cells = cells

    def __getitem__(self, index: int) -> Any:
        return self._cells[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._world.at_store()
        self._cells[index] = value

    def __len__(self) -> int:
        return len(self._cells)

    def __eq__(self, other: object) -> bool:
        return self._cells == other

    __hash__ = None  # type: ignore[assignment]


class PageCells(Cells):
    """The counters of a control page, of which a worker reads one between reading frames and looking at rows."""

    __slots__ = ()

    def __getitem__(self, index: int) -> Any:
        if index == STREAM and self._world.chance(0.5):
            self._world.pause_worker()
        return self._cells[index]


class Completed(Cells):
    """The column that says which rows are complete; the world keeps those that workers complete."""

    __slots__ = ("encodings",)

    def __setitem__(self, index: int, value: Any) -> None:
        self._world.at_store()
        self._cells[index] = value
        if self.encodings[index] != FAILED:
            self._world.completed.add((index, value))


class Column:
    """A column of a slab, whose numbers are stored one by one; see `Cells`."""

    def __init__(self, world: World, column: np.ndarray, kind: type[Cells] = Cells) -> None:
        self._world = world
        self._column = column
        self.data = kind(world, column.data)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self._column[rows]

    def __setitem__(self, rows: Any, value: Any) -> None:
        """Store a number; in several rows at once, which the worker, told of it afterwards, cannot see half of."""
        if isinstance(rows, int):
            self.data[rows] = value
        else:
            self._world.at_store()
            self._column[rows] = value

    def reshape(self, *shape: int) -> Column:
        """Return the same memory with another shape."""
        return Column(self._world, self._column.reshape(*shape))

    def fill(self, value: Any) -> None:
        """Store a number in all rows."""
        self[:] = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._column

    def __eq__(self, other: object) -> Any:
        return self._column == other

    __hash__ = None  # type: ignore[assignment]


class Memory(RowMemory):
    """The memory of a slab; see `envactors.backends.base.RowMemory`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: list[memoryview] = []

    def create(self, layout: Layout) -> tuple[Slab, Infos]:
        self._bytes = bytearray(layout.size)
        slab = Slab(layout, self._bytes)
        slab.posted_ids = Column(self._world, slab.posted_ids)  # type: ignore[assignment]
        return slab, Infos(slab)

    def open(self, layout: Layout) -> tuple[Slab, Infos]:
        slab = Slab(layout, self._bytes)
        # Two of the columns that are written before the row counts as complete, and the one that says so.
        slab.terminated = Column(self._world, slab.terminated)  # type: ignore[assignment]
        slab.truncated = Column(self._world, slab.truncated)  # type: ignore[assignment]
        slab.written_ids = Column(self._world, slab.written_ids, Completed)  # type: ignore[assignment]
        slab.written_ids.data.encodings = slab.info_encoding.data  # type: ignore[attr-defined]
        return slab, Infos(slab)

    def extend(self, size: int) -> tuple[tuple[int, int], memoryview]:
        self._parts.append(memoryview(bytearray(size)))
        return (len(self._parts) - 1, size), self._parts[-1]

    def open_region(self, place: tuple[int, int], *, writable: bool) -> memoryview:
        part = self._parts[place[0]]
        return part if writable else part.toreadonly()

    def close(self) -> None:
        """Do nothing."""
