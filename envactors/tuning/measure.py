"""Measures env-steps per second: of a plain loop, and of a `VectorEnv` driven by `step`, `recv`, or `rollout`.

Sampled actions take the place of a policy. Steps that only reset an env do not count: as many as episodes that end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envactors.mailbox.specs import Spec, spec_of_space, stack

if TYPE_CHECKING:
    from envactors.rollout.policy import PolicyContext
    from envactors.vector_env import VectorEnv

SEED = 0
# Number of rows of actions; they are repeated in turn.
_ROWS = 256
# A rollout takes about this long, in seconds, unless it has the largest number of steps.
_ROLLOUT_SECONDS, _MAX_ROLLOUT_STEPS = 0.05, 128


def sample_actions(env: Any, maker: str, count: int, seed: int) -> list[Any]:
    """Sample actions from an env's action space.

    Args:
        env: Env with an ``action_space`` that has a method ``sample``.
        maker: Name of the factory that made the env, used in the error message.
        count: Number of actions.
        seed: Seed of the space; ignored if the space has no ``seed``.

    Raises:
        ValueError: The env has no action space to sample from.
    """
    space: Any = getattr(env, "action_space", None)
    if not callable(getattr(space, "sample", None)):
        raise ValueError(
            f"{maker} makes a {type(env).__name__} without an action_space to sample from: give the env one, such as "
            "gymnasium.spaces.Discrete(2), or any object with a method sample() that returns an action"
        )
    if hasattr(space, "seed"):
        space.seed(seed)
    return [space.sample() for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Actions:
    """Sampled actions.

    Attributes:
        spec: Spec of an action.
        rows: Rows of one action per env.
    """

    spec: Spec
    rows: list[list[Any]]

    @classmethod
    def sample(cls, factory: Callable[[], Any], name: str, num_envs: int) -> Actions:
        """Make one env, and sample actions from its action space.

        Args:
            factory: Makes an env.
            name: Name of the factory in error messages.
            num_envs: Number of envs.

        Raises:
            ValueError: The env has no action space to sample from.
        """
        env = factory()
        try:
            sampled = sample_actions(env, name, _ROWS * num_envs, SEED)
            spec = spec_of_space(env.action_space)
        finally:
            if hasattr(env, "close"):
                env.close()
        return cls(spec, [sampled[start : start + num_envs] for start in range(0, len(sampled), num_envs)])

    @functools.cached_property
    def batches(self) -> list[Any]:
        """The rows as batches."""
        return [stack(self.spec, row) for row in self.rows]

    def select(self, turn: int, env_ids: npt.NDArray[np.int64]) -> Any:
        """Return actions for some of the envs."""
        batch, row = self.batches[turn % _ROWS], self.rows[turn % _ROWS]
        return batch[env_ids] if isinstance(batch, np.ndarray) else [row[env_id] for env_id in env_ids.tolist()]

    def make_policy(self) -> Callable[[Any, PolicyContext], Any]:
        """Return a policy that repeats the actions."""
        batches: Iterator[Any] | None = None

        def policy(obs: Any, context: PolicyContext) -> Any:
            nonlocal batches
            del obs
            if batches is None:
                env_ids = context.env_ids.tolist()
                batches = itertools.cycle([stack(self.spec, [row[env_id] for env_id in env_ids]) for row in self.rows])
            return next(batches)

        return policy


def measure_loop(envs: Sequence[Any], actions: Actions, seconds: float) -> float:
    """Return the env-steps per second of a loop over envs in this process, without a vector."""
    rows = itertools.cycle(actions.rows)

    def step() -> int:
        for env, action in zip(envs, next(rows), strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return len(envs)

    return _rate(step, seconds)


def measure_step(envs: VectorEnv, actions: Actions, seconds: float) -> float:
    """Return the env-steps per second of `VectorEnv.step`."""
    batches = itertools.cycle(actions.batches)

    def step() -> int:
        _, _, terminated, truncated, _ = envs.step(next(batches))
        return _count(terminated | truncated)

    return _rate(step, seconds)


def measure_recv(envs: VectorEnv, actions: Actions, seconds: float, min_envs: int) -> float:
    """Return the env-steps per second of `VectorEnv.recv`; each env gets its next action as soon as it is received."""
    turns = itertools.count()

    def send(env_ids: npt.NDArray[np.int64]) -> None:
        envs.send(actions.select(next(turns), env_ids), env_ids=env_ids)

    def exchange() -> int:
        batch = envs.recv(min_envs=min_envs)
        send(batch.env_ids)
        return _count(batch.terminated | batch.truncated)

    send(np.arange(envs.num_envs))
    rate = _rate(exchange, seconds)
    envs.recv()  # leave nothing pending
    return rate


def measure_rollout(envs: VectorEnv, seconds: float) -> float:
    """Return the env-steps per second of `VectorEnv.rollout` with the policy of the envs."""
    begun = time.perf_counter()
    envs.rollout(1)
    fitting = int(_ROLLOUT_SECONDS / (time.perf_counter() - begun))
    steps = min(max(1, fitting), _MAX_ROLLOUT_STEPS)
    return _rate(lambda: int(np.count_nonzero(envs.rollout(steps).valid)), seconds)


def _count(ended: npt.NDArray[np.bool_]) -> int:
    """Return how many episodes continue. The next step of the other envs only resets them."""
    return len(ended) - int(np.count_nonzero(ended))


def _rate(run: Callable[[], int], seconds: float) -> float:
    """Call a function that returns its number of env-steps for a while, and return their number per second."""
    steps, begun = 0, time.perf_counter()
    while not steps or time.perf_counter() - begun < seconds:
        steps += run()
    return steps / (time.perf_counter() - begun)
