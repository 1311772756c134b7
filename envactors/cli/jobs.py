"""What a bench measures: which env, how many of them, and the actions that every side executes."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from typing import Any

from envactors.arrays.specs import spec_of_space, stack
from envactors.testing.actions import sample_actions

SEED = 0

_ROWS = 256  # of actions, one an env in each; a round begins with the first and goes round
_EXTRA = "pip install 'envactors[demo]'"


class BenchInputError(Exception):
    """An argument that cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class EnvSource:
    """Makes envs, in any process: it pickles as the name that it was given.

    Attributes:
        name: An id of Gymnasium, or ``MODULE:FACTORY``.
    """

    name: str

    @property
    def is_factory(self) -> bool:
        """Whether the name is that of a factory; Gymnasium has ids with a colon too, such as ``ale_py:ALE/Pong-v5``."""
        _, colon, path = self.name.partition(":")
        return bool(colon) and all(part.isidentifier() for part in path.split("."))

    def __call__(self) -> Any:
        """Makes one env."""
        if not self.is_factory:
            import gymnasium

            return gymnasium.make(self.name)
        module, _, path = self.name.partition(":")
        factory: Any = importlib.import_module(module)
        for part in path.split("."):
            factory = getattr(factory, part)
        return factory()


@dataclasses.dataclass(frozen=True)
class Job:
    """What every side does.

    Attributes:
        source: Makes one env.
        num_envs: How many there are.
        envs_per_actor: How many of them share a process on our packed side; 1 where there is none.
        actions: Rows of one action an env.
        batches: The same rows, each as a batch: per leaf of the action space an array with the envs along axis 0.
        is_gymnasium: Whether the env is one of Gymnasium's.
    """

    source: EnvSource
    num_envs: int
    envs_per_actor: int
    actions: list[list[Any]]
    batches: list[Any]
    is_gymnasium: bool


def make_job(name: str, num_envs: int, envs_per_actor: int) -> Job:
    """Tries the env out and samples the actions.

    Args:
        name: As for `EnvSource`.
        num_envs: How many envs each side has.
        envs_per_actor: As for `Job`.

    Raises:
        BenchInputError: There is no such env, or it has no actions to sample.
    """
    source = EnvSource(name)
    if not source.is_factory and importlib.util.find_spec("gymnasium") is None:
        raise BenchInputError(f"{name} is made by gymnasium: {_EXTRA}, or give MODULE:FACTORY")
    try:
        env = source()
    except Exception as error:
        raise BenchInputError(f"{name} could not be made: {type(error).__name__}: {error}") from error
    try:
        return Job(source, num_envs, envs_per_actor, *_sample(name, env, num_envs), _is_gymnasium(env))
    finally:
        if hasattr(env, "close"):
            env.close()


def _sample(name: str, env: Any, num_envs: int) -> tuple[list[list[Any]], list[Any]]:
    try:
        sampled = sample_actions(env, name, _ROWS * num_envs, SEED)
    except ValueError as error:
        raise BenchInputError(str(error)) from error
    actions = [sampled[i : i + num_envs] for i in range(0, len(sampled), num_envs)]
    spec = spec_of_space(env.action_space)
    return actions, [stack(spec, row) for row in actions]


def _is_gymnasium(env: Any) -> bool:
    # Whoever made an env of Gymnasium's has imported it.
    gymnasium: Any = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(env, gymnasium.Env)
