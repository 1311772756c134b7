"""What a storm's results are compared with: the same envs, to which nothing happens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import envactors as ea
from envactors.backends.base import Backend
from envactors.testing.actions import sample_actions
from envactors.testing.sabotage import LargeEcho
from envactors.testing.tally import Tally

_TRIAL_STEPS = 60
_ACTIONS = 512


class Request(NamedTuple):
    """What was asked of an env.

    Attributes:
        env_id: Which.
        is_reset: Whether it is a reset.
        value: The seed (or None) of a reset, the action of a step.
    """

    env_id: int
    is_reset: bool
    value: Any


class Result(NamedTuple):
    """What came of it; a reset has reward 0."""

    obs: Any
    reward: Any
    terminated: bool
    truncated: bool


class Rehearsal:
    """The envs without faults, one after the other in one process.

    Args:
        factories: Make them.
    """

    def __init__(self, factories: Sequence[Callable[[], Any]]) -> None:
        self._envs = [factory() for factory in factories]

    def play(self, requests: Iterable[Request]) -> list[Result]:
        """Does what is asked, in this order."""
        return [self._play(*request) for request in requests]

    def episode(self, seed: int, actions: Iterable[Any]) -> list[Result]:
        """Plays the first env from a reset on, until its episode ends or there are no more actions."""
        results = [self._play(0, True, seed)]
        for action in actions:
            results.append(self._play(0, False, action))
            if results[-1].terminated or results[-1].truncated:
                break
        return results

    def _play(self, env_id: int, is_reset: bool, value: Any) -> Result:
        env = self._envs[env_id]
        if is_reset:
            obs, _ = env.reset() if value is None else env.reset(seed=value)
            return Result(obs, 0.0, False, False)
        obs, reward, terminated, truncated, _ = env.step(value)
        return Result(obs, reward, bool(terminated), bool(truncated))

    def sample(self, count: int, seed: int) -> list[Any]:
        """Samples actions.

        Raises:
            ValueError: There is nothing to sample from.
        """
        return sample_actions(self._envs[0], "the factory", count, seed)


class Script(NamedTuple):
    """What the storm needs of its rehearsal.

    Attributes:
        play: Gives what is expected, None where the env gives other results each time.
        action: The action of an env in a turn.
    """

    play: Callable[[list[Request]], list[Result]] | None
    action: Callable[[int, int], Any]


@contextlib.contextmanager
def rehearse(
    factory: Callable[[], Any] | None, num_envs: int, seed: int, backend: Backend, tally: Tally
) -> Iterator[Script]:
    """The rehearsal of a storm over envs of this factory, or over echo envs; tells whether they repeat themselves."""
    if factory is None:
        echoes = Rehearsal([functools.partial(LargeEcho, i) for i in range(num_envs)])
        # No action is like another.
        yield Script(echoes.play, lambda env_id, turn: turn * num_envs + env_id)
        return
    with (
        ea.spawn(functools.partial(Rehearsal, [factory] * num_envs), backend=backend) as actor,
        ea.spawn(functools.partial(Rehearsal, [factory]), backend=backend) as other,
    ):
        actions = actor.sample(_ACTIONS, seed).result()
        first, second = [one.episode(seed, actions[:_TRIAL_STEPS]) for one in (actor, other)]
        tally.compared = same(first.result(), second.result())

        def play(requests: list[Request]) -> list[Result]:
            results: list[Result] = actor.play(requests).result()
            return results

        yield Script(
            play if tally.compared else None,
            lambda env_id, turn: actions[(turn * num_envs + env_id) % _ACTIONS],
        )


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)) and isinstance(other, (np.ndarray, np.generic)):
        if one.dtype.hasobject:
            return same(one.tolist(), other.tolist())
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)
