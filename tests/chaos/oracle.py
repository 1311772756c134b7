"""Oracle of a chaos run: the same envs without faults, and the results expected of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import envactors as ea
from chaos.faults import LargeEcho
from chaos.report import ReportBuilder
from envactors.backends.base import Backend
from envactors.tuning.measure import sample_actions

_TRIAL_STEPS = 60
_ACTIONS = 512


class Request(NamedTuple):
    """One request to an env.

    Attributes:
        env_id: Index of the env.
        is_reset: True for a reset, False for a step.
        value: Seed of a reset (or None), or action of a step.
    """

    env_id: int
    is_reset: bool
    value: Any


class Result(NamedTuple):
    """Result of a request; a reset has reward 0."""

    obs: Any
    reward: Any
    terminated: bool
    truncated: bool


class ReferenceEnvs:
    """Envs without faults, stepped one after the other in one process.

    Args:
        factories: One factory per env.
    """

    def __init__(self, factories: Sequence[Callable[[], Any]]) -> None:
        self._envs = [factory() for factory in factories]

    def run_requests(self, requests: Iterable[Request]) -> list[Result]:
        """Run requests in this order and return their results."""
        return [self._run_request(*request) for request in requests]

    def episode(self, seed: int, actions: Iterable[Any]) -> list[Result]:
        """Return the results of env 0 from a reset on, until the episode or the actions end."""
        results = [self._run_request(0, True, seed)]
        for action in actions:
            results.append(self._run_request(0, False, action))
            if results[-1].terminated or results[-1].truncated:
                break
        return results

    def _run_request(self, env_id: int, is_reset: bool, value: Any) -> Result:
        env = self._envs[env_id]
        if is_reset:
            obs, _ = env.reset() if value is None else env.reset(seed=value)
            return Result(obs, 0.0, False, False)
        obs, reward, terminated, truncated, _ = env.step(value)
        return Result(obs, reward, bool(terminated), bool(truncated))

    def sample(self, count: int, seed: int) -> list[Any]:
        """Sample actions from the action space of env 0.

        Raises:
            ValueError: The env has no action space to sample from.
        """
        return sample_actions(self._envs[0], "the factory", count, seed)


class Oracle(NamedTuple):
    """Source of actions and expected results.

    Attributes:
        expected_results: Returns the results expected for requests; None if the env is not deterministic.
        action: Returns the action for an env in a round, by env id and round.
    """

    expected_results: Callable[[list[Request]], list[Result]] | None
    action: Callable[[int, int], Any]


@contextlib.contextmanager
def make_oracle(
    factory: Callable[[], Any] | None, num_envs: int, seed: int, backend: Backend, report_builder: ReportBuilder
) -> Iterator[Oracle]:
    """Yield the oracle for envs of this factory, or for echo envs; report whether the envs are deterministic."""
    if factory is None:
        echoes = ReferenceEnvs([functools.partial(LargeEcho, i) for i in range(num_envs)])
        # No two actions are equal.
        yield Oracle(echoes.run_requests, lambda env_id, round_: round_ * num_envs + env_id)
        return
    with (
        ea.spawn(functools.partial(ReferenceEnvs, [factory] * num_envs), backend=backend) as actor,
        ea.spawn(functools.partial(ReferenceEnvs, [factory]), backend=backend) as other,
    ):
        actions = actor.sample(_ACTIONS, seed).result()
        first, second = [one.episode(seed, actions[:_TRIAL_STEPS]) for one in (actor, other)]
        report_builder.compared = identical(first.result(), second.result())

        def expected_results(requests: list[Request]) -> list[Result]:
            results: list[Result] = actor.run_requests(requests).result()
            return results

        yield Oracle(
            expected_results if report_builder.compared else None,
            lambda env_id, round_: actions[(round_ * num_envs + env_id) % _ACTIONS],
        )


def identical(one: Any, other: Any) -> bool:
    """Return whether two values are equal bit for bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, (np.ndarray, np.generic)) and isinstance(other, (np.ndarray, np.generic)):
        if one.dtype.hasobject:
            return identical(one.tolist(), other.tolist())
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)
