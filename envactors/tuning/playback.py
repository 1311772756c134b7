"""Rollouts whose policy plays back given actions, to measure what rollouts cost without a policy's own work."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from envactors.mailbox.specs import Spec, stack
from envactors.rollout.context import PolicyContext
from envactors.vector.facade import VectorEnv

# A rollout gets longer up to this duration, in seconds, or this number of steps.
_LONG, _MOST_STEPS = 0.05, 128


class Playback:
    """A policy that repeats given actions in turn; any parameters take it back to the first.

    Args:
        spec: Spec of an action.
        rows: Rows of one action per env.
    """

    def __init__(self, spec: Spec, rows: Sequence[Sequence[Any]]) -> None:
        self._spec = spec
        self._rows = rows
        self._batches: list[Any] = []
        self._next = 0

    def __call__(self, obs: Any, context: PolicyContext) -> Any:
        del obs
        if not self._batches:
            env_ids = context.env_ids.tolist()
            self._batches = [stack(self._spec, [row[env_id] for env_id in env_ids]) for row in self._rows]
        batch = self._batches[self._next]
        self._next = (self._next + 1) % len(self._batches)
        return batch

    def load(self, parameters: Any) -> None:
        """Go back to the first actions."""
        del parameters
        self._next = 0


class PlaybackRollouts:
    """Rollouts of a vector that plays back actions; they become longer until one takes 50 ms or has 128 steps.

    Args:
        envs: Vector; its policy is set.
        spec: Spec of an action.
        rows: Rows of one action per env.
    """

    def __init__(self, envs: VectorEnv, spec: Spec, rows: Sequence[Sequence[Any]]) -> None:
        self._envs = envs
        self._steps = 1
        self._is_new = True
        envs.set_policy(functools.partial(Playback, spec, rows))

    def rewind(self) -> None:
        """Let the next rollout begin with the first actions."""
        self._is_new = True

    def run(self) -> int:
        """Run one rollout, and return its number of env-steps without those that only reset."""
        begun = time.perf_counter()
        rollout = self._envs.rollout(self._steps, parameters=0 if self._is_new else None)
        self._is_new = False
        if time.perf_counter() - begun < _LONG and self._steps < _MOST_STEPS:
            self._steps *= 2
        return int(np.count_nonzero(rollout.valid))
