"""The env of ``envactors demo``, which fails on command. It runs in the workers."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from typing import Any

import gymnasium

from envactors import testing

ENV_ID = "CartPole-v1"
FAULTS = {
    "SIGKILL": testing.FAULTS["crash"],
    "hang in C": testing.FAULTS["hang_in_c"],
    "segfault": testing.FAULTS["segfault"],
    "exception": testing.FAULTS["raise"],
}


class FaultyCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that fails once after `arm`."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make(ENV_ID))
        self._fault = ""
        self._steps_left = 0
        self._record = Path()
        self._recovered_in: float | None = None

    def arm(self, fault: str, step: int, record: str) -> None:
        """Arm a fault.

        Replay calls this in the new process, too. There the fault does not occur again, since its file exists.

        Args:
            fault: A key of `FAULTS`.
            step: The fault occurs in this step, counted from 1.
            record: Path of a file for the time of the fault; it does not exist yet.
        """
        self._fault, self._steps_left, self._record = fault, step, Path(record)

    def recovered_in(self) -> float | None:
        """Return the seconds from the fault until its step was repeated; None if it was not repeated."""
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
            return
        self._record.write_text(str(time.monotonic()))
        faulthandler.disable()  # the traceback of a segfault would fill the screen
        FAULTS[self._fault]()
