"""Forked processes that run histories: everything is imported already, and nothing is left over from others."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from envactors.system.cpus import usable_cores

T = TypeVar("T")
R = TypeVar("R")


def run_forked(run: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Run a function once per task, each in a process of its own, and on all cores.

    Args:
        run: What runs.
        tasks: Its arguments; each one is taken when a core is free for it.

    Yields:
        Each task and what it returns, as they end.

    Raises:
        RuntimeError: A process has ended before its task.
    """
    context = multiprocessing.get_context("fork")
    free = _cores()
    waiting = iter(tasks)
    running: dict[Connection, tuple[T, int | None]] = {}
    gc.collect()
    gc.freeze()  # what is here already is neither looked at nor copied in any of the processes
    try:
        while True:
            for task in waiting:
                reader, writer = context.Pipe(duplex=False)
                core = free.pop()
                context.Process(target=_run_one, args=(run, task, core, writer), daemon=True).start()
                writer.close()
                running[reader] = task, core
                if not free:
                    break
            if not running:
                return
            for reader in wait(list(running)):
                task, core = running.pop(reader)
                free.append(core)
                yield task, _read(reader, task)
    finally:
        gc.unfreeze()


def _cores() -> list[int | None]:
    """Return the cores that processes are bound to; they run anywhere where that cannot be said."""
    if hasattr(os, "sched_getaffinity"):
        return list(sorted(os.sched_getaffinity(0))[: usable_cores()])
    return [None] * usable_cores()


def _run_one(run: Callable[[T], R], task: T, core: int | None, writer: Connection) -> None:
    if core is not None:
        # Its threads run in turns: to wake one on another core takes longer than what it then does.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
    writer.send(run(task))


def _read(reader: Connection, task: object) -> R:
    with reader:
        try:
            return reader.recv()
        except EOFError:
            raise RuntimeError(f"the process of {task} has ended before it") from None
