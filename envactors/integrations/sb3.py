"""`ActorVecEnv`: stable-baselines3's ``SubprocVecEnv`` over actors.

    step_async ──▶ the facade's step of all envs is started      step_wait ──▶ its results, by the names known there

The mechanisms are those of `envactors.vector.facade.VectorEnv` with ``autoreset="same_step"``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from envactors.actor.future import ActorFuture
from envactors.actor.handle import ActorHandle
from envactors.backends.base import Backend
from envactors.backends.process import ProcessBackend
from envactors.errors import AlreadyPendingError, NothingPendingError, VectorStepError
from envactors.integrations.inside import StableBaselinesGuest, guests
from envactors.options import Deadlines, RestartPolicy
from envactors.vector.facade import VectorEnv
from envactors.vector.slot import OnFailure

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise ImportError(
        f"envactors.integrations.sb3 needs stable-baselines3 ({error}): pip install 'envactors[sb3]'"
    ) from error


class ActorVecEnv(VecEnv):  # type: ignore[misc] # its module is checked nowhere
    """Steps many envs as one, each in an actor of its own, under stable-baselines3's interface.

    Args:
        env_fns: One callable an env; run in the workers alone.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``, none of which needs a ``__main__`` guard. None: what
            the environment variable ``DEFAULT_START_METHOD`` says, and without it envactors' own default.
        envs_per_actor: How many envs share a process.
        on_failure: ``"raise"``, ``"renew"`` or ``"replay"``; see `VectorEnv`. A renewed env's episode ends as by a time
            limit, with the exception as ``info["failure"]``.
        deadlines: How long things may take.
        restart: When a lost process is replaced.
        standbys: How many processes are kept started for those that are lost.

    Attributes:
        actors: The processes' handles.
        waiting: Whether a step is under way.
        closed: Whether it was closed.

    Raises:
        ValueError: No such start method.
        ActorStartError: An env could not be made.
        SpaceMismatchError: The envs' values do not go into one batch.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Any]],
        start_method: str | None = None,
        *,
        envs_per_actor: int = 1,
        on_failure: OnFailure = "raise",
        deadlines: Deadlines = Deadlines(),  # noqa: B008 # frozen
        restart: RestartPolicy = RestartPolicy(max_restarts=3),  # noqa: B008 # frozen
        standbys: int = 0,
    ) -> None:
        self.waiting = False
        self.closed = False
        self._envs = VectorEnv(
            guests(StableBaselinesGuest, env_fns),
            envs_per_actor=envs_per_actor,
            autoreset="same_step",
            on_failure=on_failure,
            deadlines=deadlines,
            restart=restart,
            standbys=standbys,
            backend=_backend(start_method),
        )
        try:
            first = self._envs[0]
            spaces = _results([first.get("observation_space"), first.get("action_space")])
            super().__init__(self._envs.num_envs, *spaces)
        except BaseException:
            self._envs.close(0)
            raise
        self.actors = self._envs.actors
        self.metadata: dict[str, Any] = {**self._envs.metadata, **self.metadata}

    # Stepping --------------------------------------------------------------------------------------------

    def step_async(self, actions: Any) -> None:
        """Starts a step of all envs.

        Raises:
            AlreadyPendingError: The last one was not taken with `step_wait`.
            SpaceMismatchError: Another number, shape or dtype than the action space has.
        """
        self._envs._check_open()
        if self.waiting:
            raise AlreadyPendingError("a step is under way: take its results with step_wait() first")
        self._envs._begin_all(actions)
        self.waiting = True

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Waits for the step.

        Returns:
            ``(obs, rewards, dones, infos)``: an env that is done was reset already; its info has the episode's last
            observation as ``terminal_observation``.

        Raises:
            Exception: What the first env that failed raised, once all have answered; the others go on.
            NothingPendingError: No step was started.
        """
        if not self.waiting:
            raise NothingPendingError("step_wait() with no step under way: call step_async(actions) first")
        try:
            obs, rewards, terminated, truncated, infos = self._envs._finish_all(None, None)
        except VectorStepError as error:
            failed = error
        else:
            self.waiting = False
            # Truncated and not terminated.
            for info, cut in zip(infos, (truncated > terminated).tolist(), strict=True):
                info["TimeLimit.truncated"] = cut
            dones = terminated | truncated
            for index in np.flatnonzero(dones).tolist():
                infos[index], self.reset_infos[index] = _ended(infos[index])
            return obs, rewards, dones, infos
        self.waiting = False
        raise _first_of(failed)

    def reset(self) -> Any:
        """Resets all envs, with the seeds and options that were set since the last reset.

        A step that is under way is taken in first.

        Raises:
            Exception: What the first env that failed raised, once all have answered.
        """
        if self.waiting:
            with contextlib.suppress(Exception):  # nobody asks for that step any more
                self.step_wait()
        try:
            obs, infos = self._envs.reset(self._seeds, [options or None for options in self._options])
        except VectorStepError as error:
            failed = error
        else:
            self.reset_infos = infos
            self._reset_seeds()
            self._reset_options()
            return obs
        raise _first_of(failed)

    def close(self) -> None:
        """Takes in a step that is under way, closes the envs and ends their processes, within the close deadline."""
        self._envs.close()
        self.waiting, self.closed = False, True

    # Asking ----------------------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """Reads an attribute of envs, also one of an env that is wrapped; one value an env."""
        return _results([handle.get(attr_name) for handle in self._handles(indices)])

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        """Writes one value to an attribute of envs: of the outermost wrapper, where there is one."""
        _results([handle.set(attr_name, value) for handle in self._handles(indices)])

    def env_method(
        self, method_name: str, *method_args: Any, indices: int | Iterable[int] | None = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of envs side by side; one value an env."""
        return _results([handle.call(method_name, *method_args, **method_kwargs) for handle in self._handles(indices)])

    def has_attr(self, attr_name: str) -> bool:
        """Whether all envs have an attribute."""
        return all(self.env_method("envactors_has", attr_name))

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        """Whether envs are wrapped in a wrapper of that class."""
        name = wrapper_class.__module__, wrapper_class.__qualname__
        return self.env_method("envactors_is_wrapped", *name, indices=indices)

    def get_images(self) -> Sequence[Any]:
        """The frames of all envs; None each, with a warning, where the render mode is another than ``"rgb_array"``."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"the render mode is {self.render_mode!r}: images are had with render_mode='rgb_array' alone",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.env_method("render")

    def _handles(self, indices: int | Iterable[int] | None) -> list[ActorHandle]:
        return [self._envs[index] for index in self._get_indices(indices)]


def _ended(info: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The infos of an episode's end and of the reset after it, out of what the facade gives for both."""
    reset_info = {**info}
    cut, last = reset_info.pop("TimeLimit.truncated"), reset_info.pop("final_info", {})
    # A failed step has no info of its own: the one that is given is the step's before.
    ending = {"failure": reset_info.pop("failure")} if "failure" in info else {**last}
    ending["TimeLimit.truncated"] = cut
    if "final_obs" in info:
        ending["terminal_observation"] = reset_info.pop("final_obs")
    return ending, reset_info


def _backend(start_method: str | None) -> str | Backend:
    if start_method is None:
        start_method = os.environ.get("DEFAULT_START_METHOD")
    if start_method is None:
        return "process"
    multiprocessing.get_context(start_method)  # refuses what there is not, in the words that users know
    return ProcessBackend(start_method=start_method)  # type: ignore[arg-type] # just checked


def _results(futures: list[ActorFuture]) -> list[Any]:
    """The results of all; all are waited for, and the first failure is raised."""
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def _first_of(error: VectorStepError) -> BaseException:
    """What the first env that failed has raised."""
    return next(iter(error.failures.values()))
