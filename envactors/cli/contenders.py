"""The sides of a bench: ours, the loop, and other libraries, each behind the same few methods.

Everybody starts an episode with the same seeds and executes the same actions, and everybody ends up with a batch of
observations, rewards and flags. Other libraries are imported when their side starts, and never otherwise.
"""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.cli.jobs import EnvSource, Job

Flags = npt.NDArray[np.bool_]


class Contender(abc.ABC):
    """One side.

    Args:
        job: What to do.
        scratch: A directory for whatever the side writes; it is deleted afterwards.
    """

    name: ClassVar[str]
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
        return cls.name if version is None else f"{cls.name} {version}"

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


class _Vector(Contender):
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


# Ours --------------------------------------------------------------------------------------------------------


class Ours(_Vector):
    """The facade with its default options."""

    name = package = "envactors"
    ours = True

    @classmethod
    def version(cls) -> str | None:
        return ea.__version__

    def start(self) -> None:
        self._envs = ea.VectorEnv([self._job.source] * self._job.num_envs)


class OursPacked(Ours):
    """The facade with several envs a process."""

    name = "envactors-packed"

    @classmethod
    def title(cls, job: Job) -> str:
        return f"envactors, {job.envs_per_actor} a process"

    def start(self) -> None:
        envs_per_actor = self._job.envs_per_actor
        self._envs = ea.VectorEnv([self._job.source] * self._job.num_envs, envs_per_actor=envs_per_actor)


class OursAsynchronous(Ours):
    """The facade, never waiting for more than half of the envs."""

    name = "envactors-recv"

    @classmethod
    def title(cls, job: Job) -> str:
        del job
        return "envactors, recv"

    def __init__(self, job: Job, scratch: str) -> None:
        super().__init__(job, scratch)
        self._all = np.arange(job.num_envs)
        self._rows = np.zeros(job.num_envs, np.int64)
        self._owed = 0
        batchable = isinstance(job.batches[0], np.ndarray)
        self._table: npt.NDArray[Any] | None = np.stack(job.batches) if batchable else None

    def _reset(self, seed: int) -> None:
        self.settle()
        self._resetting = self._none.copy()
        self._rows[:] = 0
        self._envs.reset(seed=seed)

    def step(self) -> int:
        if self._owed == 0:
            self._send(self._all)
        batch = self._envs.recv(min_envs=max(1, self._job.num_envs // 2))
        made = self._take(batch)
        self._send(batch.env_ids)
        return made

    def settle(self) -> int:
        return self._take(self._envs.recv()) if self._owed else 0

    def _send(self, env_ids: npt.NDArray[np.int64]) -> None:
        rows = self._rows[env_ids] % len(self._job.actions)
        self._rows[env_ids] += 1
        actions: Any
        if self._table is not None:
            actions = self._table[rows, env_ids]
        else:
            actions = [self._job.actions[row][env_id] for row, env_id in zip(rows, env_ids, strict=True)]
        self._envs.send(actions, env_ids=env_ids)
        self._owed += len(env_ids)

    def _take(self, batch: ea.Batch) -> int:
        made = len(batch.env_ids) - int(np.count_nonzero(self._resetting[batch.env_ids]))
        self._resetting[batch.env_ids] = batch.terminated | batch.truncated
        self._owed -= len(batch.env_ids)
        return made


# Vector envs of other libraries ------------------------------------------------------------------------------


class GymnasiumLoop(_Vector):
    """Gymnasium's loop in the caller's process."""

    name = "loop"
    package = module = "gymnasium"
    only_gymnasium = True

    @classmethod
    def title(cls, job: Job) -> str:
        del job
        return "loop (SyncVectorEnv)"

    def start(self) -> None:
        import gymnasium

        self._envs = gymnasium.vector.SyncVectorEnv([self._job.source] * self._job.num_envs)


class GymnasiumProcesses(_Vector):
    """Gymnasium's processes."""

    name = package = module = "gymnasium"
    only_gymnasium = True

    def start(self) -> None:
        import gymnasium

        self._envs = gymnasium.vector.AsyncVectorEnv([self._job.source] * self._job.num_envs, shared_memory=True)


class StableBaselines(Contender):
    """Stable-Baselines3's processes; they reset within the step that ends an episode."""

    name = package = "stable-baselines3"
    module = "stable_baselines3"
    only_gymnasium = True

    def start(self) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self._envs = SubprocVecEnv([self._job.source] * self._job.num_envs)

    def _reset(self, seed: int) -> None:
        self._envs.seed(seed)
        self._envs.reset()

    def _step(self, row: int) -> Flags:
        batch = self._job.batches[row]
        self._envs.step(batch if isinstance(batch, np.ndarray) else self._job.actions[row])
        return self._none

    def close(self) -> None:
        self._envs.close()


class Tianshou(Contender):
    """Tianshou's processes with shared memory; the caller resets what has ended, as its collectors do."""

    name = package = module = "tianshou"
    only_gymnasium = True

    def start(self) -> None:
        from tianshou.env import ShmemVectorEnv

        self._envs = ShmemVectorEnv([self._job.source] * self._job.num_envs)

    def _reset(self, seed: int) -> None:
        # It also resets; another reset would begin the episode after this one.
        self._envs.seed(seed)

    def _step(self, row: int) -> Flags:
        batch = self._job.batches[row]
        actions = batch if isinstance(batch, np.ndarray) else self._job.actions[row]
        _, _, terminated, truncated, _ = self._envs.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            self._envs.reset(ended)
        return self._none

    def close(self) -> None:
        self._envs.close()


# What one would write oneself --------------------------------------------------------------------------------


class SteppedEnv:
    """An env that resets with the step after the end of an episode; methods have one argument.

    Args:
        source: Makes the env.
    """

    def __init__(self, source: EnvSource) -> None:
        self._env = source()
        self._ended = False

    def reset(self, seed: int) -> tuple[Any, Any]:
        self._ended = False
        obs, info = self._env.reset(seed=seed)
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        if self._ended:
            self._ended = False
            obs, info = self._env.reset()
            return obs, 0.0, False, False, info
        obs, reward, terminated, truncated, info = self._env.step(action)
        self._ended = terminated or truncated
        return obs, reward, terminated, truncated, info

    def close(self, _: None = None) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


class _ByHand(Contender):
    """One `SteppedEnv` somewhere for each env, and a batch made of their answers."""

    def _reset(self, seed: int) -> None:
        self._all("reset", range(seed, seed + self._job.num_envs))

    def _step(self, row: int) -> Flags:
        observations, rewards, terminated, truncated, _ = zip(*self._all("step", self._job.actions[row]), strict=True)
        # The batch is thrown away, as the others' are; making it is a part of a step.
        if isinstance(observations[0], np.ndarray):
            np.stack(observations)
        np.array(rewards, np.float64)
        return np.array(terminated, np.bool_) | np.array(truncated, np.bool_)

    def close(self) -> None:
        self._all("close", [None] * self._job.num_envs)

    @abc.abstractmethod
    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Calls a method of every env, side by side; returns what they answer."""


class PlainLoop(_ByHand):
    """A loop in the caller's process."""

    name = "loop"

    @classmethod
    def title(cls, job: Job) -> str:
        del job
        return "loop (Python)"

    def start(self) -> None:
        self._envs = [SteppedEnv(self._job.source) for _ in range(self._job.num_envs)]

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return [getattr(env, method)(argument) for env, argument in zip(self._envs, arguments, strict=True)]


class BarePipe(_ByHand):
    """A process and a pipe for each env, as anybody would write it."""

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


class Loky(_ByHand):
    """An executor with one worker for each env, and a task a step."""

    name = package = module = "loky"

    def start(self) -> None:
        import loky

        self._executors = [
            loky.ProcessPoolExecutor(max_workers=1, initializer=_make_lokys_env, initargs=(self._job.source,))
            for _ in range(self._job.num_envs)
        ]

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        pairs = zip(self._executors, arguments, strict=True)
        futures = [executor.submit(_call_lokys_env, method, argument) for executor, argument in pairs]
        return [future.result() for future in futures]

    def close(self) -> None:
        super().close()
        for executor in self._executors:
            executor.shutdown()


_lokys_env: SteppedEnv


def _make_lokys_env(source: EnvSource) -> None:
    global _lokys_env
    _lokys_env = SteppedEnv(source)


def _call_lokys_env(method: str, argument: Any) -> Any:
    return getattr(_lokys_env, method)(argument)


class Ray(_ByHand):
    """One of Ray's actors for each env, on a Ray of its own."""

    name = package = module = "ray"

    def start(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        self._ray = ray
        # Never the cluster that the user's environment may name.
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=self._scratch,
        )
        actor = ray.remote(num_cpus=0)(SteppedEnv)
        self._actors = [actor.remote(self._job.source) for _ in range(self._job.num_envs)]

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        pairs = zip(self._actors, arguments, strict=True)
        results: list[Any] = self._ray.get([getattr(actor, method).remote(argument) for actor, argument in pairs])
        return results

    def close(self) -> None:
        super().close()
        self._ray.shutdown()


class Dask(_ByHand):
    """One of Dask's actors for each env, each on a worker process of its own, spoken to directly."""

    name = "dask"
    package = module = "distributed"

    def start(self) -> None:
        import distributed

        self._cluster = distributed.LocalCluster(
            n_workers=self._job.num_envs,
            threads_per_worker=1,
            processes=True,
            memory_limit=0,
            dashboard_address=None,
            silence_logs=logging.ERROR,
        )
        self._client = distributed.Client(self._cluster, direct_to_workers=True)
        workers = list(self._client.scheduler_info(n_workers=-1)["workers"])
        futures = [
            self._client.submit(SteppedEnv, self._job.source, actor=True, pure=False, workers=[worker])
            for worker in workers
        ]
        self._actors = [future.result() for future in futures]

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        futures = [getattr(actor, method)(argument) for actor, argument in zip(self._actors, arguments, strict=True)]
        return [future.result() for future in futures]

    def close(self) -> None:
        super().close()
        self._actors.clear()
        self._client.close()
        self._cluster.close()


OPPONENTS: tuple[type[Contender], ...] = (
    GymnasiumProcesses,
    StableBaselines,
    Tianshou,
    Ray,
    Dask,
    Loky,
    BarePipe,
)
