"""`ActorVecEnv`: stable-baselines3's ``SubprocVecEnv`` on actors.

    step_async ──▶ starts a step of all envs      step_wait ──▶ its results, with the names of stable-baselines3

`envactors.vector_env.VectorEnv` runs the envs, with ``autoreset="same_step"``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from envactors.actor.future import BoundToProcess, results_of
from envactors.actor.handle import ActorHandle, ActorView
from envactors.backends.base import Backend
from envactors.errors import NothingPendingError, VectorStepError
from envactors.integrations.access import VectorAccess
from envactors.integrations.adapter import adapter_factories
from envactors.integrations.failures import first_failure, or_first_failure
from envactors.integrations.options import as_start_method, check_one_backend, check_seed, make_vector, preloading
from envactors.integrations.sb3.adapter import StableBaselinesEnvAdapter
from envactors.mailbox.factory import Factory, as_factories
from envactors.mailbox.pickling import dumps_by_value
from envactors.vector.options import VectorOptions
from envactors.vector.results import failure_in
from envactors.vector_env import VectorEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The module of the wrapper that `make_vec_env` adds to each env. It imports torch, which takes seconds.
_MONITOR = "stable_baselines3.common.monitor"

_REFUSED = {
    "autoreset": "in stable-baselines3 the step that ends an episode resets the env, which is autoreset='same_step'",
}


class ActorVecEnv(BoundToProcess, VecEnv):  # type: ignore[misc] # mypy skips its module
    """A ``VecEnv`` of stable-baselines3 whose envs run in one actor each.

    Args:
        env_fns: One callable per env; called only in the workers.
        start_method: ``"loky"``, or the default of `ProcessBackend`, which stable-baselines3's names (``"forkserver"``,
            ``"spawn"``, ``"fork"``) stand for. None means the environment variable ``DEFAULT_START_METHOD`` or, if it
            is not set, that default. No ``__main__`` guard is needed.
        **options: See `envactors.VectorOptions`; ``backend`` excludes ``start_method``. With ``on_failure="renew"`` the
            episode of a failed env is truncated, and ``info["failure"]`` is the exception. With ``seed_episodes``,
            ``reset_infos`` contain the seeds.

    Attributes:
        actors: The handle of each process.
        vector: The vector behind this class, with handles of the envs (``vector[i]``) and ``stats()``.
        waiting: True while a step is pending.
        closed: True after `close`.

    Raises:
        ValueError: The start method is unknown or given together with a backend, or an option is invalid.
        ActorStartError: An env could not be created.
        SpaceMismatchError: The envs' spaces differ.
    """

    def __init__(
        self, env_fns: Iterable[Factory], start_method: str | None = None, **options: Unpack[VectorOptions]
    ) -> None:
        check_one_backend("start_method", start_method, options)
        self.waiting: bool = False
        self.closed: bool = False
        env_fns = as_factories(env_fns, "env_fns")
        factories = adapter_factories(StableBaselinesEnvAdapter, env_fns)
        if "backend" not in options:
            options["backend"] = _backend(start_method, env_fns)
        self.vector: VectorEnv = make_vector(
            VectorEnv, "ActorVecEnv", factories, options, _REFUSED, autoreset="same_step"
        )
        try:
            first = self.vector[0]
            spaces = results_of([first.get("observation_space"), first.get("action_space")])
            super().__init__(self.vector.num_envs, *spaces)
        except BaseException:
            self.vector.close(0)
            raise
        self._access = VectorAccess(self.vector)
        self.actors: list[ActorHandle[Any]] = self.vector.actors
        self.metadata: dict[str, Any] = {**self.vector.metadata, **self.metadata}

    # Stepping --------------------------------------------------------------------------------------------

    def step_async(self, actions: Any) -> None:
        """Start a step of all envs. If the previous one was interrupted, discard its results, with a warning.

        Raises:
            SpaceMismatchError: The number, shape, or dtype of the actions does not match the action space.
        """
        self._access.start_step(actions)
        self.waiting = True

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Wait for the step and return its results.

        Returns:
            ``(obs, rewards, dones, infos)``. An env that is done has already been reset; its info contains the last
            observation of the episode as ``terminal_observation``.

        Raises:
            Exception: The exception from the first env that failed, once all envs have answered; all remain usable.
            NothingPendingError: No step was started.
        """
        if not self.waiting:
            raise NothingPendingError("cannot call step_wait(): no step is pending. Call step_async(actions) first")
        try:
            obs, rewards, terminated, truncated, infos = self._access.finish_step()
        except VectorStepError as error:
            failed = error
        else:
            self.waiting = False
            # An array of bools is greater where an env was truncated and not terminated.
            for info, cut in zip(infos, (truncated > terminated).tolist(), strict=True):
                info["TimeLimit.truncated"] = cut
            dones = terminated | truncated
            if np.count_nonzero(dones):  # takes a fifth of the time of `any`
                for index in np.flatnonzero(dones).tolist():
                    infos[index], self.reset_infos[index] = _ended(infos[index])
            return obs, rewards, dones, infos
        self.waiting = False
        raise first_failure(failed)

    def reset(self) -> Any:
        """Reset all envs with the seeds and options that were set since the last reset.

        If a step is pending, wait for it first and discard its result.

        Raises:
            Exception: The exception from the first env that failed, once all envs have answered.
        """
        self.waiting = False
        options = [options or None for options in self._options]
        obs, infos = or_first_failure(lambda: self.vector.reset(self._seeds, options))
        self.reset_infos: list[dict[str, Any]] = infos
        self._reset_seeds()
        self._reset_options()
        return obs

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Set the seeds for the next reset: ``seed + i`` for env i; with None, random ones.

        Raises:
            VectorInputError: The seed is neither an int >= 0 nor None.
        """
        seeds: Sequence[int | None] = super().seed(check_seed(seed))
        return seeds

    def close(self) -> None:
        """Discard a pending step, close the envs, and end their processes, within the close deadline."""
        self.vector.close()
        self.waiting, self.closed = False, True

    # Attributes and methods
    # ----------------------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of each env; wrapped envs are searched too."""
        return results_of([handle.get(attr_name) for handle in self._handles(indices)])

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        """Set an attribute to the same value in each env, on the outermost wrapper if there is one."""
        results_of([handle.set(attr_name, value) for handle in self._handles(indices)])

    def env_method(
        self, method_name: str, *method_args: Any, indices: int | Iterable[int] | None = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of envs in parallel and return one value per env."""
        return results_of(
            [handle.call(method_name, *method_args, **method_kwargs) for handle in self._handles(indices)]
        )

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all envs have an attribute."""
        return all(self.env_method("envactors_has", attr_name))

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        """Return per env whether it is wrapped in a wrapper of that class."""
        name = wrapper_class.__module__, wrapper_class.__qualname__
        return self.env_method("envactors_is_wrapped", *name, indices=indices)

    def get_images(self) -> Sequence[Any]:
        """Return the frames of all envs. Unless the render mode is ``"rgb_array"``, warn and return None per env."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"cannot return images: render_mode is {self.render_mode!r}. Create the envs with "
                "render_mode='rgb_array'",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.env_method("render")

    def _handles(self, indices: int | Iterable[int] | None) -> list[ActorView]:
        return [self.vector[index] for index in self._get_indices(indices)]


def _ended(info: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the info of a step that ended an episode into the info of that step and that of the reset after it."""
    reset_info = {**info}
    cut, last = reset_info.pop("TimeLimit.truncated"), reset_info.pop("final_info", {})
    # A failed step returns no info; ``final_info`` belongs to the previous step.
    ending = {"failure": reset_info.pop("failure")} if failure_in(info) is not None else {**last}
    ending["TimeLimit.truncated"] = cut
    if "final_obs" in info:
        ending["terminal_observation"] = reset_info.pop("final_obs")
    return ending, reset_info


def _backend(start_method: str | None, env_fns: list[Factory]) -> Backend:
    method = as_start_method(os.environ.get("DEFAULT_START_METHOD") if start_method is None else start_method)
    needs_monitor = any(_MONITOR.encode() in _pickled(env_fn) for env_fn in env_fns[:1])
    return preloading(*[_MONITOR] if needs_monitor else [], start_method=method)


def _pickled(env_fn: Factory) -> bytes:
    try:
        return dumps_by_value(env_fn)
    except Exception:  # starting the worker raises a better error
        return b""
