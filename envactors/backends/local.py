"""The common half of the thread and in-line backends: workers in the caller's process, memory passed as an object."""

from __future__ import annotations

import mmap
import os
from typing import Any

from envactors.arrays.slab import Layout, Slab
from envactors.backends.base import ExitStatus, Stream
from envactors.system import Doorbell
from envactors.wire.control_page import PAGE, ControlPage
from envactors.wire.info_codec import InfoReader, InfoWriter, LocalInfoReader, LocalInfoWriter
from envactors.worker.step_runner import WriteGuard


class LocalMemory:
    """Memory of one process; see `envactors.backends.base.RowMemory`."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        # Per env, its info and object leaves, or its failure; see `LocalInfoWriter`.
        self._contents: list[Any] = []

    def create(self, layout: Layout) -> tuple[Slab, InfoReader]:
        # Not a bytearray: pages are allocated when they are first used, and private ones are copied in forked children.
        self._memory = mmap.mmap(-1, layout.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._contents = [None] * layout.envs
        slab = Slab(layout, self._memory)
        return slab, LocalInfoReader(slab, self._contents)

    def open(self, layout: Layout) -> tuple[Slab, InfoWriter]:
        """Return the slab for a worker."""
        assert self._memory is not None, "the parent has created it"
        slab = Slab(layout, self._memory)
        return slab, LocalInfoWriter(slab, self._contents)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last user."""


class LocalBackend:
    """The base of `ThreadBackend` and `InlineBackend`."""

    kills = False
    spin = False
    pickles = False
    max_starting = None

    def make_memory(self) -> LocalMemory:
        """Return memory to share; see `envactors.backends.base.Backend.make_memory`."""
        return LocalMemory()

    def retain(self) -> None:
        """Do nothing: the backend has no resources."""

    def release(self) -> None:
        """Do nothing: the backend has no resources."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LocalDoorbell(Doorbell):
    """A doorbell that an abandoned worker may still ring after the parent has closed it."""

    def ring_open(self) -> None:
        self.ring()


class LocalWorker:
    """The base of `ThreadWorker` and `InlineWorker`; see `envactors.backends.base.Worker`.

    Args:
        to_worker: The doorbell that the parent rings.
    """

    def __init__(self, to_worker: Doorbell) -> None:
        self.pid = os.getpid()
        self.outputs: list[tuple[Stream, int]] = []
        self.page = ControlPage(bytearray(PAGE), to_worker, LocalDoorbell())
        self.guard = WriteGuard()
        # Rung when the worker has ended.
        self._ended = Doorbell()
        self.sentinel = self._ended.fileno()

    def ask_stacks(self) -> None:
        """Do nothing: no deadline is enforced that would need them."""

    def stacks(self) -> str:
        return ""

    def reap(self) -> ExitStatus:
        self.page.close_bells()
        self._ended.close()
        return ExitStatus(None, None)
