"""Other libraries as sides of a bench: vector envs, and one actor or executor per env."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envactors.cli.bench.sides import EnvByEnv, SteppedEnv
from envactors.tuning.measuring import Flags, Side, VectorSide

# Vector envs -------------------------------------------------------------------------------------------------


class GymnasiumLoop(VectorSide):
    """Gymnasium's loop in the caller's process."""

    def start(self) -> None:
        import gymnasium

        self._envs = gymnasium.vector.SyncVectorEnv([self._workload.factory] * self._workload.num_envs)


class GymnasiumProcesses(VectorSide):
    """Gymnasium's processes."""

    def start(self) -> None:
        import gymnasium

        self._envs = gymnasium.vector.AsyncVectorEnv(
            [self._workload.factory] * self._workload.num_envs, shared_memory=True
        )


class StableBaselines(Side):
    """Stable-Baselines3's processes, which reset within the step that ends an episode."""

    def start(self) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self._envs = SubprocVecEnv([self._workload.factory] * self._workload.num_envs)

    def _reset(self, seed: int) -> None:
        self._envs.seed(seed)
        self._envs.reset()

    def _step(self, row: int) -> Flags:
        batch = self._workload.batches[row]
        self._envs.step(batch if isinstance(batch, np.ndarray) else self._workload.actions[row])
        return self._none

    def close(self) -> None:
        self._envs.close()


class Tianshou(Side):
    """Tianshou's processes with shared memory; the caller resets envs at an episode's end, as its collectors do."""

    def start(self) -> None:
        from tianshou.env import ShmemVectorEnv

        self._envs = ShmemVectorEnv([self._workload.factory] * self._workload.num_envs)

    def _reset(self, seed: int) -> None:
        # `seed` also resets; another reset would start a second episode.
        self._envs.seed(seed)

    def _step(self, row: int) -> Flags:
        batch = self._workload.batches[row]
        actions = batch if isinstance(batch, np.ndarray) else self._workload.actions[row]
        _, _, terminated, truncated, _ = self._envs.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            self._envs.reset(ended)
        return self._none

    def close(self) -> None:
        self._envs.close()


# Actors and executors ----------------------------------------------------------------------------------------


class Loky(EnvByEnv):
    """One executor with one worker per env, and one task per step."""

    def start(self) -> None:
        import loky

        self._executors = [
            loky.ProcessPoolExecutor(max_workers=1, initializer=_make_lokys_env, initargs=(self._workload.factory,))
            for _ in range(self._workload.num_envs)
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


def _make_lokys_env(factory: Callable[[], Any]) -> None:
    global _lokys_env
    _lokys_env = SteppedEnv(factory)


def _call_lokys_env(method: str, argument: Any) -> Any:
    return getattr(_lokys_env, method)(argument)


class Ray(EnvByEnv):
    """One Ray actor per env, on a local Ray instance."""

    def start(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        self._ray = ray
        # Never the cluster that the environment may name.
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        actor = ray.remote(num_cpus=0)(SteppedEnv)
        self._actors = [actor.remote(self._workload.factory) for _ in range(self._workload.num_envs)]

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        pairs = zip(self._actors, arguments, strict=True)
        results: list[Any] = self._ray.get([getattr(actor, method).remote(argument) for actor, argument in pairs])
        return results

    def close(self) -> None:
        super().close()
        self._ray.shutdown()


class Dask(EnvByEnv):
    """One Dask actor per env, each on a separate worker process with a direct connection."""

    def start(self) -> None:
        import distributed

        self._cluster = distributed.LocalCluster(
            n_workers=self._workload.num_envs,
            threads_per_worker=1,
            processes=True,
            memory_limit=0,
            dashboard_address=None,
            silence_logs=logging.ERROR,
        )
        self._client = distributed.Client(self._cluster, direct_to_workers=True)
        workers = list(self._client.scheduler_info(n_workers=-1)["workers"])
        futures = [
            self._client.submit(SteppedEnv, self._workload.factory, actor=True, pure=False, workers=[worker])
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
