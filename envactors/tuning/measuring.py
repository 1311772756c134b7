"""How steps per second are measured, in ``envactors bench`` and in `tune`: workloads, sides, and rounds.

A side is one way to step many envs. All sides of a comparison execute the same actions and take turns.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from envactors.envs.results import Batch
from envactors.mailbox.specs import Spec, spec_of_space, stack
from envactors.tuning.actions import sample_actions
from envactors.tuning.candidates import Candidate
from envactors.tuning.playback import PlaybackRollouts
from envactors.vector.facade import VectorEnv

SEED = 0

# Number of rows of actions; a round starts with the first and cycles.
_ROWS = 256

Flags = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Round:
    """Result of one side in one round.

    Attributes:
        steps: Number of env-steps.
        seconds: Duration.
    """

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Env-steps per second."""
        return self.steps / self.seconds


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of every side.

    Attributes:
        factory: Makes an env.
        num_envs: Number of envs.
        actions: Rows of one action per env.
        batches: The same rows as batches: per leaf of the action space an array with the envs along axis 0.
        action_spec: Spec of an action.
        is_gymnasium: True if the env is a `gymnasium.Env`.
    """

    factory: Callable[[], Any]
    num_envs: int
    actions: list[list[Any]]
    batches: list[Any]
    action_spec: Spec
    is_gymnasium: bool

    @classmethod
    def sample(cls, factory: Callable[[], Any], name: str, num_envs: int) -> Workload:
        """Make one env, and sample actions from its action space.

        Args:
            factory: Makes an env.
            name: What errors call the factory.
            num_envs: Number of envs.

        Raises:
            ValueError: The env has no action space to sample from.
        """
        env = factory()
        try:
            sampled = sample_actions(env, name, _ROWS * num_envs, SEED)
            spec = spec_of_space(env.action_space)
            # The factory of a Gymnasium env has imported Gymnasium.
            gymnasium: Any = sys.modules.get("gymnasium")
            is_gymnasium = gymnasium is not None and isinstance(env, gymnasium.Env)
        finally:
            if hasattr(env, "close"):
                env.close()
        actions = [sampled[i : i + num_envs] for i in range(0, len(sampled), num_envs)]
        return cls(factory, num_envs, actions, [stack(spec, row) for row in actions], spec, is_gymnasium)


class Side(abc.ABC):
    """One way to step many envs.

    Args:
        workload: Envs and actions.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._turn = 0
        self._none = np.zeros(workload.num_envs, np.bool_)
        self._resetting = self._none

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
        row = self._turn % len(self._workload.actions)
        self._turn += 1
        made = self._workload.num_envs - int(np.count_nonzero(self._resetting))
        self._resetting = self._step(row)
        return made

    def settle(self) -> int:
        """Wait for pending steps and return their number."""
        return 0

    def play(self, seconds: float, warm_up: float) -> Round:
        """Step for a while, unmeasured at first, and return the result of the rest.

        Args:
            seconds: Duration of what is measured.
            warm_up: Duration before that, in seconds.
        """
        self._play(warm_up)
        return self._play(seconds)

    def _play(self, seconds: float) -> Round:
        steps = 0
        begun = time.perf_counter()
        while steps == 0 or time.perf_counter() < begun + seconds:
            steps += self.step()
        steps += self.settle()
        return Round(steps, time.perf_counter() - begun)

    @abc.abstractmethod
    def close(self) -> None:
        """Close the envs and end their processes."""

    @abc.abstractmethod
    def _reset(self, seed: int) -> None:
        """Reset env ``i`` with seed ``seed + i``."""

    @abc.abstractmethod
    def _step(self, row: int) -> Flags:
        """Execute a row of actions and return which envs' next step only resets them."""


class VectorSide(Side):
    """Base of sides with Gymnasium's vector interface."""

    _envs: Any = None

    def _reset(self, seed: int) -> None:
        self._envs.reset(seed=seed)

    def _step(self, row: int) -> Flags:
        _, _, terminated, truncated, _ = self._envs.step(self._workload.batches[row])
        ended: Flags = terminated | truncated
        return ended

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()


class CandidateSide(VectorSide):
    """A `VectorEnv` with the settings of a candidate, driven by `step`, `recv`, or `rollout`.

    Args:
        candidate: The settings.
        workload: Envs and actions.
    """

    def __init__(self, candidate: Candidate, workload: Workload) -> None:
        super().__init__(workload)
        self._candidate = candidate
        self._rows = np.zeros(workload.num_envs, np.int64)
        self._in_flight = 0
        batchable = isinstance(workload.batches[0], np.ndarray)
        self._table: npt.NDArray[Any] | None = np.stack(workload.batches) if batchable else None

    def start(self) -> None:
        workload = self._workload
        self._envs = VectorEnv([workload.factory] * workload.num_envs, **self._candidate.settings)
        if self._candidate.in_workers:
            self._rollouts = PlaybackRollouts(self._envs, workload.action_spec, workload.actions)

    def step(self) -> int:
        if self._candidate.in_workers:
            return self._rollouts.run()
        if self._candidate.min_envs is None:
            return super().step()
        if self._in_flight == 0:
            self._send(np.arange(self._workload.num_envs))
        batch = self._envs.recv(min_envs=self._candidate.min_envs)
        made = self._count_steps(batch)
        self._send(batch.env_ids)
        return made

    def settle(self) -> int:
        return self._count_steps(self._envs.recv()) if self._in_flight else 0

    def _reset(self, seed: int) -> None:
        self.settle()
        self._resetting = self._none.copy()
        self._rows[:] = 0
        self._envs.reset(seed=seed)
        if self._candidate.in_workers:
            self._rollouts.rewind()

    def _send(self, env_ids: npt.NDArray[np.int64]) -> None:
        rows = self._rows[env_ids] % len(self._workload.actions)
        self._rows[env_ids] += 1
        actions: Any
        if self._table is not None:
            actions = self._table[rows, env_ids]
        else:
            actions = [self._workload.actions[row][env_id] for row, env_id in zip(rows, env_ids, strict=True)]
        self._envs.send(actions, env_ids=env_ids)
        self._in_flight += len(env_ids)

    def _count_steps(self, batch: Batch) -> int:
        made = len(batch.env_ids) - int(np.count_nonzero(self._resetting[batch.env_ids]))
        self._resetting[batch.env_ids] = batch.terminated | batch.truncated
        self._in_flight -= len(batch.env_ids)
        return made
