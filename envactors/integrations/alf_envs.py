"""ALF's envs one by one: each as it is seen from outside, and what must be the same for all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.errors import ActorError, SerializationError, SpaceMismatchError
from envactors.integrations.alf_values import alf
from envactors.integrations.inside_alf import Described
from envactors.vector.facade import VectorEnv

_log = logging.getLogger("envactors")

# Of what must be the same for all envs.
_AGREED = "is_tensor_based", "action_spec", "reward_spec", "env_info_spec", "batch_size", "batched", "time_step_spec"

# What the drop-in has put methods of its own before, in the worker.
_OWN = {"step": "envactors_step", "reset": "envactors_reset"}


class Specs:
    """What an env and many envs alike say of themselves."""

    _described: Described

    def observation_spec(self) -> Any:
        """One env's observation."""
        return self._described.observation_spec

    def action_spec(self) -> Any:
        """One env's action."""
        return self._described.action_spec

    def reward_spec(self) -> Any:
        """One env's reward."""
        return self._described.reward_spec

    def env_info_spec(self) -> Any:
        """One env's ``env_info``."""
        return self._described.env_info_spec

    def time_step_spec(self) -> Any:
        """One env's time step, without its ``env_info``."""
        return self._described.time_step_spec

    @property
    def num_tasks(self) -> int:
        """How many tasks the envs have."""
        return self._described.num_tasks

    @property
    def task_names(self) -> Any:
        """The tasks' names."""
        return self._described.task_names


class ActorEnvironment(Specs):
    """One env of an `ActorParallelEnvironment`: ALF's ``ProcessEnvironment``. Its attributes are the env's own."""

    def __init__(self, handle: ActorHandle, described: Described) -> None:
        self._handle = handle
        self._described = described

    def call(self, name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Starts a call of a method of the env.

        Returns:
            A promise: called, it waits for this call and gives its result, as often as it is called. It raises what the
            env raised, or RuntimeError where the process was lost.
        """
        return _promise(self._handle.call(_OWN.get(name, name), *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} begins with an underscore: such names are never sent to an env")
        return _promise(self._handle.get(name))()

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Steps this env alone, of which the others know nothing; its time step, or without ``blocking`` a promise."""
        promise = self.call("step", action)
        return promise() if blocking else promise

    def reset(self, blocking: bool = True) -> Any:
        """Resets this env alone, of which the others know nothing; its time step, or without ``blocking`` a promise."""
        promise = self.call("reset")
        return promise() if blocking else promise

    def render(self, mode: str = "human") -> Any:
        """A frame, as the env's ``render`` gives it."""
        return self.call("render", mode)()

    def sync_progress(self) -> None:
        """See `ActorParallelEnvironment.sync_progress`."""
        progress = None
        if alf is not None:
            from alf.utils.schedulers import get_all_progresses

            progress = get_all_progresses()
        self._handle.call("envactors_sync_progress", progress).add_done_callback(_tell)


class Envs(VectorEnv):
    """The envs, that must be alike.

    Attributes:
        described: What they say of themselves.
    """

    def _learn_specs(self) -> None:
        first, *others = self.call("envactors_describe")
        for env_id, other in enumerate(others, 1):
            for name in _AGREED:
                ours, theirs = getattr(first, name), getattr(other, name)
                if theirs != ours:
                    raise SpaceMismatchError(
                        f"All environments must have the same {name}: that of env {env_id} is {theirs}, "
                        f"that of env 0 {ours}"
                    )
        if first.is_tensor_based:
            raise SpaceMismatchError("All environments must be array-based environments: is_tensor_based is True")
        self.described: Described = first
        super()._learn_specs()


def _promise(future: ActorFuture) -> Callable[[], Any]:
    def promise() -> Any:
        try:
            return future.result()
        except SerializationError:
            raise
        except ActorError as error:
            raise interrupted(error) from error

    return promise


def _tell(future: Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        _log.warning("an env has not taken in the progress: %r", error)


def interrupted(error: BaseException) -> RuntimeError:
    """As ALF says it."""
    return RuntimeError(f"ProcessEnvironment is interrupted: {error}")
