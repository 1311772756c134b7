"""The env of ``envactors demo``, which fails on command. It runs in the workers."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium

ENV_ID = "CartPole-v1"


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang_in_c() -> None:
    # A deadlock that holds the GIL: neither Python code nor a signal handler ends it.
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def _segfault() -> None:
    faulthandler.disable()  # its traceback would fill the screen
    ctypes.string_at(0)


def _raise() -> None:
    raise RuntimeError("the simulation diverged")


FAULTS = {"SIGKILL": _kill, "hang in C": _hang_in_c, "segfault": _segfault, "exception": _raise}


class FaultyCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with at most one fault at a time."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make(ENV_ID))
        self._steps_left = 0
        self._fault = ""
        self._record = Path()
        self._recovered_in: float | None = None

    def arm(self, fault: str, step: int, record: str) -> None:
        """Arm a fault.

        A replay arms it again in the new process. There it does not occur a second time: its file tells when it did.

        Args:
            fault: A key of `FAULTS`.
            step: The fault occurs in this step, counted from 1.
            record: Path of a file that does not exist yet.
        """
        self._fault, self._steps_left, self._record = fault, step, Path(record)

    def recovered_in(self) -> float | None:
        """Return the seconds from the last fault until its step was repeated; None if it was not."""
        return self._recovered_in

    def step(self, action: Any) -> Any:
        """Step CartPole, after the fault if it is due."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self._meet_fault()
        return super().step(action)

    def _meet_fault(self) -> None:
        if self._record.exists():
            self._recovered_in = time.monotonic() - float(self._record.read_text())
        else:
            self._record.write_text(str(time.monotonic()))
            FAULTS[self._fault]()
