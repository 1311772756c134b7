"""Handwritten baselines: a plain loop, and one process with a pipe per env."""

from __future__ import annotations

import abc
import multiprocessing
import multiprocessing.connection
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from envactors.cli.bench.subject_base import Flags, Subject
from envactors.cli.source import EnvSource


class SteppedEnv:
    """Env that resets on the step after the end of an episode; each method takes one argument.

    Args:
        source: Factory of the env.

    Attributes:
        ended: True if the next step only resets.
    """

    def __init__(self, source: EnvSource) -> None:
        self._env = source()
        self.ended: bool = False

    def reset(self, seed: int) -> tuple[Any, Any]:
        self.ended = False
        obs, info = self._env.reset(seed=seed)
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        if self.ended:
            self.ended = False
            obs, info = self._env.reset()
            return obs, 0.0, False, False, info
        obs, reward, terminated, truncated, info = self._env.step(action)
        self.ended = terminated or truncated
        return obs, reward, terminated, truncated, info

    def close(self, _: None = None) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


class EnvByEnv(Subject):
    """Base of subjects that call one `SteppedEnv` per env and batch the results."""

    def _reset(self, seed: int) -> None:
        self._all("reset", range(seed, seed + self._job.num_envs))

    def _step(self, row: int) -> Flags:
        observations, rewards, terminated, truncated, _ = zip(*self._all("step", self._job.actions[row]), strict=True)
        # The batch is discarded, as with the other subjects; making it is part of a step.
        if isinstance(observations[0], np.ndarray):
            np.stack(observations)
        np.array(rewards, np.float64)
        return np.array(terminated, np.bool_) | np.array(truncated, np.bool_)

    def close(self) -> None:
        self._all("close", [None] * self._job.num_envs)

    @abc.abstractmethod
    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Call a method of every env in parallel and return the results."""


class PlainLoop(EnvByEnv):
    """Loop in the caller's process."""

    name = "loop"
    label: ClassVar[str] = "loop (Python)"

    def start(self) -> None:
        self._envs = [SteppedEnv(self._job.source) for _ in range(self._job.num_envs)]

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return [getattr(env, method)(argument) for env, argument in zip(self._envs, arguments, strict=True)]


class BarePipe(EnvByEnv):
    """One process and one pipe per env."""

    name = "pipe"

    def start(self) -> None:
        self._pipes: list[multiprocessing.connection.Connection[Any, Any]] = []
        self._processes = []
        for _ in range(self._job.num_envs):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=_serve, args=(theirs, self._job.source), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        for pipe, argument in zip(self._pipes, arguments, strict=True):
            pipe.send((method, argument))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        super().close()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def _serve(pipe: multiprocessing.connection.Connection[Any, Any], source: EnvSource) -> None:
    env = SteppedEnv(source)
    while (request := pipe.recv()) is not None:
        method, argument = request
        pipe.send(getattr(env, method)(argument))
