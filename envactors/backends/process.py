"""The process backend: one process per worker."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from envactors.backends.base import Backend, ExitStatus, LaunchRefusedError, RowMemory, Traits, Use
from envactors.backends.local import LocalWorker
from envactors.backends.output import Stream
from envactors.mailbox.channel import Channel
from envactors.mailbox.control_page import ControlPage, page_size
from envactors.mailbox.info_codec import Infos
from envactors.mailbox.slab import Layout, Slab
from envactors.options import check_kind, is_int
from envactors.process import starting
from envactors.process.bootstrap import Descriptors
from envactors.process.descriptor_limit import make_room
from envactors.process.helper import HELPERS, HelperLostError, Log, Settings
from envactors.process.interpreters import code_tag
from envactors.process.stacks import ProcessStacks, StacksFile
from envactors.system.choice import PORTABLE, SYSTEM, VARIABLE
from envactors.system.cpus import cores
from envactors.system.interpreters import working_directory
from envactors.system.memory import SharedFile
from envactors.system.polling import Doorbell
from envactors.system.processes import SIGKILL, Process
from envactors.system.sockets import open_pair
from envactors.worker.setup import WorkerSetup

if TYPE_CHECKING:
    from envactors.runtime import Runtime

# If the caller has imported this module, its workers are likely to need it, too.
_LIKELY = "gymnasium"
# More than one worker per core may start at a time: some read their imports from disk while others compute.
_STARTING_PER_CORE = 4
_STARTING_AT_LEAST = 8


class MappedMemory(SharedFile, RowMemory):
    """A file in memory that workers map; see `envactors.backends.base.RowMemory`."""

    def create(self, layout: Layout) -> tuple[Slab, Infos]:
        slab = Slab(layout, self.extend(layout.size)[1])
        return slab, Infos(slab)


class ProcessBackend(Backend):
    """A backend with one process per actor.

    Args:
        start_method: How processes start; neither method forks the caller or needs a ``__main__`` guard.
            ``"forkserver"``, the default on Linux and only there, forks a helper process that has imported NumPy and,
            if the caller has, Gymnasium, so that a worker starts in milliseconds. ``"loky"``, the default elsewhere,
            starts a fresh interpreter with loky's process context. Actors with equal settings share a helper process,
            which ends with the last of these actors. If it crashes, its workers end with it, and their actors restart.
        spin: Whether the caller and the workers spin for some tens of microseconds before they sleep, if there are
            spare cores.
        preload: Modules that the helper also imports, if they are installed, so that workers do not import them. They
            must leave no threads running. Since modules may read environment variables, each mapping of ``env_vars``
            then has its own helper. Only with ``"forkserver"``.
        max_starting: How many processes may be starting at a time, from the launch until the env is made. Further ones
            are queued, and their start deadlines do not run yet. None means four per core, and at least eight. Raise it
            for envs that mostly wait while they start.
        python: Another Python interpreter for the workers, such as that of a virtual environment: CPython 3.10 or newer
            with cloudpickle and NumPy of the caller's major version, which is all that envactors needs there. Its
            workers have the path of that interpreter, and only this package from the caller's path; ``env_vars`` with
            ``PYTHONPATH`` adds directories. Since interpreters read variables, each mapping of ``env_vars`` has its own
            helper process.
            Factories are named as ``"module:callable"``, or pickled; what is pickled by value, as lambdas are, needs
            an interpreter of the caller's version. Only with ``"forkserver"``. An interpreter that cannot run workers
            fails their start with an `ActorStartError`.

    Raises:
        ValueError: The start method does not exist on this system, ``max_starting`` is not a positive int, or
            ``preload`` or ``python`` is used with ``"loky"``.
        TypeError: ``spin`` is not a bool, ``preload`` not a list of names, or ``python`` is not a path.
    """

    traits: Traits = Traits(can_kill=True)

    def __init__(
        self,
        start_method: starting.StartMethod = starting.DEFAULT,
        spin: bool = True,
        preload: Sequence[str] = (),
        max_starting: int | None = None,
        python: str | os.PathLike[str] | None = None,
    ) -> None:
        if start_method not in get_args(starting.StartMethod):
            raise ValueError(f"start_method is {start_method!r}: expected 'forkserver' (on Linux) or 'loky'")
        if start_method == "forkserver" and PORTABLE:
            raise ValueError("start_method is 'forkserver', which needs Linux: expected 'loky'")
        if not isinstance(spin, bool):
            raise TypeError(f"spin is {spin!r}: expected True or False")
        if max_starting is None:
            max_starting = max(_STARTING_AT_LEAST, _STARTING_PER_CORE * cores())
        if not is_int(max_starting):
            raise ValueError(f"max_starting is {max_starting!r}: expected an int >= 1, or None")
        self._preload = tuple(preload or ()) if isinstance(preload or (), Iterable) else (preload,)
        if isinstance(preload, str) or not all(isinstance(name, str) for name in self._preload):
            raise TypeError(f"preload is {preload!r}: expected a list of names of modules")
        self.start_method = start_method
        self.spin = spin
        for name, value in (("preload", preload or None), ("python", python)):
            if value is not None and start_method != "forkserver":
                text = f"{name} is {value!r} with start_method={start_method!r}: expected 'forkserver' (on Linux)"
                raise ValueError(text)
        check_kind("python", python, str, os.PathLike, type(None))
        self.python: str | None = None if python is None else os.fspath(python)
        advice = (
            f"it has to be where workers run. Install it there ({self.python} -m pip install ...), or name its "
            "directory in env_vars={'PYTHONPATH': ...}"
        )
        self.traits = Traits(
            can_kill=True, may_spin=spin, max_starting=max_starting, import_advice=advice if self.python else ""
        )

    def __repr__(self) -> str:
        python = "" if self.python is None else f", python={self.python!r}"
        return f"ProcessBackend(start_method={self.start_method!r}, spin={self.spin}{python})"

    def loads_code(self, env_vars: Mapping[str, str]) -> bool:
        """Return whether workers run the caller's code; see `envactors.backends.base.Backend.loads_code`."""
        with contextlib.suppress(LaunchRefusedError):  # the start raises it, too
            return code_tag(self.python, frozenset(env_vars.items())) == sys.implementation.cache_tag
        return True

    def make_memory(self) -> MappedMemory:
        """Return memory to share; see `envactors.backends.base.Backend.make_memory`."""
        return MappedMemory("envactors-slab")

    def use(self, env_vars: Mapping[str, str], runtime: Runtime | None = None) -> ProcessUse:
        """Return the use by another actor; see `envactors.backends.base.Backend.use`."""
        return ProcessUse(env_vars, self._settings(env_vars), runtime)

    def _settings(self, env_vars: Mapping[str, str]) -> Settings:
        """Return the settings of the helper process for actors with these variables."""
        if self.start_method == "loky":
            return Settings(forks=False)
        likely = [_LIKELY] if _LIKELY in sys.modules else []
        environment = {**os.environ, **starting.thread_caps(env_vars), **env_vars}
        variables = {name: environment[name] for name in starting.THREAD_CAPS if name in environment}
        if self._preload or self.python:
            variables.update(env_vars)
        return Settings(True, (*likely, *self._preload), frozenset(variables.items()), self.python)


class ProcessUse(Use):
    """Starts the processes of an actor; see `envactors.backends.base.Use`.

    Args:
        env_vars: Environment variables of the processes.
        settings: The settings of its helper process.
        runtime: The threads that serve the actor; None for a node's agent, which has others.
    """

    def __init__(self, env_vars: Mapping[str, str], settings: Settings, runtime: Runtime | None) -> None:
        self._env_vars = env_vars
        self._settings = settings
        self._log: Log = (lambda log: log()) if runtime is None else runtime.log

    def open(self) -> None:
        HELPERS.retain(self._settings, self)

    def start(self, name: str, memory: MappedMemory | None, envs: int) -> ProcessWorker:
        """Start a worker process; see `envactors.backends.base.Use.start`."""
        if not os.path.isdir("/dev/fd"):  # noqa: PTH112
            raise LaunchRefusedError(
                "/dev/fd does not exist, so /proc is not mounted, which envactors needs to watch workers: mount it "
                "(mount -t proc proc /proc), or use backend='thread'"
            )
        env_vars, settings = self._env_vars, self._settings
        code_tag(settings.python, frozenset(env_vars.items()))
        environment = {**os.environ, **starting.thread_caps(env_vars), **env_vars, VARIABLE: SYSTEM}
        path = sys.path if settings.python is None else None
        setup = WorkerSetup(environment, make_room(), path, sys.argv, working_directory())
        start = functools.partial(HELPERS.start, name, settings, setup, self._log)
        return ProcessWorker(None if memory is None else memory.fileno(), envs, start)

    def close(self) -> None:
        HELPERS.release(self)


class ProcessWorker(LocalWorker):
    """One worker process; see `envactors.backends.base.Worker`.

    Args:
        slab: The descriptor of the memory of its vector; None without one.
        envs: How many envs it will have.
        start: Starts the process with the descriptors that it inherits.

    Raises:
        OSError: The system could not start the worker.
    """

    def __init__(self, slab: int | None, envs: int, start: Callable[[Descriptors], Process]) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            sock, channel = open_pair(ours, theirs)
            out_r, out_w = _pipe(ours, theirs)
            err_r, err_w = _pipe(ours, theirs)
            pipes: list[tuple[Stream, int]] = [("stdout", out_r), ("stderr", err_r)]
            to_worker = ours.enter_context(contextlib.closing(Doorbell()))
            to_parent = ours.enter_context(contextlib.closing(Doorbell()))
            file = theirs.enter_context(contextlib.closing(SharedFile("envactors-page")))
            page = ControlPage(file.extend(page_size(envs))[1], to_worker, to_parent)
            self._stacks = StacksFile()
            rung = to_worker.fileno(), to_parent.ringer()
            sock.setblocking(False)
            self._process = start(Descriptors(channel, out_w, err_w, file.fileno(), *rung, self._stacks.fileno(), slab))
            super().__init__(page, Channel(sock), self._process.fileno(), pipes)
            self.pid: int = self._process.pid
            self._descriptors = ours.pop_all()

    def kill(self) -> None:
        self._process.send_signal(SIGKILL)

    def ask_stacks(self, *, may_interrupt: bool = True) -> ProcessStacks:
        return ProcessStacks(self._process, self._stacks, may_interrupt=may_interrupt)

    def close(self) -> ExitStatus:
        del self._stacks  # closes it, unless somebody still reads it
        self._descriptors.close()
        try:
            code = self._process.reap()
        except HelperLostError:
            return ExitStatus(signal=SIGKILL, is_helper_lost=True)
        return ExitStatus(code) if code is None or code >= 0 else ExitStatus(signal=-code)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    ours.callback(os.close, reader)
    theirs.callback(os.close, writer)
    return reader, writer
