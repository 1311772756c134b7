"""Single envs of the ALF drop-in, and the specs that all envs must share.

Stepping all envs at once is in `envactors.integrations.alf.parallel_environment`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from envactors.actor.future import ActorFuture, results_of
from envactors.actor.handle import ActorView
from envactors.errors import ActorError, SerializationError, SpaceMismatchError
from envactors.integrations.alf.adapter import Described
from envactors.integrations.alf.values import alf
from envactors.mailbox.pickling import safe_repr
from envactors.vector_env import VectorEnv

_log = logging.getLogger("envactors")

# Properties that must be equal for all envs.
_AGREED = "is_tensor_based", "action_spec", "reward_spec", "env_info_spec", "batch_size", "batched", "time_step_spec"

# Methods of the env that the adapter overrides, and the names under which it offers them.
_OWN = {"step": "envactors_step", "reset": "envactors_reset"}


class Specs:
    """Specs that a single env and a batch of envs share."""

    _described: Described

    def observation_spec(self) -> Any:
        """Return the spec of one env's observation."""
        return self._described.observation_spec

    def action_spec(self) -> Any:
        """Return the spec of one env's action."""
        return self._described.action_spec

    def reward_spec(self) -> Any:
        """Return the spec of one env's reward."""
        return self._described.reward_spec

    def env_info_spec(self) -> Any:
        """Return the spec of one env's ``env_info``."""
        return self._described.env_info_spec

    def time_step_spec(self) -> Any:
        """Return the spec of one env's time step without ``env_info``."""
        return self._described.time_step_spec

    @property
    def num_tasks(self) -> int:
        """The number of tasks of the envs."""
        return self._described.num_tasks

    @property
    def task_names(self) -> Any:
        """The names of the tasks."""
        return self._described.task_names


class ActorEnvironment(Specs):
    """One env of an `ActorParallelEnvironment`, like ALF's ``ProcessEnvironment``. It reads attributes from the env."""

    def __init__(self, handle: ActorView, described: Described) -> None:
        self._handle = handle
        self._described = described

    def call(self, name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Start a call of a method of the env.

        Returns:
            A promise: a function that waits for the call and returns its result, any number of times. It raises the
            exception from the env, or RuntimeError if the process crashed.
        """
        return _promise(self._handle.call(_OWN.get(name, name), *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"cannot read {name!r}: attributes that begin with an underscore stay in the worker")
        return _promise(self._handle.get(name))()

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Step only this env; return its time step, or a promise if not ``blocking``."""
        promise = self.call("step", action)
        return promise() if blocking else promise

    def reset(self, blocking: bool = True) -> Any:
        """Reset only this env; return its time step, or a promise if not ``blocking``."""
        promise = self.call("reset")
        return promise() if blocking else promise

    def render(self, mode: str = "human") -> Any:
        """Return the result of the env's ``render``."""
        return self.call("render", mode)()

    def sync_progress(self) -> None:
        """See `ActorParallelEnvironment.sync_progress`."""
        progress = None
        if alf is not None:
            from alf.utils.schedulers import get_all_progresses

            progress = get_all_progresses()
        self._handle.call("envactors_sync_progress", progress).add_done_callback(_log_failure)


class Envs(VectorEnv):
    """A vector env of ALF envs, whose specs must be equal.

    Attributes:
        described: Specs and properties of the envs.
    """

    def _check_made(self) -> None:
        first, *others = results_of([handle.call("envactors_describe") for handle in self._handles])
        for env_id, other in enumerate(others, 1):
            for name in _AGREED:
                ours, theirs = getattr(first, name), getattr(other, name)
                if theirs != ours:
                    raise SpaceMismatchError(
                        f"All environments must have the same {name}: it is {theirs} in env {env_id}, but {ours} in "
                        "env 0"
                    )
        if first.is_tensor_based:
            raise SpaceMismatchError("All environments must be array-based environments: is_tensor_based is True")
        self.described: Described = first


def _promise(future: ActorFuture) -> Callable[[], Any]:
    def promise() -> Any:
        try:
            return future.result()
        except SerializationError:
            raise
        except ActorError as error:
            raise interrupted(error) from error

    return promise


def _log_failure(future: Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        _log.warning("cannot set the progress of an env: %s", safe_repr(error))


def interrupted(error: BaseException) -> RuntimeError:
    """Convert a failure to the RuntimeError that ALF raises."""
    return RuntimeError(f"ProcessEnvironment is interrupted: {error}")
