"""Runs of a candidate: a vector that is made once and takes turns with others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from envactors.mailbox.specs import Spec, spec_of_space, stack
from envactors.tuning.actions import sample_actions
from envactors.tuning.candidates import Candidate
from envactors.tuning.playback import PlaybackRollouts
from envactors.vector.facade import VectorEnv

# Before a turn is measured, in seconds: caller and workers find out again how to wait for each other.
_WARM_UP = 0.05
_SEED = 0


class Actions:
    """Batches of sampled actions, taken one after the other.

    Args:
        factory: Makes the env whose action space is sampled.
        num_envs: How many actions a batch has.

    Attributes:
        spec: Spec of an action.
        rows: Rows of one action per env.

    Raises:
        ValueError: The env has no action space to sample from.
    """

    _COUNT = 64

    def __init__(self, factory: Callable[[], Any], num_envs: int) -> None:
        env = factory()
        try:
            sampled = sample_actions(env, getattr(factory, "__name__", repr(factory)), self._COUNT, _SEED)
            self.spec: Spec = spec_of_space(env.action_space)
        finally:
            if hasattr(env, "close"):
                env.close()
        # Batches of any number of envs, since `recv` hands out some at a time.
        counts = range(1, num_envs + 1)
        self._batches = [[stack(self.spec, [action] * count) for action in sampled] for count in counts]
        self.rows: list[list[Any]] = [[action] * num_envs for action in sampled]
        self._next = 0

    def take(self, count: int) -> Any:
        """Return a batch of so many actions."""
        self._next = (self._next + 1) % self._COUNT
        return self._batches[count - 1][self._next]


class Run:
    """A candidate at work.

    Args:
        candidate: What to run.
        factory: Makes an env.
        num_envs: How many envs.
        actions: What they do.

    Attributes:
        candidate: See above.
        started_in: How long it took from the call to the first observations, in seconds.
        rates: The env-steps per second of each turn.
    """

    def __init__(self, candidate: Candidate, factory: Callable[[], Any], num_envs: int, actions: Actions) -> None:
        self.candidate = candidate
        self.rates: list[float] = []
        self._num_envs = num_envs
        self._actions = actions
        begun = time.monotonic()
        self._envs = VectorEnv([factory] * num_envs, **candidate.settings)
        try:
            self._envs.reset(seed=_SEED)
            if candidate.in_workers:
                self._rollouts = PlaybackRollouts(self._envs, actions.spec, actions.rows)
        except BaseException:
            self.close()
            raise
        self.started_in: float = time.monotonic() - begun

    @property
    def rate(self) -> float:
        """The median of the turns; 0 before the first."""
        return statistics.median(self.rates) if self.rates else 0.0

    def take_turn(self, seconds: float) -> None:
        """Step for so long, and note how fast that was."""
        if self.candidate.min_envs is not None:
            self._envs.send(self._actions.take(self._num_envs))
        self._go_on(_WARM_UP)
        begun = time.monotonic()
        steps = self._go_on(seconds)
        self.rates.append(steps / (time.monotonic() - begun))
        if self.candidate.min_envs is not None:
            self._envs.recv()

    def _go_on(self, seconds: float) -> int:
        end, steps, envs, actions = time.monotonic() + seconds, 0, self._envs, self._actions
        min_envs = self.candidate.min_envs
        while True:
            if self.candidate.in_workers:
                steps += self._rollouts.run()
            elif min_envs is None:
                envs.step(actions.take(self._num_envs))
                steps += self._num_envs
            else:
                ids = envs.recv(min_envs=min_envs).env_ids
                envs.send(actions.take(len(ids)), env_ids=ids)
                steps += len(ids)
            if time.monotonic() >= end:
                return steps

    def close(self) -> None:
        """End the envs."""
        self._envs.close()
