"""The envs of one worker: make them, step and reset them, and run all other requests on them.

Where requests come from and how results travel is in `envactors.worker.main` and `envactors.worker.env_rows`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import multiprocessing
import pickle
import platform
import sys
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from envactors.mailbox import messages, registry
from envactors.mailbox.control_page import ENV_INDEX, METHOD_CALL, METHOD_RESET, METHOD_STEP, ControlPage
from envactors.mailbox.pickling import content_of, copy_value, dumps, loads, pickle_argument, safe_traceback
from envactors.mailbox.recorded import requests_of
from envactors.mailbox.slab import PLAIN_REWARD
from envactors.mailbox.specs import (
    OBJECT,
    Spec,
    as_float64,
    conform,
    conform_to_first,
    spec_of_space,
    spec_of_value,
    zeros,
)
from envactors.worker.context import ActorContext

# The observation, the reward, whether the episode terminated or was truncated, and the info. Making a named tuple would
# take as long as the rest of a step.
Fields: TypeAlias = tuple[Any, Any, Any, Any, Any]

_log = logging.getLogger("envactors")

_REPEATED_METHODS = {messages.Reset: METHOD_RESET, messages.Step: METHOD_STEP}


class HostedEnv:
    """An env inside a worker.

    Args:
        env: The env.
        position: Its position in the actor.
        context: The context of its actor.
        page: The control page, on which a reset within a step is recorded.
        journal: Whether to compute a checksum over its observations.
        reports_seeds: Whether the infos of resets contain their seeds.

    Attributes:
        context: What `envactors.current_actor` returns in its code.
        index: Its index in the vector.
        checksum: The checksum over all observations since its last seeded reset; 0 without ``journal``.
        dtype, shape: Those of an observation that is one array, else None.
    """

    def __init__(
        self, env: Any, position: int, context: ActorContext, page: ControlPage, journal: bool, reports_seeds: bool
    ) -> None:
        self.env = env
        self.position = position
        self.journal = journal
        self.identify(context)
        self._set_spec(_space_spec(env, "observation_space"))
        self.reward_spec: Spec = as_float64(_space_spec(env, "reward_space") or PLAIN_REWARD)
        self.checksum: int = 0
        self._page = page
        self._reports_seeds = reports_seeds
        # Whether the spec of observations follows from the first one.
        self._learns = False
        # Whether rewards are plain floats.
        self._plain_reward = self.reward_spec == PLAIN_REWARD
        # The parameters without defaults of its `reset`.
        self._needed_by_reset = _needed_by_reset(env)

    def identify(self, context: ActorContext) -> None:
        """Assign the env to an actor."""
        self.context: ActorContext | None = context
        self.index: int = context.index
        # For error messages; made once rather than in every step.
        self._observation_name = f"the observation of env {self.index}"

    def step(self, action: Any, resets_within_step: bool, next_seed: int | None) -> Fields:
        """Step the env; check and convert what it returns, except for the flags.

        Args:
            action: The action; the env may modify it.
            resets_within_step: Whether a step that ends the episode also resets the env (Gymnasium's ``SAME_STEP``).
            next_seed: The seed of such a reset; None lets the env choose.
        """
        return self.take(self.env.step(action), resets_within_step, next_seed)

    def take(self, result: Any, resets_within_step: bool, next_seed: int | None) -> Fields:
        """Continue a `step` whose env has returned ``result``."""
        if not isinstance(result, tuple) or len(result) != 5:
            raise wrong_result(f"step of env {self.index}", result, "(obs, reward, terminated, truncated, info)")
        obs, reward, terminated, truncated, info = result
        # `conform` checks the same, but calling it takes as long as a light step.
        if type(obs) is not np.ndarray or obs.dtype != self.dtype or obs.shape != self.shape:
            obs = self._conform(obs)
        if self.journal:
            self.checksum = checksum(obs, self.checksum)
        if type(reward) is not float:
            # NumPy's float64 is a float.
            reward = float(reward) if self._plain_reward and isinstance(reward, float) else self._as_reward(reward)
        if resets_within_step and (terminated or truncated):
            if self._page.is_timing:
                self._page.record_span(self.position)
            # From here on this counts as a reset, so that an error of copying tells that the episode has ended.
            self._page.record_env(METHOD_RESET, self.position)
            # Not converted, as with Gymnasium; copies, since the reset may change the same arrays and dicts.
            last, reward, terminated, truncated, info = copy_value((result[0], reward, *result[2:]))
            obs, _, _, _, reset_info = self.reset(next_seed, None)
            info = {**reset_info, "final_obs": last, "final_info": info}
        return obs, reward, terminated, truncated, info

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Fields:
        """Reset the env; check and convert what it returns.

        Args:
            seed: The seed; None lets the env choose.
            options: The options, None for none.
        """
        given: dict[str, Any] = {}
        if seed is not None or "seed" in self._needed_by_reset:
            given["seed"] = seed
        if options is not None or "options" in self._needed_by_reset:
            given["options"] = options
        result = self.env.reset(**given)
        if not isinstance(result, tuple) or len(result) != 2:
            raise wrong_result(f"reset of env {self.index}", result, "(obs, info)")
        obs = result[0]
        if type(obs) is not np.ndarray or obs.dtype != self.dtype or obs.shape != self.shape:
            obs = self._conform(obs)
        if self.journal:
            self.checksum = checksum(obs, 0 if seed is not None else self.checksum)
        info = result[1]
        if self._reports_seeds and isinstance(info, dict):
            info = {**info, "episode_seed": seed}
        return obs, 0.0 if self._plain_reward else zeros(self.reward_spec), False, False, info

    def _set_spec(self, spec: Spec | None) -> None:
        self.spec = spec
        self.dtype: Any | None = getattr(spec, "dtype", None)
        self.shape: Any | None = getattr(spec, "shape", None)

    def _conform(self, obs: Any) -> Any:
        if self.spec is None:
            self._set_spec(spec_of_value(obs))
            self._learns = True
        assert self.spec is not None, "just set"
        if self._learns:
            return conform_to_first(self.spec, obs, self._observation_name, self.index)
        return conform(self.spec, obs, self._observation_name)

    def _as_reward(self, reward: Any) -> Any:
        if self._plain_reward and isinstance(reward, np.ndarray) and reward.size == 1:
            reward = reward.reshape(())
        reward = conform(self.reward_spec, reward, f"the reward of env {self.index}")
        return float(reward) if self._plain_reward else reward


def wrong_result(method: str, result: Any, expected: str) -> TypeError:
    """Return the error for a result of an env's method that is not the expected tuple."""
    given = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    return TypeError(f"{method} returned {given}: expected {expected}")


class Host:
    """Makes the envs of one worker and runs all requests that are neither steps nor resets.

    Args:
        page: The control page, on which the env that runs is recorded.

    Attributes:
        hosted_envs: The actor's envs.
    """

    def __init__(self, page: ControlPage) -> None:
        self.hosted_envs: list[HostedEnv] = []
        # All envs that were made; `hosted_envs` has fewer of them after `adopt` by an actor with fewer envs.
        self._made: list[HostedEnv] = []
        # One per env that is made, or being made.
        self._contexts: list[ActorContext] = []
        # Return and set the state of an env; None without snapshots.
        self._snapshot: tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None = None
        self._page = page

    def running(self) -> ActorContext | None:
        """Return the context of the env that runs or ran last; None before the first."""
        return self._contexts[self._page.counters[ENV_INDEX]] if self._contexts else None

    def start(self, message: messages.Start, incarnation: int, on_made: Callable[[int], None]) -> None:
        """Make the envs.

        Args:
            message: The request that has the factories.
            incarnation: The incarnation of this process.
            on_made: Called with the count of envs that are made, while there is more to make or to unpickle.
        """
        if message.authkey is not None:
            multiprocessing.current_process().authkey = message.authkey  # factories may have proxies of a manager
        for offset, factory in enumerate(message.factories):
            self._contexts.append(ActorContext(message.name, message.first + offset, incarnation))
            self._page.record_env(METHOD_CALL, offset)
            if offset:
                on_made(offset)
            make = _load_factory(factory)
            if not offset:  # the factory may have imported Gymnasium
                registry.install(*message.registrations)
            options = message.journal, message.seed_episodes
            self._made.append(HostedEnv(make(), offset, self._contexts[offset], self._page, *options))
        self.hosted_envs = self._made
        if message.snapshot is not None:
            on_made(len(self._made))  # from here on, no factory is to blame
            self._snapshot = loads(message.snapshot)

    def adopt(self, name: str, first: int, envs: int, incarnation: int) -> None:
        """Assign the envs to the actor that adopts this process; surplus envs are closed with the others."""
        self.hosted_envs = self._made[:envs]
        for offset, hosted in enumerate(self.hosted_envs):
            self._contexts[offset] = ActorContext(name, first + offset, incarnation)
            hosted.identify(self._contexts[offset])

    # The parameters of what follows are the fields of the message of the same name.

    def call(self, env: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], or_get: bool = False) -> Any:
        """Call a method of an env."""
        found = find(self._choose(env).env, method)
        if or_get and not callable(found):
            return found
        return found(*args, **kwargs)

    def get(self, env: int, name: str) -> Any:
        """Read an attribute of an env, with the method of its adapter if that has one."""
        target = self._choose(env).env
        return getattr(type(target), "envactors_get", find)(target, name)

    def set(self, env: int, name: str, value: Any) -> None:
        """Write an attribute of an env."""
        target = self._choose(env).env
        # The method of an env adapter goes first: the env may have a `set_wrapper_attr` that does something else.
        setter = getattr(target, "envactors_set", None) or getattr(target, "set_wrapper_attr", None)
        (setter or functools.partial(setattr, target))(name, value)

    def describe(self, env: int) -> messages.Description:
        """Return the specs that an env's spaces define, its metadata, and its render mode."""
        hosted = self._choose(env)
        target = hosted.env
        metadata, render_mode = getattr(target, "metadata", None), getattr(target, "render_mode", None)
        return messages.Description(
            hosted.spec,
            _space_spec(target, "action_space"),
            hosted.reward_spec,
            dict(metadata) if isinstance(metadata, dict) else {},
            render_mode if isinstance(render_mode, str) else None,
        )

    def close(self) -> None:
        """Close all envs, even if some raise: nobody waits for these exceptions, so they are logged."""
        for hosted in self._made:
            self._page.record_env(METHOD_CALL, hosted.position)
            try:
                if callable(close := getattr(hosted.env, "close", None)):
                    close()
            except (Exception, SystemExit) as error:
                trace, who = "".join(safe_traceback(error)).rstrip(), self._contexts[hosted.position]
                where = {"actor": who.name, "env_id": who.index, "incarnation": who.incarnation}
                _log.warning("close of env %d of actor %r has raised\n%s", who.index, who.name, trace, extra=where)

    def forget_envs(self) -> None:
        """Drop all references to the envs."""
        self._made, self.hosted_envs, self._snapshot = [], [], None

    def save(self, env: int) -> tuple[int, bytes]:
        """Return the checksum over an env's observations, and its state."""
        assert self._snapshot is not None, "the parent checks"
        hosted = self._choose(env)
        state = self._snapshot[0](hosted.env)
        return hosted.checksum, bytes(pickle_argument(f"env {hosted.index}'s state", state, dumps))

    def restore(self, env: int, checksum: int, state: bytes) -> None:
        """Put an env into a state that `save` has returned."""
        assert self._snapshot is not None, "the parent checks"
        hosted = self._choose(env)
        self._snapshot[1](hosted.env, loads(state))
        hosted.checksum = checksum

    def replay(self, *fields: Any) -> tuple[bool]:
        """Repeat the journal of an env whose process has ended; return whether it has returned the same observations.

        Each entry is recorded on the control page, since each has its own deadline.
        """
        message = messages.Replay(*fields)
        hosted = self.hosted_envs[message.env]
        for payload in message.attributes:
            self._repeat(hosted, messages.Set(*loads(payload)))
        for request in requests_of(message):
            self._repeat(hosted, request)
        return (not message.entries or hosted.checksum == message.checksum,)

    def _repeat(self, hosted: HostedEnv, request: Any) -> None:
        method = _REPEATED_METHODS.get(type(request), METHOD_CALL)
        self._page.record_env(method, hosted.position)
        if method == METHOD_RESET:
            hosted.reset(request.seed, content_of(request.options))
        elif method == METHOD_STEP:
            with contextlib.suppress(Exception):  # under ``on_failure="raise"`` the episode continues after one
                hosted.step(content_of(request.action), request.resets_within_step, request.next_seed)
        elif isinstance(request, messages.Call):
            with contextlib.suppress(Exception):  # the call may have raised the first time, too
                self.call(*request)
        else:
            (self.set if isinstance(request, messages.Set) else self.restore)(*map(content_of, request))

    def _choose(self, position: int) -> HostedEnv:
        """Return the env that a request names, once the control page says that it runs."""
        self._page.counters[ENV_INDEX] = position
        return self.hosted_envs[position]


def _load_factory(pickled: bytes) -> Callable[[], Any]:
    """Unpickle a factory; if an import fails, name the interpreter that has tried it."""
    try:
        factory: Callable[[], Any] = pickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        error.args = (f"{error} (in {sys.executable}, Python {platform.python_version()})",)
        raise
    return factory


def checksum(obs: Any, before: int) -> int:
    """Return the checksum over an observation and, by their checksum ``before``, those before it."""
    if isinstance(obs, dict):
        obs = tuple(obs.values())
    if isinstance(obs, tuple):
        return functools.reduce(lambda check, part: checksum(part, check), obs, before)
    if isinstance(obs, np.ndarray) and not obs.dtype.hasobject:
        # NumPy does not export buffers of times, nor of records that have any.
        data = obs.tobytes() if obs.dtype.kind in "mMV" else np.ascontiguousarray(obs).data
        return zlib.crc32(data, before)
    return zlib.crc32(dumps(obs), before)


def find(env: Any, name: str) -> Any:
    """Return an attribute of an env, even one that Gymnasium's wrappers hide.

    Raises:
        AttributeError: Neither the env nor an env that it wraps has the attribute.
    """
    try:
        return getattr(env, name)
    except AttributeError:
        if not hasattr(env, "get_wrapper_attr"):
            raise
    return env.get_wrapper_attr(name)


def _space_spec(env: Any, name: str) -> Spec | None:
    space = getattr(env, name, None)
    if space is None:
        return None
    spec = spec_of_space(space)
    return None if spec is OBJECT and not hasattr(space, "sample") else spec


def _needed_by_reset(env: Any) -> set[str]:
    """Return the parameters without defaults of an env's ``reset``."""
    try:
        # Most envs have defaults for both, and making a signature takes long.
        defaults = getattr(env.reset, "__kwdefaults__", None) or {}
        parameters = inspect.signature(env.reset).parameters.values() if {"seed", "options"} - defaults.keys() else ()
    except (AttributeError, TypeError, ValueError):
        return set()
    return {parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty}
