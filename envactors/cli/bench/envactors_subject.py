"""Subjects of a bench that use envactors."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import envactors as ea
from envactors.cli.bench.jobs import Job
from envactors.cli.bench.subject_base import VectorSubject
from envactors.tuning.playback import PlaybackRollouts


class EnvactorsSubject(VectorSubject):
    """`VectorEnv` with its default options."""

    name = package = "envactors"
    is_envactors = True

    @classmethod
    def version(cls) -> str | None:
        return ea.__version__

    def start(self) -> None:
        self._envs = ea.VectorEnv([self._job.source] * self._job.num_envs)


class EnvactorsPacked(EnvactorsSubject):
    """`VectorEnv` with several envs per process."""

    name = "envactors-packed"

    @classmethod
    def title(cls, job: Job) -> str:
        return f"envactors, {job.envs_per_actor} per process"

    def start(self) -> None:
        envs_per_actor = self._job.envs_per_actor
        self._envs = ea.VectorEnv([self._job.source] * self._job.num_envs, envs_per_actor=envs_per_actor)


class EnvactorsRecv(EnvactorsSubject):
    """`VectorEnv` with `send` and `recv`, waiting for half of the envs at most."""

    name = "envactors-recv"
    label: ClassVar[str] = "envactors, recv"

    def __init__(self, job: Job, scratch: str) -> None:
        super().__init__(job, scratch)
        self._all = np.arange(job.num_envs)
        self._rows = np.zeros(job.num_envs, np.int64)
        self._in_flight = 0
        batchable = isinstance(job.batches[0], np.ndarray)
        self._table: npt.NDArray[Any] | None = np.stack(job.batches) if batchable else None

    def _reset(self, seed: int) -> None:
        self.settle()
        self._resetting = self._none.copy()
        self._rows[:] = 0
        self._envs.reset(seed=seed)

    def step(self) -> int:
        if self._in_flight == 0:
            self._send(self._all)
        batch = self._envs.recv(min_envs=max(1, self._job.num_envs // 2))
        made = self._count_steps(batch)
        self._send(batch.env_ids)
        return made

    def settle(self) -> int:
        return self._count_steps(self._envs.recv()) if self._in_flight else 0

    def _send(self, env_ids: npt.NDArray[np.int64]) -> None:
        rows = self._rows[env_ids] % len(self._job.actions)
        self._rows[env_ids] += 1
        actions: Any
        if self._table is not None:
            actions = self._table[rows, env_ids]
        else:
            actions = [self._job.actions[row][env_id] for row, env_id in zip(rows, env_ids, strict=True)]
        self._envs.send(actions, env_ids=env_ids)
        self._in_flight += len(env_ids)

    def _count_steps(self, batch: ea.Batch) -> int:
        made = len(batch.env_ids) - int(np.count_nonzero(self._resetting[batch.env_ids]))
        self._resetting[batch.env_ids] = batch.terminated | batch.truncated
        self._in_flight -= len(batch.env_ids)
        return made


class EnvactorsRollout(EnvactorsSubject):
    """`VectorEnv.rollout` in one process per core, whose policy plays back the actions."""

    name = "envactors-rollout"
    label: ClassVar[str] = "envactors, rollout"

    def start(self) -> None:
        self._envs = ea.VectorEnv([self._job.source] * self._job.num_envs, envs_per_actor="auto")
        self._rollouts = PlaybackRollouts(self._envs, self._job.action_spec, self._job.actions)

    def _reset(self, seed: int) -> None:
        super()._reset(seed)
        self._rollouts.rewind()

    def step(self) -> int:
        return self._rollouts.run()
