"""A side of a bench in an actor, so that sides cannot disturb each other, and none can hold up the command."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import envactors as ea
from envactors.cli.bench.registry import Entry
from envactors.system.cpus import cores
from envactors.tuning.measuring import SEED, Round, Side, Workload

# Deadlines in seconds; a busy machine needs several times as long as an idle one.
_START, _STEP, _CLOSE = 180.0, 30.0, 15.0
# Share of a round that is stepped unmeasured, to fill the caches that other sides have used.
_WARM_UP_SHARE = 0.1


class Contestant:
    """One side, its actor, and its results.

    Args:
        entry: The side.
        workload: Envs and actions.
        seconds: Duration of a round.

    Attributes:
        entry: The side.
        rounds: Its results.
        start_seconds: How long it took to start; None until it has started.
        failure: Why it failed, in a line; None if it did not.
        details: Traceback of the failure.
    """

    def __init__(self, entry: Entry, workload: Workload, seconds: float) -> None:
        self.entry = entry
        self.rounds: list[Round] = []
        self.start_seconds: float | None = None
        self.failure: str | None = None
        self.details: str = ""
        self._workload = workload
        self._seconds = seconds
        self._actor: ea.ActorHandle[Host] | None = None

    def start(self) -> None:
        """Start the process and its envs, and step them briefly; set `failure` if that fails."""
        begun = time.monotonic()
        # Workers of envactors have one thread for linear algebra; other libraries have as many as the caller.
        env_vars = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores()))}
        # Processes that a side starts find the env in the current directory, too.
        env_vars["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        self._actor = ea.spawn(
            functools.partial(Host, self.entry.make, self._workload, "OMP_NUM_THREADS" in os.environ),
            name=self.entry.name,
            backend=ea.ProcessBackend("loky"),
            deadlines=ea.Deadlines(start=_START, call=_STEP + 10 * self._seconds, close=_CLOSE),
            env_vars=env_vars,
        )
        if self._play() is not None:
            self.start_seconds = time.monotonic() - begun

    def play(self) -> None:
        """Run one round from the first actions on and add it to `rounds`; set `failure` if that fails."""
        if self.failure is None and (result := self._play()) is not None:
            self.rounds.append(result)

    def close(self) -> None:
        """Close the envs and end the process."""
        if self._actor is not None:
            self._actor.close()

    def _play(self) -> Round | None:
        assert self._actor is not None, "it was started"
        try:
            return self._actor.call(Host.play, self._seconds).result()
        except Exception as error:  # raised by the library that is measured
            cause = error.__cause__ if isinstance(error, ea.ActorStartError) and error.__cause__ else error
            self.failure = f"{type(cause).__name__}: {cause}".splitlines()[0]
            self.details = "".join(traceback.format_exception(error))
            self._actor.kill()  # otherwise it might keep a core busy while others are measured
            return None


class Host:
    """Runs a side, in the actor's process.

    Args:
        make: Makes the side.
        workload: Envs and actions.
        has_limit: Whether the user has set ``OMP_NUM_THREADS``.
    """

    def __init__(self, make: Callable[[Workload], Side], workload: Workload, has_limit: bool) -> None:
        if not has_limit:
            os.environ.pop("OMP_NUM_THREADS", None)
        # Libraries print to the terminal, where it would disturb the table.
        devnull = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(devnull, stream.fileno())
        self._side = make(workload)
        self._side.start()

    def play(self, seconds: float) -> Round:
        """Run one round from the first actions on."""
        self._side.reset(SEED)
        return self._side.play(seconds, _WARM_UP_SHARE * seconds)

    def close(self) -> None:
        """Close the envs."""
        self._side.close()
