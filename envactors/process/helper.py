"""The caller's half of helper processes, which fork workers and kill what these leave behind.

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
        forks: Whether it forks the workers; otherwise the caller starts them through loky.
        preload: Modules that it imports before it forks.
        variables: The environment variables that these modules or the interpreter may read.
        python: Another interpreter; None for the caller's.
    """

    forks: bool
    preload: tuple[str, ...] = ()
    variables: frozenset[tuple[str, str]] = frozenset()
    python: str | None = None


class HelperLostError(ConnectionError):
    """The helper has ended, and its workers with it, or it does not answer."""


class ExitCodes:
    """The exit codes that a helper reports. It is thread-safe.

    Args:
        pipe: The pipe, which does not block.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._patience = _REPORT_PATIENCE
        self._lock = threading.Lock()
        self._running: set[int] = set()
        # The codes that nobody has asked for yet, by process id.
        self._codes: dict[int, int] = {}

    def expect(self, pid: int) -> None:
        """Add a worker that has started."""
        with self._lock:
            self._codes.pop(pid, None)  # of an earlier process, which was reported too late
            self._running.add(pid)

    def take(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended, minus the signal's number; None if it is not reported.

        Raises:
            HelperLostError: The helper was lost, and therefore the worker has ended.
        """
        with self._lock:
            while pid not in self._codes and self._wait():
                if not self._read():
                    raise HelperLostError("the helper process has ended")
            self._running.discard(pid)
            return self._codes.pop(pid, None)

    def _wait(self) -> bool:
        """Return whether there is something to read; wait for it, but not again if the helper reports nothing."""
        if not self._pipe.closed:
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            self._patience = _REPORT_PATIENCE if poll.poll(self._patience * 1000) else 0.0
        return self._pipe.closed or self._patience > 0

    def _read(self) -> bool:
        """Read reports; return False if there are no more."""
        reports = None if self._pipe.closed else self._pipe.read(EXIT.size << 12)
        self._codes.update(EXIT.iter_unpack(reports or b""))
        return bool(reports)

    def finish(self) -> set[int]:
        """Read what a helper has reported before its end; return the workers that have ended with it."""
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

    Attributes:
        loss: How it was lost, for people; empty while it runs.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, settings: Settings, lease: int | None) -> None:
        self.loss: str = ""
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
        """Return whether it was lost."""
        code = self._process.poll()
        if code is not None and not self.loss:
            self.loss = describe_end(code, None) if code >= 0 else describe_end(None, -code)
        return code is not None

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
            with contextlib.suppress(ConnectionError), sigpipe_blocked():  # then it does not answer either
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
        """Return an answer, and the descriptors that have come with it."""
        self._requests.settimeout(patience)
        try:
            answer, fds, _, _ = socket.recv_fds(self._requests, 1 << 12, 1)
            if answer:
                return answer, fds
        except TimeoutError:
            self.loss = f"did not answer for {patience:g} s and was killed"
        except OSError:
            pass  # it has ended
        self._process.kill()
        self._process.wait()
        self.has_ended()
        raise HelperLostError(f"the helper process {self.loss}")

    def tell(self, kind: bytes, pid: int) -> bool:
        """Report the start or the end of a worker that the caller has started; return whether the helper gets it."""
        with contextlib.suppress(OSError):
            return self._requests.send(REQUEST.pack(kind, pid), SEND_FLAGS | socket.MSG_DONTWAIT) > 0
        return False

    def close(self) -> None:
        """End the helper with everything that its workers have left, and wait until it has ended."""
        with contextlib.suppress(OSError):  # it has ended
            self._requests.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may have a copy
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_PATIENCE)
        self._process.kill()
        self.bury()

    def bury(self) -> int:
        """Kill what its workers have left, once it has ended; return how many workers have ended with it."""
        self._process.wait()
        workers = self._exit_codes.finish()
        kill_groups(dict.fromkeys(workers, 0.0))
        for group in workers:
            while await_exit(-group) is not None:
                pass  # this process is the parent of orphans, as process 1 of a container is
        self._descriptors.close()
        return len(workers)

    def forget(self) -> None:
        """Leave the helper to the process that this one was forked from."""
        self._process.returncode = 0
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
        for helper in self._helpers.values():
            helper.forget()
        self._helpers.clear()
        self.lease: int | None = None
        # Guards what is above and below.
        self._lock = threading.Lock()
        # The settings of each user.
        self._users: dict[object, Settings] = {}
        # The running workers that this process has started through loky.
        self._own_workers: set[int] = set()

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
            with contextlib.suppress(HelperLostError):
                return self._current(settings, log).fork(setup, descriptors)
            return self._current(settings, log).fork(setup, descriptors)
        helper = self._current(settings, log)
        pid = start_by_loky(name, setup, descriptors)
        process = Process(pid, open_sentinel(pid), functools.partial(self._end_own_worker, settings, pid))
        with self._lock:
            self._own_workers.add(pid)
        helper.tell(STARTED, pid)
        return process

    def _end_own_worker(self, settings: Settings, pid: int) -> int | None:
        with self._lock:
            self._own_workers.discard(pid)
            helper = self._helpers.get(settings)
        is_told = helper is not None and helper.tell(ENDED, pid)
        # Until the worker is reaped below, no other group can have its id. The helper ends trackers, which need time.
        # It may be lost before it reads that.
        kill_groups({pid: time.monotonic() + TRACKER_GRACE if is_told else 0.0})
        return await_exit(pid)

    def _current(self, settings: Settings, log: Log) -> Helper:
        """Return the helper of these settings, after starting or replacing it if it does not run."""
        with self._lock:
            helper = self._helpers.get(settings)
            if helper is not None and helper.has_ended():
                log(functools.partial(_log_loss, helper.loss, helper.bury()))
                helper = None
            if helper is None:
                helper = self._helpers[settings] = Helper(settings, self.lease)
                for pid in () if settings.forks else self._own_workers:
                    helper.tell(STARTED, pid)
            return helper


def _log_loss(loss: str, workers: int) -> None:
    level = logging.WARNING if workers else logging.INFO
    actors = "1 actor restarts" if workers == 1 else f"{workers} actors restart"
    _log.log(level, "the helper process %s, and its workers have ended with it: %s", loss, actors)


HELPERS = Helpers()
