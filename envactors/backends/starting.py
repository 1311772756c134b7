"""Ways to start a worker process without a fork server, and the environment it starts with."""

from __future__ import annotations

import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, TypeAlias

from envactors.system.choice import PORTABLE
from envactors.system.processes import SIGKILL, Process, await_exit, open_sentinel
from envactors.wire.control_page import PagePlace
from envactors.worker.bootstrap import Descriptors, run, run_forked

StartMethod = Literal["forkserver", "loky", "spawn", "fork"]
# Elsewhere the system's libraries do not bear being forked, and nothing ends what a fork server has forked.
DEFAULT: Final[StartMethod] = "loky" if PORTABLE else "forkserver"


# The variables that set the number of threads of numerical libraries, which read them once, when they are imported.
THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# The processes that multiprocessing reaps by itself.
_children: set[object] = getattr(multiprocessing.process, "_children", set())


def as_elsewhere(start_method: Any) -> Any:
    """Return the start method for what users of another library call so: its fork server is for a clean process."""
    return DEFAULT if start_method == "forkserver" else start_method


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit numerical libraries to one thread each.

    Variables that the caller's environment sets are left out. If it or ``env_vars`` sets ``OMP_NUM_THREADS``, all are.
    """
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in THREAD_CAPS if name not in os.environ}


# A program is started in the context ``layout``, which says whether the layout of its memory is fixed: then the worker
# restores a random one for what it starts.
Layout: TypeAlias = AbstractContextManager[bool]


def start_by_loky(
    name: str, descriptors: Descriptors, page: PagePlace, environment: dict[str, str], layout: Layout
) -> Process:
    """Start a fresh interpreter by loky's process context."""
    from multiprocessing import resource_tracker

    from loky.backend.context import get_context

    # `ensure_running` starts the tracker for the first worker, and then unblocks SIGINT in this thread; Ctrl-C
    # would reach workers that are still starting.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with layout as fixed:
        args = descriptors, page, os.getpid(), fixed
        process = get_context("loky").Process(target=run, name=name, args=args, env=environment)
        process.start()
    # This backend reaps its processes itself: multiprocessing must not do it before.
    _children.discard(process)
    return _watched(process.pid, lambda: process.exitcode)


def start_interpreter(
    descriptors: Descriptors, page: PagePlace, environment: dict[str, str], layout: Layout
) -> Process:
    """Start a fresh interpreter."""
    with layout as fixed:
        boot = {"descriptors": descriptors, "page": page, "parent_pid": os.getpid(), "fixed_layout": fixed}
        process = start_python("envactors.worker.bootstrap", "run", boot, descriptors.present(), environment)
    return _watched(process.pid, process.poll)


def fork_caller(descriptors: Descriptors, page: PagePlace, environment: dict[str, str]) -> Process:
    """Fork the caller."""
    parent_pid = os.getpid()
    with warnings.catch_warnings():
        # Python warns of forking a process with threads; the documentation of this start method says so already.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        run_forked(descriptors, page, parent_pid, environment)
    return _watched(pid, lambda: await_exit(pid))


def start_python(
    module: str, function: str, boot: dict[str, Any], fds: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with this environment; it runs a function of a module."""
    boot = {**boot, "path": [entry or os.getcwd() for entry in sys.path], "argv": sys.argv}  # noqa: PTH109
    code = (
        "import json, sys; boot = json.loads(sys.argv.pop()); sys.path[:] = boot.pop('path'); "
        f"sys.argv[:] = boot.pop('argv'); from {module} import {function}; {function}(**boot)"
    )
    # The path is the caller's, without a directory of the interpreter's own: if that is gone, Python 3.13.0 imports no
    # `socket`.
    options = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *options, "-c", code, json.dumps(boot)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)  # noqa: S603 # its own code


def _watched(pid: int, exit_code: Callable[[], int | None]) -> Process:
    try:
        return Process(pid, open_sentinel(pid), exit_code)
    except BaseException:
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
        raise
