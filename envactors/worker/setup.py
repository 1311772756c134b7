"""The properties that a worker process takes from its caller."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import NamedTuple


class WorkerSetup(NamedTuple):
    """The properties of a process that a worker takes from its caller, as of its start.

    Attributes:
        environment: The environment variables.
        descriptor_limit: The soft limit of open files; None for that of its parent.
        path: ``sys.path``; None for that of its interpreter.
        argv: ``sys.argv``.
        directory: The working directory; empty if it was removed.
    """

    environment: dict[str, str]
    descriptor_limit: int | None
    path: list[str] | None
    argv: list[str]
    directory: str

    def apply(self) -> None:
        """Give this process the properties."""
        before = dict(os.environ)
        for name in before.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items() - before.items():
            os.environ[name] = value
        if self.descriptor_limit is not None:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.descriptor_limit, hard))
        sys.path[:] = sys.path if self.path is None else self.path
        sys.argv[:] = self.argv
        with contextlib.suppress(OSError):  # it was removed
            os.chdir(self.directory)
