"""Loops in processes that share nothing: as many steps as the cores give without any exchange."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.cli.bench.baselines import SteppedEnv
from envactors.cli.bench.jobs import Job
from envactors.cli.bench.subject_base import Subject
from envactors.system.cpus import cores

# How long the processes run between two looks at the clock of the round, in seconds.
_SLICE = 0.1


class LoopsApart(Subject):
    """One process per core, each with its share of the envs in a loop, which nobody waits for and nobody reads."""

    name = "apart"

    @classmethod
    def title(cls, job: Job) -> str:
        return f"{_count(job)} loops apart"

    def start(self) -> None:
        self._pipes: list[multiprocessing.connection.Connection[Any, Any]] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")  # a fork would hold the pipes of those before it open
        for envs in np.array_split(np.arange(self._job.num_envs), _count(self._job)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._job, envs.tolist()), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _reset(self, seed: int) -> None:
        self._ask(("reset", seed))

    def step(self) -> int:
        return sum(self._ask(("run", _SLICE)))

    def _ask(self, request: tuple[str, Any]) -> list[int]:
        for pipe in self._pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def _count(job: Job) -> int:
    return min(job.num_envs, cores())


def _serve(pipe: multiprocessing.connection.Connection[Any, Any], job: Job, env_ids: Sequence[int]) -> None:
    envs = {env_id: SteppedEnv(job.source) for env_id in env_ids}
    turn = 0
    while (request := _next_request(pipe)) is not None:
        what, value = request
        if what == "reset":
            turn = 0
            for env_id, env in envs.items():
                env.reset(value + env_id)
            pipe.send(0)
            continue
        made, end = 0, time.perf_counter() + value
        while time.perf_counter() < end:
            actions = job.actions[turn % len(job.actions)]
            turn += 1
            for env_id, env in envs.items():
                made += not env.ended
                env.step(actions[env_id])
        pipe.send(made)
    for env in envs.values():
        env.close()


def _next_request(pipe: multiprocessing.connection.Connection[Any, Any]) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the parent was killed
        return None
