"""Job of a bench: the env, the number of envs, and the actions that every subject executes."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from envactors.cli.source import EnvInputError, EnvSource, find_source
from envactors.mailbox.specs import Spec, spec_of_space, stack
from envactors.tuning.actions import sample_actions

SEED = 0

_ROWS = 256  # rows of actions; a round starts with the first and cycles


@dataclasses.dataclass(frozen=True)
class Job:
    """Task of every subject of a bench.

    Attributes:
        source: Factory of the env.
        num_envs: Number of envs.
        envs_per_actor: Envs per process of the packed subject; 1 if there is none.
        actions: Rows of one action per env.
        batches: The same rows as batches: per leaf of the action space an array with the envs along axis 0.
        action_spec: Spec of an action.
        is_gymnasium: True if the env is a `gymnasium.Env`.
    """

    source: EnvSource
    num_envs: int
    envs_per_actor: int
    actions: list[list[Any]]
    batches: list[Any]
    action_spec: Spec
    is_gymnasium: bool


def make_job(name: str, num_envs: int, envs_per_actor: int) -> Job:
    """Create the env once and return the job with sampled actions.

    Args:
        name: Name as for `EnvSource`.
        num_envs: Number of envs of each subject.
        envs_per_actor: Envs per process of the packed subject.

    Raises:
        EnvInputError: There is no such env, or it has no actions to sample.
    """
    source = find_source(name)
    try:
        env = source()
    except Exception as error:
        raise EnvInputError(f"{name} could not be made: {type(error).__name__}: {error}") from error
    try:
        return Job(source, num_envs, envs_per_actor, *_sample(name, env, num_envs), _is_gymnasium(env))
    finally:
        if hasattr(env, "close"):
            env.close()


def _sample(name: str, env: Any, num_envs: int) -> tuple[list[list[Any]], list[Any], Spec]:
    try:
        sampled = sample_actions(env, name, _ROWS * num_envs, SEED)
    except ValueError as error:
        raise EnvInputError(str(error)) from error
    actions = [sampled[i : i + num_envs] for i in range(0, len(sampled), num_envs)]
    spec = spec_of_space(env.action_space)
    return actions, [stack(spec, row) for row in actions], spec


def _is_gymnasium(env: Any) -> bool:
    # The factory of a Gymnasium env has imported Gymnasium.
    gymnasium: Any = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(env, gymnasium.Env)
