"""Start methods, the variables that limit threads, and the start of workers through loky."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from envactors.process.bootstrap import Descriptors, run
from envactors.process.refusal import LaunchRefusedError
from envactors.system.choice import PORTABLE
from envactors.system.sockets import sigpipe_blocked
from envactors.worker.setup import WorkerSetup

StartMethod = Literal["forkserver", "loky"]
# On other systems, libraries do not survive a fork, and nothing would end the workers of a helper that was killed.
DEFAULT: Final[StartMethod] = "loky" if PORTABLE else "forkserver"

# The variables that limit the threads of numerical libraries, which read them once, when they are imported.
THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def thread_caps(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit numerical libraries to one thread each.

    Variables that the caller's environment sets are left out. If ``OMP_NUM_THREADS`` is set there or in ``env_vars``,
    the result is empty.
    """
    if "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in env_vars:
        return {}
    return {name: "1" for name in THREAD_CAPS if name not in os.environ}


def start_by_loky(name: str, setup: WorkerSetup, descriptors: Descriptors) -> int:
    """Start a worker in a fresh interpreter with loky's process context, and return its process id.

    Raises:
        LaunchRefusedError: The working directory was removed.
    """
    from loky.backend.context import get_context

    if not setup.directory:
        raise LaunchRefusedError(
            "the working directory was removed, and start_method='loky' needs one: change to another with os.chdir"
        )
    # Loky passes on no options, and runs a module, which puts the working directory on the path.
    options = {name: "" for name in setup.environment if name.startswith("PYTHON") and sys.flags.ignore_environment}
    options |= {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1" if sys.flags.no_user_site else ""}
    # The arguments of the worker, and requests to the trackers, go through pipes.
    with sigpipe_blocked(), _sigint_blocked(), _not_daemonic():
        args, env = (descriptors, os.getpid(), setup), {**setup.environment, **options}
        process = get_context("loky").Process(target=run, name=name, args=args, env=env)
        process.start()
    getattr(multiprocessing.process, "_children", set()).discard(process)  # multiprocessing must not reap it
    return int(process.pid)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, and in the worker that it starts until the worker ignores it.

    Ctrl-C also reaches workers that are still starting.
    """
    from multiprocessing import resource_tracker

    from loky.backend import resource_tracker as loky_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        # The first worker needs these trackers. Their start unblocks SIGINT.
        resource_tracker.ensure_running()
        loky_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _not_daemonic() -> Iterator[None]:
    """Let multiprocessing start a process in a daemonic one: workers end with their parent anyway."""
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    before = config.pop("daemon", None)
    try:
        yield
    finally:
        if before is not None:
            config["daemon"] = before
