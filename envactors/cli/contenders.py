"""The sides of a bench, each behind the same few methods.

Everybody starts an episode with the same seeds and executes the same actions, and everybody ends up with a batch of
observations, rewards and flags. Other libraries are imported when their side starts, and never otherwise.
"""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from envactors.cli.jobs import Job

Flags = npt.NDArray[np.bool_]


class Contender(abc.ABC):
    """One side.

    Args:
        job: What to do.
        scratch: A directory for whatever the side writes; it is deleted afterwards.
    """

    name: ClassVar[str]
    label: ClassVar[str | None] = None
    """What it is called in the table, where that is not its name and version."""
    package: ClassVar[str | None] = None
    """What pip installs for it."""
    module: ClassVar[str | None] = None
    """What is imported of that."""
    only_gymnasium: ClassVar[bool] = False
    """Whether the envs have to be Gymnasium's."""
    ours: ClassVar[bool] = False

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
        """The version of the library, None where there is none to be had."""
        try:
            return None if cls.package is None else importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @classmethod
    def title(cls, job: Job) -> str:
        """What it is called in the table."""
        del job
        version = cls.version()
        return cls.label or (cls.name if version is None else f"{cls.name} {version}")

    @abc.abstractmethod
    def start(self) -> None:
        """Makes the envs."""

    def reset(self, seed: int) -> None:
        """Begins an episode everywhere, in env i with the seed ``seed + i``, and goes back to the first actions."""
        self._turn = 0
        self._resetting = self._none
        self._reset(seed)

    def step(self) -> int:
        """Steps all envs.

        Returns:
            How many steps that were: where a step is used up by the reset after an episode, it is not counted.
        """
        row = self._turn % len(self._job.actions)
        self._turn += 1
        made = self._job.num_envs - int(np.count_nonzero(self._resetting))
        self._resetting = self._step(row)
        return made

    def settle(self) -> int:
        """Waits for what is under way; returns how many steps that were."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the envs and ends their processes."""

    def _reset(self, seed: int) -> None:
        raise NotImplementedError

    def _step(self, row: int) -> Flags:
        """Executes a row of actions; tells which envs' next step will be nothing but a reset."""
        raise NotImplementedError


class VectorContender(Contender):
    """What is stepped as Gymnasium's vector envs are, ours too."""

    _envs: Any

    def _reset(self, seed: int) -> None:
        self._envs.reset(seed=seed)

    def _step(self, row: int) -> Flags:
        _, _, terminated, truncated, _ = self._envs.step(self._job.batches[row])
        ended: Flags = terminated | truncated
        return ended

    def close(self) -> None:
        self._envs.close()
