"""Runs each subject of a bench in a process of its own, so that subjects cannot disturb each other.

`SubjectProcess` is the command's half, `serve` the process's half. Requests and answers travel through a pipe.
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

from envactors.cli.bench.figures import Round
from envactors.cli.bench.jobs import SEED, Job
from envactors.cli.bench.subject_base import Subject

# Timeouts in seconds; a busy machine needs several times as long as an idle one.
_START_PATIENCE = 180.0
_STEP_PATIENCE = 30.0
_CLOSE_PATIENCE = 15.0
_POLL_SECONDS = 0.1

# Share of a round that is stepped unmeasured, to fill the caches that other subjects have used.
_WARM_UP_SHARE = 0.1
_TAIL = 2000  # characters kept of the output of a failed process


class SubjectFailedError(Exception):
    """A subject cannot go on.

    Args:
        message: Reason, in one line.
        details: Traceback, or the last output of the process.
    """

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class SubjectProcess:
    """One subject, its process and its results.

    Args:
        subject_type: Class of the subject.
        job: Env, number of envs and actions.
        directory: Directory for files of this subject alone.
    """

    def __init__(self, subject_type: type[Subject], job: Job, directory: Path) -> None:
        self.subject_type = subject_type
        self.name: str = subject_type.name
        self.title: str = subject_type.title(job)
        self.rounds: list[Round] = []
        self.start_seconds: float | None = None
        self.failure: SubjectFailedError | None = None
        self._job = job
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: multiprocessing.connection.Connection[Any, Any] | None = None

    def start(self, seconds: float) -> None:
        """Start the process and its envs and step them briefly; set `failure` if that fails."""
        begun = time.monotonic()
        self._directory.mkdir()
        ours, theirs = multiprocessing.Pipe()
        with theirs, self._output.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 # its own interpreter
                [sys.executable, "-c", f"from envactors.cli.bench.subjects import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(_search_path()),
                    "TMPDIR": str(self._directory),
                },
                # On Ctrl-C only the command gets the signal; it then closes the subjects.
                start_new_session=True,
            )
        self._connection = ours
        self._ask((self.subject_type, self._job, str(self._directory)), _START_PATIENCE)
        self._ask(seconds, _STEP_PATIENCE + 10 * seconds)
        self.start_seconds = time.monotonic() - begun

    def play(self, seconds: float) -> None:
        """Run one round from the first actions on and add it to `rounds`; set `failure` if that fails."""
        answer = self._ask(seconds, _STEP_PATIENCE + 10 * seconds)
        if self.failure is None:
            self.rounds.append(answer)

    def ask_to_close(self) -> None:
        """Ask the process to close its envs and end."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)

    def wait(self, deadline: float) -> None:
        """Wait for the end of the process until ``deadline`` (`time.monotonic`)."""
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
        except SubjectFailedError as failure:
            self.failure = failure
            # Otherwise it might compute on while others are measured.
            kill([self._process.pid] if self._process is not None else [])
            return None

    def _answer(self, request: Any, patience: float) -> Any:
        assert self._connection is not None, "started"
        assert self._process is not None, "started"
        deadline = time.monotonic() + patience
        try:
            self._connection.send(request)
            while not self._connection.poll(_POLL_SECONDS):
                # Its children may hold the other end of the pipe, so its death may cause no EOF.
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError
                if time.monotonic() > deadline:
                    raise SubjectFailedError(f"no answer within {patience:.0f} s", self._printed())
            done, answer = self._connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise SubjectFailedError(f"its process ended ({self._process.returncode})", self._printed())
        if not done:
            raise SubjectFailedError(*answer)
        return answer

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")[-_TAIL:]


def _search_path() -> list[str]:
    """Return the directories in which a subject's processes find modules besides the installed ones."""
    return [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]


def close_all(subjects: Iterable[SubjectProcess], spared: Iterable[int]) -> None:
    """Close all subjects in parallel and kill the processes that are left.

    Args:
        subjects: Subjects, started or not.
        spared: Pids of unrelated children of this process. The caller must have adopted orphans, so that all others
            are found.
    """
    subjects = list(subjects)
    deadline = time.monotonic() + _CLOSE_PATIENCE
    try:
        for side in subjects:
            side.ask_to_close()
        for side in subjects:
            side.wait(deadline)
    finally:
        left = {child.pid for child in psutil.Process().children()} - set(spared)
        while left:
            kill(left)
            left = {child.pid for child in psutil.Process().children()} - set(spared)


def kill(pids: Iterable[int]) -> None:
    """Kill processes with all their descendants and wait until they have ended."""
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
    """Serve one subject until the command sends None or ends.

    Args:
        descriptor: Descriptor of this process's end of the pipe.
    """
    connection: multiprocessing.connection.Connection[Any, Any] = multiprocessing.connection.Connection(descriptor)
    # Processes that the subject starts must not inherit it.
    os.set_inheritable(descriptor, False)
    subject: Subject | None = None
    try:
        while (request := connection.recv()) is not None:
            try:
                if subject is None:
                    kind, job, scratch = request
                    subject = kind(job, scratch)
                    subject.start()
                    answer: Any = None
                else:
                    answer = _play(subject, request)
            except Exception as error:
                summary = f"{type(error).__name__}: {error}".splitlines()[0]
                connection.send((False, (summary, traceback.format_exc())))
            else:
                connection.send((True, answer))
    except (EOFError, BrokenPipeError):
        # The command was killed, so this process removes the directories.
        atexit.register(_clear_away, tempfile.gettempdir())
    if subject is not None:
        subject.close()


def _clear_away(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path(directory).parent.rmdir()


def _play(subject: Subject, seconds: float) -> Round:
    subject.reset(SEED)
    _step(subject, _WARM_UP_SHARE * seconds)
    return _step(subject, seconds)


def _step(subject: Subject, seconds: float) -> Round:
    steps = 0
    begun = time.perf_counter()
    while time.perf_counter() < begun + seconds:
        steps += subject.step()
    steps += subject.settle()
    return Round(steps, time.perf_counter() - begun)
