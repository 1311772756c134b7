"""Crash bundles of the caller: which failures get one, and what it says.

`CrashReporter.report` returns the path of a bundle at once, and a thread of the library writes it later.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime as dt
import logging
import math
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from envactors.crashes import files
from envactors.crashes.files import SavedInputs
from envactors.crashes.inputs import Inputs
from envactors.errors import ActorError, ActorStartError, ActorTimeoutError, NodeLostError, name_bundle
from envactors.mailbox.messages import Failure, Kind, RecordedSteps, Replay, Start
from envactors.mailbox.pickling import dumps, loads, safe_repr
from envactors.mailbox.recorded import input_of
from envactors.options import Deadlines

# The option ``crash_dir``.
CrashDir: TypeAlias = "str | os.PathLike[str] | None"
# Has a thread of the library call a function.
Submit: TypeAlias = Callable[[Callable[[], object]], object]

# The parts of a report that say how the request ended. All are None if it returned.
ENDINGS = ("exception", "deadline", "signal", "exitcode")

_log = logging.getLogger("envactors")
# How many bundles one run leaves in one directory.
CRASH_LIMIT = 20
# The packages whose versions matter most, if the program has imported them.
_PACKAGES = ("envactors", "numpy", "gymnasium", "torch", "jax")
_FRAME = re.compile(r'^  File "(.*?)", line (\d+)', re.MULTILINE)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
# How long a reader, or the end of the program, waits for the thread that writes bundles, in seconds.
_WRITE_PATIENCE = 10.0

# By path, the directories of this program.
_directories: dict[str, CrashDirectory] = {}
# By path, the bundles that are not written yet.
_pending: dict[str, threading.Event] = {}


def wait_written(path: str) -> None:
    """Wait until this program has written a bundle, if it is about to."""
    pending = _pending.get(os.path.abspath(path))  # noqa: PTH100
    if pending is not None:
        pending.wait(_WRITE_PATIENCE)


@atexit.register
def _finish_writing() -> None:
    """Wait at the end of the program for the bundles that are not written yet: daemon threads end with it."""
    pending = list(_pending.values())
    if pending:
        pending[-1].wait(_WRITE_PATIENCE)


def _reset_after_fork() -> None:
    """Forget the parent's bundles, which no thread of this process writes, and its locks, which may be held."""
    _directories.clear()
    _pending.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


class CrashDirectory:
    """The bundles that this program leaves in one directory.

    Args:
        path: The directory, which need not exist.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        # How many failures there were, except repeated exceptions.
        self._failures = 0
        # By type and line, the bundle of the first exception.
        self._exceptions: dict[tuple[str, str], str] = {}

    def reserve(self, actor: str, kind: str, failure: Failure | None, submit: Submit) -> tuple[str | None, bool]:
        """Return the path of a new bundle, and True; or that of an earlier one of the same exception, and False.

        If there are enough bundles, the path is None. The 1st, the 10th, the 100th such failure, and so on, is logged.
        """
        # Other programs may use the same directory, and actors of the same name: a second is not unique.
        name = re.sub(r"[^\w.-]+", "_", f"{dt.datetime.now():%Y%m%d-%H%M%S.%f}-{actor}-{kind}")
        path = os.path.join(self._path, name)  # noqa: PTH118
        key = None if failure is None else (failure.text.partition("(")[0], _line_of(failure.traceback))
        with self._lock:
            if key in self._exceptions:
                return self._exceptions[key], False
            self._failures += 1
            skipped = self._failures - CRASH_LIMIT
            if skipped <= 0 and key is not None:
                self._exceptions[key] = path
        if skipped <= 0:
            return path, True
        if math.log10(skipped).is_integer():
            text = "one run leaves at most %d crash bundles in %s; failures without one so far: %d"
            submit(lambda: _log.warning(text, CRASH_LIMIT, self._path, skipped))
        return None, False


class Request(Protocol):
    """An `envactors.actor.job.Activity`: the request that env code was running."""

    @property
    def method(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def call_id(self) -> int: ...


class Outcome(Protocol):
    """An `envactors.actor.future.Outcome`."""

    is_failure: bool

    def read(self) -> tuple[Any, BaseException | None]:
        """Return the result, or the exception."""


AnyOutcome = TypeVar("AnyOutcome", bound=Outcome)


class NamedOutcome:
    """The outcome of a request whose exception names its crash bundle.

    Args:
        outcome: The outcome as such, which is read more than once.
        bundle: The path of the bundle.
    """

    def __init__(self, outcome: Outcome, bundle: str) -> None:
        self.is_failure: bool = True
        self.bundle = bundle
        self._outcome = outcome

    def read(self) -> tuple[Any, BaseException | None]:
        """Return the exception, the same one each time."""
        value, error = self._outcome.read()
        if error is not None:
            name_bundle(error, self.bundle)
        return value, error


class CrashReporter:
    """Leaves the crash bundles of one actor.

    Args:
        crash_dir: The directory.
        start: The first message to its workers.
        env_vars: The environment variables of its workers.
        deadlines: The time limits of its requests.
        is_inline: Whether its envs run in the threads of callers, which keep no inputs.

    Attributes:
        submit: Has a thread of the library call a function. The actor sets it.

    Raises:
        TypeError: ``crash_dir`` is not a path.
        ValueError: ``is_inline`` is True.
    """

    def __init__(
        self,
        crash_dir: str | os.PathLike[str],
        start: Start,
        env_vars: Mapping[str, str],
        deadlines: Deadlines,
        *,
        is_inline: bool,
    ) -> None:
        if is_inline:
            raise ValueError(f"crash_dir for {start.name!r}, whose envs run in your process: leave crash_dir out")
        if not isinstance(crash_dir, (str, os.PathLike)):
            raise TypeError(f"crash_dir is {crash_dir!r}: expected the path of a directory, or None")
        path = os.path.abspath(crash_dir)  # noqa: PTH100 # the env may leave the working directory
        self._directory = _directories.setdefault(path, CrashDirectory(path))
        self._start = start
        self._env_vars = dict(env_vars)
        self._deadlines = deadlines
        self.submit: Submit

    def name(
        self,
        outcome: AnyOutcome,
        failure: Failure,
        get_inputs: Callable[[], Inputs],
        request: Request,
        incarnation: int,
        pid: int | None,
    ) -> AnyOutcome | NamedOutcome:
        """Leave a bundle of an exception that env code has raised; return the outcome with it, which names the bundle.

        Args:
            outcome: The outcome with the exception, not unpickled yet.
            failure: The exception.
            get_inputs: As for `report`.
            request: The request in which it was raised.
            incarnation: The index of the process.
            pid: Its process id.
        """
        where = ActorError(
            actor=self._start.name,
            index=request.index,
            pid=pid,
            incarnation=incarnation,
            method=request.method,
            call_id=request.call_id,
        )
        path = self.report(where, get_inputs, failure)
        return outcome if path is None else NamedOutcome(outcome, path)

    def report(self, error: ActorError, get_inputs: Callable[[], Inputs], failure: Failure | None) -> str | None:
        """Leave a bundle, unless the same exception has left one; return its path, or None if there are enough.

        Args:
            error: The error of the failure, or only its place if env code has raised.
            get_inputs: Returns the inputs. It is called only if the bundle is written, and before this returns.
            failure: The exception that env code has raised; None if there was none.
        """
        if isinstance(error, NodeLostError):
            return None
        # Exceptions may be frequent: only a new bundle needs the inputs of one.
        inputs = self._find(get_inputs) if failure is None else None
        kind = "died" if failure is None else "exception"
        if isinstance(error, (ActorStartError, ActorTimeoutError)):
            kind = "start" if isinstance(error, ActorStartError) else "timeout"
        if inputs is not None and inputs.is_poison:
            kind = "poison"
        path, is_new = self._directory.reserve(self._start.name, kind, failure, self.submit)
        if path is None or not is_new:
            return path
        inputs = self._find(get_inputs) if inputs is None else inputs
        # Without what the actor may change, and without the traceback of an error that is raised.
        facts = {**vars(error), "type": type(error).__name__, "text": str(error)}
        ending = error.__cause__ if isinstance(error.__cause__, ActorTimeoutError) else error
        facts |= {name: getattr(ending, name, None) for name in ("timeout", "stacks")}
        _pending[path] = threading.Event()
        self.submit(lambda: self._write(path, kind, facts, inputs, failure))
        return path

    def _find(self, get_inputs: Callable[[], Inputs]) -> Inputs:
        """Return the inputs. What fails here must cost the bundle, not the actor."""
        try:
            return get_inputs()
        except Exception as error:
            text = safe_repr(error)
            self.submit(lambda: _log.warning("the inputs of a crash bundle are missing: %s", text))
            return Inputs(is_complete=False)

    def _write(self, path: str, kind: str, facts: dict[str, Any], inputs: Inputs, failure: Failure | None) -> None:
        try:
            files.write(path, self._describe(kind, facts, inputs, failure), self._save(facts, inputs))
        except Exception as error:  # the inputs may run code of users
            _log.warning("the crash bundle %s could not be written: %s", path, safe_repr(error))
        finally:
            _pending.pop(path).set()

    def _describe(self, kind: str, facts: dict[str, Any], inputs: Inputs, failure: Failure | None) -> dict[str, Any]:
        """Return the report."""
        requests = _requests_of(inputs)
        return {
            "kind": kind,
            "time": dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds"),
            "error": failure.text if failure is not None else facts["text"].partition("\n")[0],
            **ending_of(facts, failure),
            "actor": facts["actor"],
            "env": facts["index"],
            "pid": facts["pid"],
            "incarnation": facts["incarnation"],
            "call_id": facts["call_id"],
            "method": facts["method"] or ("start" if kind == "start" else None),
            "elapsed": facts["elapsed"],
            "step": sum(name == "step" for name, _ in requests),
            "seeds": [seed for name, seed in requests if name == "reset" and seed is not None],
            "arguments": _show_arguments(inputs),
            "begins_in_the_middle": not inputs.is_complete,
            "deadlines": dataclasses.asdict(self._deadlines),
            "traceback": "" if failure is None else failure.traceback,
            "stacks": facts.get("stacks") or "",
            "stderr": facts.get("stderr_tail") or "",
            "versions": _versions(),
        }

    def _save(self, facts: dict[str, Any], inputs: Inputs) -> SavedInputs:
        start = self._start
        index = facts["index"]
        position = index - start.first
        return SavedInputs(
            name=start.name,
            env=index,
            position=position,
            factory=start.factories[position],
            registrations=start.registrations,
            seed_episodes=start.seed_episodes,
            snapshot=start.snapshot,
            journal=None if inputs.journal is None else bytes(dumps(tuple(inputs.journal))),
            has_checks=start.journal,
            request=inputs.request,
            observation=_pickle_observation(inputs),
            env_vars=self._env_vars,
            sys_path=[*sys.path],
        )


def ending_of(facts: Mapping[str, Any], failure: Failure | None) -> dict[str, Any]:
    """Return how a request has ended, so that two endings can be compared.

    Args:
        facts: The attributes of its `ActorError`; empty if it has none.
        failure: The exception that env code has raised.
    """
    ending = dict.fromkeys(ENDINGS)
    if failure is not None:
        ending["exception"] = _ADDRESS.sub("0x...", failure.text)
    elif facts.get("timeout") is not None:
        ending["deadline"] = facts["timeout"]
    else:
        ending |= {name: facts.get(name) for name in ("signal", "exitcode")}
    return ending


def _line_of(traceback: str) -> str:
    """Return the file and the line that raised an exception."""
    found = _FRAME.findall(traceback)
    return ":".join(found[-1]) if found else ""


def _requests_of(inputs: Inputs) -> list[tuple[str, int | None]]:
    """Return the steps and resets of the inputs, each reset with its seed, without unpickling actions."""
    found: list[tuple[str, int | None]] = []
    journal = inputs.journal or Replay(0, [], None, False, [], 0)
    for entry in (*journal.entries, *([] if inputs.request is None else [inputs.request])):
        if isinstance(entry, RecordedSteps):
            found += [("reset" if is_reset else "step", None) for is_reset in entry.resets]
        elif entry[0] in (Kind.RESET, Kind.STEP):
            fields = loads(entry[1])
            found.append(("reset", fields[1]) if entry[0] == Kind.RESET else ("step", None))
    return found


def _pickle_observation(inputs: Inputs) -> bytes | None:
    """Return the last observation, pickled; None if there is none, or it is not readable here. Runs code of users."""
    try:
        return None if inputs.read_observation is None else bytes(dumps(inputs.read_observation()))
    except Exception:
        return None


def _show_arguments(inputs: Inputs) -> str:
    """Return the action, or the seed and the options, of the request that failed, as text. Runs code of users."""
    if inputs.request is None or inputs.request[0] not in (Kind.STEP, Kind.RESET):
        return ""
    try:
        return ", ".join(map(safe_repr, input_of(*inputs.request)[1:]))
    except Exception as error:
        return f"not readable here: {safe_repr(error)}"


def _versions() -> dict[str, str]:
    modules = {name: sys.modules.get(name) for name in _PACKAGES}
    versions = {name: str(getattr(module, "__version__", "")) for name, module in modules.items() if module is not None}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}
