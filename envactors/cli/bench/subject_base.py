"""Base classes of the subjects of a bench.

A subject is one way to step many envs. All subjects start from the same seeds, execute the same actions, and produce
a batch of observations, rewards and flags. Other libraries are imported only when their subject starts.
"""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from envactors.cli.bench.jobs import Job

Flags = npt.NDArray[np.bool_]


class Subject(abc.ABC):
    """One way to step many envs.

    Args:
        job: Env, number of envs and actions.
        scratch: Directory for files of the subject; deleted afterwards.
    """

    name: ClassVar[str]
    label: ClassVar[str | None] = None
    """Title in the table; None: name and version."""
    package: ClassVar[str | None] = None
    """Name of the package for pip; None if there is none."""
    module: ClassVar[str | None] = None
    """Module that the package provides; None if nothing needs to be installed."""
    only_gymnasium: ClassVar[bool] = False
    """True if the envs must be Gymnasium envs."""
    is_envactors: ClassVar[bool] = False
    """True for the subjects of this project."""

    def __init__(self, job: Job, scratch: str) -> None:
        self._job = job
        self._scratch = scratch
        self._turn = 0
        self._none = np.zeros(job.num_envs, np.bool_)
        self._resetting = self._none

    @classmethod
    def is_installed(cls) -> bool:
        return cls.module is None or importlib.util.find_spec(cls.module) is not None

    @classmethod
    def version(cls) -> str | None:
        """Return the version of the library, or None if it is unknown."""
        try:
            return None if cls.package is None else importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @classmethod
    def title(cls, job: Job) -> str:
        """Return the title in the table."""
        del job
        version = cls.version()
        return cls.label or (cls.name if version is None else f"{cls.name} {version}")

    @abc.abstractmethod
    def start(self) -> None:
        """Create the envs."""

    def reset(self, seed: int) -> None:
        """Reset env ``i`` with seed ``seed + i`` and go back to the first actions."""
        self._turn = 0
        self._resetting = self._none
        self._reset(seed)

    def step(self) -> int:
        """Step all envs.

        Returns:
            The number of env-steps; a step that only resets an env after an episode does not count.
        """
        row = self._turn % len(self._job.actions)
        self._turn += 1
        made = self._job.num_envs - int(np.count_nonzero(self._resetting))
        self._resetting = self._step(row)
        return made

    def settle(self) -> int:
        """Wait for pending steps and return their number."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Close the envs and end their processes."""

    def _reset(self, seed: int) -> None:
        raise NotImplementedError

    def _step(self, row: int) -> Flags:
        """Execute a row of actions and return which envs' next step only resets them."""
        raise NotImplementedError


class VectorSubject(Subject):
    """Base of subjects with Gymnasium's vector interface."""

    _envs: Any

    def _reset(self, seed: int) -> None:
        self._envs.reset(seed=seed)

    def _step(self, row: int) -> Flags:
        _, _, terminated, truncated, _ = self._envs.step(self._job.batches[row])
        ended: Flags = terminated | truncated
        return ended

    def close(self) -> None:
        self._envs.close()
