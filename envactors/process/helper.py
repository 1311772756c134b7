"""The caller's half of helper processes, which fork workers and kill the processes that workers leave behind.

    launcher's thread ──fork, descriptors──▶ helper ──fork──▶ worker
                      ◀─process id, pidfd───   │
    loop's thread     ◀──exit codes────────────┘

Actors with equal settings share a helper, which ends with the last of them. A helper that was lost is replaced at the
next start. The program of the helper is `envactors.process.helper_program`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, Final, NamedTuple, TypeAlias

from envactors.errors import describe_end
from envactors.process import helper_program
from envactors.process.bootstrap import Descriptors
from envactors.process.helper_program import ANSWER, ENDED, EXIT, FORK, READY, REQUEST, STARTED, TRACKER_GRACE
from envactors.process.refusal import LaunchRefusedError
from envactors.process.starting import start_by_loky
from envactors.system.interpreters import no_fork, start_python
from envactors.system.memory import open_unnamed
from envactors.system.processes import Process, await_exit, kill_groups, open_sentinel
from envactors.system.sockets import SEND_FLAGS, open_pair, prevent_sigpipe, sigpipe_blocked
from envactors.worker.setup import WorkerSetup

# How long a helper may take to import its modules, and to fork, before it is killed and replaced, in seconds.
_IMPORT_PATIENCE: Final = 60.0
_FORK_PATIENCE: Final = 30.0
# How long it may take to report the exit code of a worker that has ended, and to exit, in seconds.
_REPORT_PATIENCE: Final = 1.0
_EXIT_PATIENCE: Final = 5.0
_log = logging.getLogger("envactors")
# Calls a function that logs, where handlers may block.
Log: TypeAlias = Callable[[Callable[[], object]], object]


class Settings(NamedTuple):
    """The settings that actors must have in common to share a helper.

    Attributes:
        forks: Whether the helper forks the workers; otherwise the caller starts them through loky.
        preload: Modules that the helper imports before it forks.
        variables: The environment variables that these modules or the interpreter may read.
        python: The interpreter of the helper and its workers; None for the caller's.
    """

    forks: bool
    preload: tuple[str, ...] = ()
    variables: frozenset[tuple[str, str]] = frozenset()
    python: str | None = None


class HelperLostError(ConnectionError):
    """The helper has ended, or was killed because it did not answer; its workers have ended with it."""


class ExitCodes:
    """The exit codes that a helper reports. It is thread-safe.

    Args:
        pipe: The pipe that the helper writes them to; reading it does not block.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        # How long to wait for the next report: not at all while the helper is late with one.
        self._patience = _REPORT_PATIENCE
        self._lock = threading.Lock()
        self._running: set[int] = set()
        # The codes that nobody has asked for yet, by process id.
        self._codes: dict[int, int] = {}

    def expect(self, pid: int) -> None:
        """Add a worker that has started."""
        with self._lock:
            self._codes.pop(pid, None)  # a late report about an earlier process with this id
            self._running.add(pid)

    def take(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended, negative for a signal; None if it is not reported in time.

        Raises:
            HelperLostError: The helper has ended, and the worker with it.
        """
        with self._lock:
            while pid not in self._codes and (self._pipe.closed or self._wait()):
                if not self._read():
                    raise HelperLostError("the helper process has ended")
            self._running.discard(pid)
            return self._codes.pop(pid, None)

    def _wait(self) -> bool:
        """Wait until the pipe is readable; return False if that takes too long."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        is_readable = bool(poll.poll(self._patience * 1000))
        self._patience = _REPORT_PATIENCE if is_readable else 0.0
        return is_readable

    def _read(self) -> bool:
        """Read some reports; return False if none was left."""
        reports = None if self._pipe.closed else self._pipe.read(EXIT.size << 12)
        self._codes.update(EXIT.iter_unpack(reports or b""))
        return bool(reports)

    def finish(self) -> set[int]:
        """Read the last reports of a helper that has ended; return the workers that have ended with it."""
        with self._lock:
            while self._read():
                pass
            self._pipe.close()
            return self._running - self._codes.keys()


class Helper:
    """A running helper process.

    Args:
        settings: Its settings.
        lease: The descriptor of the file with the lease of this process; None if it has none.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, settings: Settings, lease: int | None) -> None:
        # Why this process has killed it, in words; empty if it has not.
        self._kill_reason = ""
        # Why it must not fork; None while it imports its modules, and empty if it may.
        self._refusal: str | None = None if settings.forks else ""
        self._fork_lock = threading.Lock()
        # A child that another thread forks meanwhile would have copies of the helper's descriptors.
        with no_fork, contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self._requests, requests = open_pair(ours, theirs)
            prevent_sigpipe(self._requests)
            codes, exits = os.pipe()
            theirs.callback(os.close, exits)
            os.set_blocking(codes, False)
            self._exit_codes = ExitCodes(ours.enter_context(os.fdopen(codes, "rb", buffering=0)))
            preload = settings.preload if settings.forks else None
            boot = {"requests": requests, "exits": exits, "lease": lease, "caller_pid": os.getpid(), "preload": preload}
            fds = [requests, exits, *([] if lease is None else [lease])]
            environment = {**os.environ, **dict(settings.variables)}
            self._process = start_python(helper_program.__name__, "main", boot, fds, environment, settings.python)
            self._descriptors = ours.pop_all()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def describe_loss(self) -> str:
        """Wait for its end, and return in words how it ended."""
        code = self._process.wait()
        return self._kill_reason or (describe_end(code, None) if code >= 0 else describe_end(None, -code))

    def fork(self, setup: WorkerSetup, descriptors: Descriptors) -> Process:
        """Fork a worker.

        Raises:
            HelperLostError: The helper has ended, or does not answer and was killed.
            LaunchRefusedError: The helper must not fork.
            OSError: The system could not fork.
        """
        with self._fork_lock, open_unnamed("envactors-setup") as file:
            file.write(pickle.dumps(setup))
            file.seek(0)
            if self._refusal is None:
                first = self._receive(_IMPORT_PATIENCE)[0]
                self._refusal = "" if first == READY else first.decode()
            if self._refusal:
                raise LaunchRefusedError(self._refusal)
            with contextlib.suppress(ConnectionError), sigpipe_blocked():  # if it has ended, `_receive` raises
                fds = [file.fileno(), *descriptors.present()]
                socket.send_fds(self._requests, [REQUEST.pack(FORK, 0)], fds)
            answer, sentinels = self._receive(_FORK_PATIENCE)
            pid, error = ANSWER.unpack(answer)
            if error:
                raise OSError(error, f"the helper process cannot fork: {os.strerror(error)}")
            if not sentinels:  # the kernel drops descriptors beyond the limit of this process
                raise OSError(f"too many open files: the new worker (pid {pid}) cannot be watched, and ends by itself")
            self._exit_codes.expect(pid)
        return Process(pid, sentinels[0], functools.partial(self._exit_codes.take, pid))

    def _receive(self, patience: float) -> tuple[bytes, list[int]]:
        """Return an answer, and the descriptors that came with it; kill the helper if it does not answer in time."""
        self._requests.settimeout(patience)
        try:
            answer, fds, _, _ = socket.recv_fds(self._requests, 1 << 12, 1)
            if answer:
                return answer, fds
        except TimeoutError:
            self._kill_reason = f"did not answer for {patience:g} s and was killed"
        except OSError:
            pass  # it has ended
        self._process.kill()
        raise HelperLostError(f"the helper process {self.describe_loss()}")

    def tell(self, kind: bytes, pid: int) -> bool:
        """Send the start or the end of a worker that the caller has started; return False if that is not possible."""
        with contextlib.suppress(OSError):
            self._requests.send(REQUEST.pack(kind, pid), SEND_FLAGS | socket.MSG_DONTWAIT)
            return True
        return False

    def close(self) -> None:
        """Have the helper kill everything that its workers have left, and wait until it has ended."""
        with contextlib.suppress(OSError):  # it has ended
            self._requests.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may have a copy
        self._process.send_signal(signal.SIGCONT)  # it may be stopped
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_PATIENCE)
        self._process.kill()
        self.clean_up()

    def clean_up(self) -> int:
        """Wait for its end, kill the processes that its workers left, and return how many workers ended with it."""
        self._process.wait()
        workers = self._exit_codes.finish()
        kill_groups(dict.fromkeys(workers, 0.0))
        for group in workers:
            while await_exit(-group) is not None:
                pass  # this process adopts orphans, as process 1 of a container does
        self._descriptors.close()
        return len(workers)

    def forget(self) -> None:
        """Leave the helper to the process that this one was forked from."""
        self._process.returncode = 0  # `Popen` must not wait for the child of another process
        self._descriptors.close()


class Helpers:
    """The helpers of this process. It is thread-safe.

    Attributes:
        lease: The descriptor of the file with the lease of this process, which the helpers enforce; None if it has
            none. See `envactors.process.helper_program.LEASE`.
    """

    def __init__(self) -> None:
        self._helpers: dict[Settings, Helper] = {}
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Start without helpers, as a new process or a forked one."""
        for helper in self._helpers.values():
            helper.forget()
        self._helpers.clear()
        self.lease: int | None = None
        # Guards all state. It is replaced after a fork, since another thread may have held it.
        self._lock = threading.Lock()
        # The settings of each actor that uses a helper.
        self._users: dict[object, Settings] = {}
        # The running workers that this process has started through loky.
        self._loky_workers: set[int] = set()

    def retain(self, settings: Settings, user: object) -> None:
        """Keep the helper of these settings for an actor."""
        with self._lock:
            self._users[user] = settings

    def release(self, user: object) -> None:
        """Forget an actor, if it is known; end the helper if no other actor uses it."""
        with self._lock:
            settings = self._users.pop(user, None)
            if settings is None or settings in self._users.values():
                return
            helper = self._helpers.pop(settings, None)
        if helper is not None:
            helper.close()

    def start(self, name: str, settings: Settings, setup: WorkerSetup, log: Log, descriptors: Descriptors) -> Process:
        """Start a worker.

        Args:
            name: Its name.
            settings: The settings of its helper.
            setup: Its setup.
            log: Calls a function that logs, where handlers may block.
            descriptors: Its descriptors.

        Raises:
            LaunchRefusedError: No worker can be started with these settings.
            OSError: The worker could not be started.
        """
        if settings.forks:
            with contextlib.suppress(HelperLostError):  # try once more with another helper
                return self._current(settings, log).fork(setup, descriptors)
            return self._current(settings, log).fork(setup, descriptors)
        self._current(settings, log)  # raises before there is a worker
        pid = start_by_loky(name, setup, descriptors)
        process = Process(pid, open_sentinel(pid), functools.partial(self._reap_loky_worker, settings, pid))
        with self._lock:
            self._loky_workers.add(pid)
        self._current(settings, log).tell(STARTED, pid)  # it may have been replaced
        return process

    def _reap_loky_worker(self, settings: Settings, pid: int) -> int | None:
        """Kill the process group of a worker that has ended, reap the worker, and return its exit code."""
        with self._lock:
            self._loky_workers.discard(pid)
            helper = self._helpers.get(settings)
        is_told = helper is not None and helper.tell(ENDED, pid)
        # Kill before reaping: until then no other group can have this id. If the helper was told, it gives resource
        # trackers time to clean up, and then kills them. Everything else is killed here, too, since the helper may end
        # before it reads the message.
        kill_groups({pid: time.monotonic() + TRACKER_GRACE if is_told else 0.0})
        return await_exit(pid)

    def _current(self, settings: Settings, log: Log) -> Helper:
        """Return the helper of these settings, after starting or replacing it if it does not run."""
        with self._lock:
            helper = self._helpers.get(settings)
            if helper is not None and helper.has_ended():
                del self._helpers[settings]
                log(functools.partial(_log_loss, helper.describe_loss(), helper.clean_up()))
                helper = None
            if helper is None:
                helper = self._helpers[settings] = Helper(settings, self.lease)
                if not settings.forks:
                    for pid in self._loky_workers:
                        helper.tell(STARTED, pid)
            return helper


def _log_loss(end: str, workers: int) -> None:
    level = logging.WARNING if workers else logging.INFO
    actors = "1 actor restarts" if workers == 1 else f"{workers} actors restart"
    _log.log(level, "the helper process %s, and its workers have ended with it: %s", end, actors)


HELPERS = Helpers()
