"""How late this machine lets processes run, so that a run can tell a busy machine from a library that stalls."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from chaos import machine_probe

_ROUNDS = 8192  # rounds of the probe that are remembered: some minutes


class MachineWatch:
    """A plain process beside the run, which takes turns sleeping and computing, and notes how late it is each time.

    Whatever the library waits for may be as late as this process is in the same moment. A limit of time is therefore
    compared with what remains once `lateness` is subtracted. On a machine with cores to spare that is close to 0.

    Attributes:
        process: The process.
    """

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="envactors-chaos-")  # noqa: SIM115 # `__exit__` closes it
        self._file.truncate(_ROUNDS * 16)
        # The time at which each round ended (`time.monotonic`), and by how many seconds it was late.
        self._rounds: npt.NDArray[np.float64] = np.memmap(self._file.name, np.float64, "r", shape=(_ROUNDS, 2))
        self._begun = time.monotonic()
        command = [sys.executable, "-I", "-S", str(Path(machine_probe.__file__)), self._file.name, str(os.getpid())]
        # In a session of its own: Ctrl-C at a terminal is for the run.
        self.process = subprocess.Popen(command, start_new_session=True)

    @property
    def last_round(self) -> float:
        """Time at which the process was last seen to run (`time.monotonic`)."""
        return float(max(self._begun, np.array(self._rounds)[:, 0].max()))

    def lateness(self, since: float) -> float:
        """Return how many seconds of those since then (`time.monotonic`) the machine was late."""
        now, last = time.monotonic(), self.last_round
        ended, late = np.array(self._rounds).T
        recent = ended > since
        running = now - max(since, last) - machine_probe.SLEEP - machine_probe.WORK
        total = np.minimum(late[recent], ended[recent] - since).sum() + max(0.0, running)
        return float(min(total, now - since))

    def __enter__(self) -> MachineWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        del self._rounds
        self._file.close()
