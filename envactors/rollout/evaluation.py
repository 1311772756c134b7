"""Evaluate a policy on whole episodes: seeded resets with rollouts in between."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from envactors.errors import VectorStepError
from envactors.rollout.base import RolloutEngine
from envactors.rollout.results import Evaluation, Rollout
from envactors.vector.results import failure_in, step_error

# Steps per rollout. Envs whose episodes have ended begin the next ones after it: shorter rollouts cost more messages,
# longer ones more steps after the end of an episode, which are discarded.
_STEPS_PER_ROLLOUT = 64
# Attempts per episode; an episode that always fails must not be repeated without end.
_TRIES = 3


@dataclasses.dataclass(slots=True)
class EpisodeInPlay:
    """The current episode of an env.

    Attributes:
        number: Its number, from 0, which may be beyond the episodes to play.
        total: Sum of its rewards so far.
        length: Number of its steps so far.
    """

    number: int
    total: Any = 0.0
    length: int = 0


class Evaluator:
    """Plays whole episodes: env ``i`` of ``n`` plays the episodes ``i``, ``i + n``, ``i + 2 n``, ...

    So the choice of the episodes does not depend on their lengths. An env that has played all of its episodes continues
    to step with the others, and its results are discarded.

    Args:
        engine: Runs rollouts.
        reset: Method ``reset`` of the vector.
        episodes: Number of episodes to play.
        count: Number of envs.
    """

    def __init__(self, engine: RolloutEngine, reset: Callable[..., Any], episodes: int, count: int) -> None:
        self._engine = engine
        self._reset = reset
        self._episodes = episodes
        # The return and the length of each finished episode, and the failed attempts, also beyond the episodes to play.
        self._finished: dict[int, tuple[Any, int]] = {}
        self._failures: list[tuple[int, BaseException]] = []
        self._tries: Counter[int] = Counter()
        # The current episode of each env.
        self._in_play = [EpisodeInPlay(number) for number in range(count)]

    def run(self, parameters: Any) -> Evaluation:
        """Play the episodes.

        Args:
            parameters: Parameters that the policy loads first; None keeps the current ones.

        Raises:
            VectorStepError: An episode failed three times.
            BaseException: Raised by the policy.
        """
        to_reset = list(range(len(self._in_play)))
        while min(episode.number for episode in self._in_play) < self._episodes:
            if to_reset:
                to_reset = self._reset_envs(to_reset)
            else:
                to_reset = self._run_rollout(parameters)
                parameters = None  # the policy keeps them

        numbers = range(self._episodes)
        returns, lengths = zip(*map(self._finished.__getitem__, numbers), strict=True)
        seeds = np.array([self._engine.seed_of_episode(number) for number in numbers], np.int64)
        failures = sorted((each for each in self._failures if each[0] in numbers), key=lambda failure: failure[0])
        return Evaluation(np.array(returns), np.array(lengths), seeds, failures)

    def _reset_envs(self, ids: list[int]) -> list[int]:
        """Reset envs for their current episodes; return the envs whose reset failed."""
        seeds = [self._engine.seed_of_episode(self._in_play[index].number) for index in ids]
        failures: dict[int, BaseException] = {}
        try:
            infos = dict(zip(ids, self._reset(seeds, env_ids=ids)[1], strict=True))
        except VectorStepError as error:
            failures = {**error.failures}
            infos = dict(zip(error.batch.env_ids.tolist(), error.batch.infos, strict=True))
        for index, failure in failures.items():
            self._record_failure(index, failure)
        # After a failure, the vector has perhaps reset the env with another seed.
        for index, info in infos.items():
            if self._in_play[index].number < self._episodes and (cause := failure_in(info)) is not None:
                self._record_failure(index, cause)
                failures[index] = cause
        return list(failures)

    def _run_rollout(self, parameters: Any) -> list[int]:
        """Run a rollout, and add its steps to the episodes; return the envs that need a reset."""
        (future,) = self._engine.start(_STEPS_PER_ROLLOUT, parameters)
        try:
            rollout = future.result()
        except VectorStepError as error:
            rollout = error.batch
        needs_reset = [self._extend_episode(rollout, index) for index in range(len(self._in_play))]
        return [index for index, needs in enumerate(needs_reset) if needs]

    def _extend_episode(self, rollout: Rollout, index: int) -> bool:
        """Add the steps of an env to its episode; return whether the env needs a reset."""
        ran = np.flatnonzero(rollout.valid[:, index])
        ends = np.flatnonzero(rollout.terminated[ran, index] | rollout.truncated[ran, index])
        is_over = len(ends) > 0
        if is_over:
            ran = ran[: ends[0] + 1]
        # A failure after the end of the episode belongs to no episode.
        last = int(ran[-1]) if is_over else _STEPS_PER_ROLLOUT
        failure = next((each for step, env_id, each in rollout.failures if env_id == index and step <= last), None)
        episode = self._in_play[index]
        if failure is not None:
            if episode.number < self._episodes:
                self._record_failure(index, failure, rollout)
            self._in_play[index] = EpisodeInPlay(episode.number)
            return True
        episode.length += len(ran)
        for reward in rollout.rewards[ran, index]:  # `numpy.sum` rounds differently
            episode.total = episode.total + reward
        if is_over:
            self._finished[episode.number] = episode.total, episode.length
            self._in_play[index] = EpisodeInPlay(episode.number + len(self._in_play))
        return is_over

    def _record_failure(self, index: int, failure: BaseException, batch: Rollout | None = None) -> None:
        """Count a failed attempt at an episode, and record the failure.

        Count failed resets even of envs that have played all their episodes: until such an env is reset, no rollout can
        start.

        Args:
            index: The env.
            failure: Its exception.
            batch: The results of all envs; None if the attempt was a reset.

        Raises:
            VectorStepError: This was the last attempt.
        """
        number = self._in_play[index].number
        self._failures.append((number, failure))
        self._tries[number] += 1
        if self._tries[number] == _TRIES:
            raise step_error({index: failure}, batch, len(self._in_play), "evaluate")
