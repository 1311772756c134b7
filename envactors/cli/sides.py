"""One side of a bench, in a process of its own: what others import, start and leave behind is not in its way.

`Side` is the half of the command, `serve` the one of the process. Requests and answers go through a pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from envactors.cli.contenders import Contender
from envactors.cli.figures import Round
from envactors.cli.jobs import SEED, Job

# In seconds. A machine that others use may need several times what an idle one does.
_START_PATIENCE = 180.0
_STEP_PATIENCE = 30.0
_CLOSE_PATIENCE = 15.0
_GLANCE = 0.1

# Of a round: what the side does unmeasured, after the others have had the processor's caches for a while.
_WARM_UP_SHARE = 0.1
_TAIL = 2000  # characters of what a failed process printed


class SideFailedError(Exception):
    """A side cannot go on.

    Args:
        message: Why, in a line.
        details: A traceback, or what its process printed last.
    """

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class Side:
    """One side: its process, and what it has done.

    Args:
        contender: What the process runs.
        job: What it is to do.
        directory: Of this side alone, for all that it writes.
    """

    def __init__(self, contender: type[Contender], job: Job, directory: Path) -> None:
        self.contender = contender
        self.name = contender.name
        self.title = contender.title(job)
        self.rounds: list[Round] = []
        self.start_seconds: float | None = None
        self.failure: SideFailedError | None = None
        self._job = job
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: multiprocessing.connection.Connection[Any, Any] | None = None

    def start(self, seconds: float) -> None:
        """Starts the process and its envs, and lets them step for a while; `failure` tells whether that worked."""
        begun = time.monotonic()
        self._directory.mkdir()
        ours, theirs = multiprocessing.Pipe()
        with theirs, self._output.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 # its own interpreter
                [sys.executable, "-c", f"from envactors.cli.sides import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(_search_path()),
                    "TMPDIR": str(self._directory),
                },
                # Ctrl-C in a terminal is the command's to hear, which then closes the sides.
                start_new_session=True,
            )
        self._connection = ours
        self._ask((self.contender, self._job, str(self._directory)), _START_PATIENCE)
        self._ask(seconds, _STEP_PATIENCE + 10 * seconds)
        self.start_seconds = time.monotonic() - begun

    def play(self, seconds: float) -> None:
        """Plays one round from the first actions on, and adds it to `rounds`; `failure` tells whether that worked."""
        answer = self._ask(seconds, _STEP_PATIENCE + 10 * seconds)
        if self.failure is None:
            self.rounds.append(answer)

    def ask_to_close(self) -> None:
        """Lets the process close its envs and end."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)

    def wait(self, deadline: float) -> None:
        """Waits for the end of the process, up to a time of `time.monotonic`."""
        if self._process is not None and self._connection is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self._connection.close()

    @property
    def _output(self) -> Path:
        return self._directory / "output.txt"

    def _ask(self, request: Any, patience: float) -> Any:
        if self.failure is not None:
            return None
        try:
            return self._answer(request, patience)
        except SideFailedError as failure:
            self.failure = failure
            # It might go on computing while the others are measured.
            kill([self._process.pid] if self._process is not None else [])
            return None

    def _answer(self, request: Any, patience: float) -> Any:
        assert self._connection is not None, "started"
        assert self._process is not None, "started"
        deadline = time.monotonic() + patience
        try:
            self._connection.send(request)
            while not self._connection.poll(_GLANCE):
                # Its children may have the other end of the pipe too: it does not tell of the death.
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if time.monotonic() > deadline:
                    raise SideFailedError(f"no answer within {patience:.0f} s", self._printed())
            done, answer = self._connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise SideFailedError(f"its process ended ({self._process.returncode})", self._printed())
        if not done:
            raise SideFailedError(*answer)
        return answer

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")[-_TAIL:]


def _search_path() -> list[str]:
    """Where a side's processes find modules besides the installed ones: a factory may be in the current directory."""
    return [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]


def close_all(sides: Iterable[Side], spared: Iterable[int]) -> None:
    """Closes all sides, side by side, and ends whatever is left of them.

    Args:
        sides: Started or not.
        spared: The children of this process that have nothing to do with it. For the others to be found,
            this process must adopt orphans.
    """
    sides = list(sides)
    deadline = time.monotonic() + _CLOSE_PATIENCE
    try:
        for side in sides:
            side.ask_to_close()
        for side in sides:
            side.wait(deadline)
    finally:
        left = {child.pid for child in psutil.Process().children()} - set(spared)
        while left:
            kill(left)
            left = {child.pid for child in psutil.Process().children()} - set(spared)


def kill(pids: Iterable[int]) -> None:
    """Kills processes with all their descendants, and waits until they are gone."""
    doomed: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            doomed += [process, *process.children(recursive=True)]
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=_CLOSE_PATIENCE)


def serve(descriptor: int) -> None:
    """Runs one side until it is told to end, or nobody is there any more to tell.

    Args:
        descriptor: The process's end of the pipe.
    """
    connection: multiprocessing.connection.Connection[Any, Any] = multiprocessing.connection.Connection(descriptor)
    # Not for the processes that the side starts.
    os.set_inheritable(descriptor, False)
    contender: Contender | None = None
    try:
        while (request := connection.recv()) is not None:
            try:
                if contender is None:
                    kind, job, scratch = request
                    contender = kind(job, scratch)
                    contender.start()
                    answer: Any = None
                else:
                    answer = _play(contender, request)
            except Exception as error:
                summary = f"{type(error).__name__}: {error}".splitlines()[0]
                connection.send((False, (summary, traceback.format_exc())))
            else:
                connection.send((True, answer))
    except (EOFError, BrokenPipeError):
        # The command was killed, and its directories are nobody's.
        atexit.register(_clear_away, tempfile.gettempdir())
    if contender is not None:
        contender.close()


def _clear_away(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path(directory).parent.rmdir()


def _play(contender: Contender, seconds: float) -> Round:
    contender.reset(SEED)
    _step(contender, _WARM_UP_SHARE * seconds)
    return _step(contender, seconds)


def _step(contender: Contender, seconds: float) -> Round:
    steps = 0
    begun = time.perf_counter()
    while time.perf_counter() < begun + seconds:
        steps += contender.step()
    steps += contender.settle()
    return Round(steps, time.perf_counter() - begun)
