"""Handwritten sides of a bench: a plain loop, one process with a pipe per env, and loops that share nothing."""

from __future__ import annotations

import abc
import functools
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envactors.system.cpus import cores
from envactors.tuning.measuring import Flags, Side, Workload

# How long loops run between two looks at the clock of the round, in seconds.
_SLICE = 0.1


class SteppedEnv:
    """Env that resets on the step after the end of an episode; each method takes one argument.

    Args:
        factory: Makes the env.

    Attributes:
        ended: True if the next step only resets.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()
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


class EnvByEnv(Side):
    """Base of sides that call one `SteppedEnv` per env and batch the results."""

    def _reset(self, seed: int) -> None:
        self._all("reset", range(seed, seed + self._workload.num_envs))

    def _step(self, row: int) -> Flags:
        results = self._all("step", self._workload.actions[row])
        observations, rewards, terminated, truncated, _ = zip(*results, strict=True)
        # The batch is discarded, as with the other sides; making it is part of a step.
        if isinstance(observations[0], np.ndarray):
            np.stack(observations)
        np.array(rewards, np.float64)
        return np.array(terminated, np.bool_) | np.array(truncated, np.bool_)

    def close(self) -> None:
        self._all("close", [None] * self._workload.num_envs)

    @abc.abstractmethod
    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Call a method of every env in parallel and return the results."""


class PlainLoop(EnvByEnv):
    """Loop in the caller's process."""

    def start(self) -> None:
        self._envs = [SteppedEnv(self._workload.factory) for _ in range(self._workload.num_envs)]

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return [getattr(env, method)(argument) for env, argument in zip(self._envs, arguments, strict=True)]


class Piped:
    """Objects in processes, each with a bare pipe.

    Args:
        factories: Each makes an object in its process.
    """

    def __init__(self, factories: Sequence[Callable[[], Any]]) -> None:
        self._pipes = []
        self._processes = []
        context = multiprocessing.get_context("spawn")  # a fork would hold the earlier pipes open
        for factory in factories:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, factory), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Call a method of every object, each with its argument, and return the results."""
        for pipe, argument in zip(self._pipes, arguments, strict=True):
            pipe.send((method, argument))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join()


class BarePipe(EnvByEnv):
    """One process and one pipe per env."""

    def start(self) -> None:
        factory = functools.partial(SteppedEnv, self._workload.factory)
        self._piped = Piped([factory] * self._workload.num_envs)

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return self._piped.call(method, arguments)

    def close(self) -> None:
        super().close()
        self._piped.close()


class LoopsApart(Side):
    """One process per core, each with its share of the envs in a loop; nothing is exchanged."""

    def start(self) -> None:
        shares = np.array_split(np.arange(self._workload.num_envs), count_loops(self._workload.num_envs))
        self._piped = Piped([functools.partial(LoopShare, self._workload, share.tolist()) for share in shares])
        self._count = len(shares)

    def step(self) -> int:
        return sum(self._piped.call("run", [_SLICE] * self._count))

    def close(self) -> None:
        self._piped.close()

    def _reset(self, seed: int) -> None:
        self._piped.call("reset", [seed] * self._count)

    def _step(self, row: int) -> Flags:
        raise NotImplementedError


class LoopShare:
    """Some of the envs in a loop.

    Args:
        workload: Envs and actions.
        env_ids: Indices of the envs.
    """

    def __init__(self, workload: Workload, env_ids: Sequence[int]) -> None:
        self._actions = workload.actions
        self._envs = {env_id: SteppedEnv(workload.factory) for env_id in env_ids}
        self._turn = 0

    def reset(self, seed: int) -> None:
        """Reset the envs, and go back to the first actions."""
        self._turn = 0
        for env_id, env in self._envs.items():
            env.reset(seed + env_id)

    def run(self, seconds: float) -> int:
        """Step for a while, and return the number of env-steps."""
        made = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            actions = self._actions[self._turn % len(self._actions)]
            self._turn += 1
            for env_id, env in self._envs.items():
                made += not env.ended
                env.step(actions[env_id])
        return made


def count_loops(num_envs: int) -> int:
    """Return the number of processes of `LoopsApart`."""
    return min(num_envs, cores())


def _serve(pipe: multiprocessing.connection.Connection[Any, Any], factory: Callable[[], Any]) -> None:
    served = factory()
    while True:
        try:
            method, argument = pipe.recv()
        except EOFError:  # closed, or the parent was killed
            return
        pipe.send(getattr(served, method)(argument))
