"""The envs of one worker, and what can be asked of them."""

from __future__ import annotations

import copy
import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from envactors.arrays.specs import OBJECT, ArraySpec, Spec, conform, spec_of_space, spec_of_value
from envactors.wire import registry
from envactors.wire.messages import Adopt, Call, Close, Describe, Description, Get, Reset, Set, Start, Step, Transition
from envactors.wire.pickling import dumps, loads
from envactors.worker.context import ActorContext, enter

_MISSING = object()


class Seat:
    """One env and what its host knows of it."""

    def __init__(self, env: Any, context: ActorContext) -> None:
        self.env = env
        self.take(context)
        self.spec = _space_spec(env, "observation_space")
        self.reward_spec = _space_spec(env, "reward_space") or ArraySpec((), np.dtype(np.float64))
        self.plain_reward = self.reward_spec == ArraySpec((), np.dtype(np.float64))
        self.was_reset = False
        self.needed_by_reset = _needed_by(env, "reset", ("seed", "options"))
        # Over all observations since the last seeded reset, where it is kept.
        self.check = 0

    def take(self, context: ActorContext) -> None:
        """Says which env it is."""
        self.context = context
        self.index = context.index
        # Named once: this is on the way of every step.
        self.observation_name = f"the observation of env {self.index}"


class Host:
    """Runs the envs of one worker.

    Args:
        start: What to make.
        incarnation: Which of the actor's processes this is.
        resetting: Called when a step goes over into a reset, which has a deadline of its own.
        made: Called with the number of envs that are made, while there are more to make.

    Attributes:
        seats: Its envs.
        journals: Whether checksums are kept.
        check: The checksum of the env that was reset or stepped last by a message.
    """

    def __init__(
        self, start: Start, incarnation: int, resetting: Callable[[], None], made: Callable[[int], None]
    ) -> None:
        self._incarnation = incarnation
        self._resetting = resetting
        self.journals = start.journal
        self.check = 0
        self.seats: list[Seat] = []
        for offset, factory in enumerate(start.factories):
            context = ActorContext(start.name, start.first + offset, incarnation)
            enter(context)
            if offset:
                made(offset)
            make = loads(factory)
            if not offset:
                registry.install(*start.registrations)
            self.seats.append(Seat(make(), context))
        self._made = self.seats

    def adopt(self, message: Adopt, incarnation: int) -> None:
        """Makes the envs those of an actor that needs them; any that it has no use for wait to be closed."""
        self._incarnation = incarnation
        self.seats = self._made[: message.envs]
        for offset, seat in enumerate(self.seats):
            seat.take(ActorContext(message.name, message.first + offset, incarnation))
            enter(seat.context)

    def _enter(self, position: int) -> Seat:
        seat = self.seats[position]
        enter(seat.context)
        return seat

    def call(self, message: Call) -> Any:
        """Calls a method of an env."""
        method = find(self._enter(message.env).env, message.method)
        if message.or_get and not callable(method):
            return method
        return method(*message.args, **message.kwargs)

    def get(self, message: Get) -> Any:
        """Reads an attribute of an env."""
        return find(self._enter(message.env).env, message.name)

    def set(self, message: Set) -> None:
        """Writes an attribute of an env."""
        env = self._enter(message.env).env
        # A drop-in's own way goes first: the env's method of that name may be called as well, and does another thing.
        setter = getattr(env, "envactors_set", None) or getattr(env, "set_wrapper_attr", None)
        if callable(setter):
            setter(message.name, message.value)
        else:
            setattr(env, message.name, message.value)

    def describe(self, message: Describe) -> Description:
        """Says what an env's values look like, as far as its spaces tell."""
        seat = self._enter(message.env)
        env = seat.env
        metadata = getattr(env, "metadata", None)
        render_mode = getattr(env, "render_mode", None)
        return Description(
            seat.spec,
            _space_spec(env, "action_space"),
            seat.reward_spec,
            dict(metadata) if isinstance(metadata, dict) else {},
            render_mode if isinstance(render_mode, str) else None,
        )

    def reset(self, message: Reset) -> Transition:
        """Resets an env."""
        seat = self._enter(message.env)
        obs, info = self.reset_seat(seat, message.seed, message.options, message.root_seed)
        self.check = seat.check
        return Transition(obs, 0.0, False, False, info)

    def step(self, message: Step) -> Transition:
        """Steps an env; with autoreset an ended episode's successor is begun (Gymnasium's ``SAME_STEP``)."""
        seat = self._enter(message.env)
        obs, reward, terminated, truncated, info = self.advance(
            seat, message.action, message.autoreset, message.root_seed, self._resetting
        )
        self.check = seat.check
        return Transition(obs, reward, bool(terminated), bool(truncated), info)

    def advance(
        self, seat: Seat, action: Any, autoreset: bool, root_seed: int | None, resetting: Callable[[], None]
    ) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env of a seat; gives a `Transition`'s fields, and calls ``resetting`` on the way to a reset.

        What the env gives is checked and converted, but for the flags, of which only the truth counts.
        """
        result = seat.env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError(
                f"step of env {seat.index} returned {_shape_of(result)}: "
                "expected (obs, reward, terminated, truncated, info)"
            )
        obs, reward, terminated, truncated, info = result
        spec = seat.spec
        # What `conform` does with a value that fits already; the call alone takes as long as many a step.
        if (
            type(obs) is not np.ndarray
            or not isinstance(spec, ArraySpec)
            or obs.dtype is not spec.dtype
            or obs.shape != spec.shape
        ):
            obs = self._conform(seat, obs)
        if self.journals:
            seat.check = checksum(obs, seat.check)
        if autoreset and (terminated or truncated):
            # As the env gave it, which is how Gymnasium hands it out; a copy, since the reset may fill the same arrays.
            last = copy.deepcopy(result[0])
            resetting()
            first, reset_info = self.reset_seat(seat, None, None, root_seed)
            obs, info = first, {**reset_info, "final_obs": last, "final_info": info}
        if type(reward) is not float:
            # NumPy's float64 is a float.
            reward = float(reward) if seat.plain_reward and isinstance(reward, float) else _as_reward(seat, reward)
        return obs, reward, terminated, truncated, info

    def close(self, _message: Close) -> None:
        """Closes the envs, all of them even if some raise.

        Raises:
            Exception: The first that an env's ``close`` raised.
        """
        first: Exception | None = None
        for seat in self._made:
            enter(seat.context)
            closer = getattr(seat.env, "close", None)
            try:
                if callable(closer):
                    closer()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def reset_seat(
        self, seat: Seat, seed: int | None, options: dict[str, Any] | None, root_seed: int | None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the env of a seat; gives its observation and its info."""
        if seed is None and root_seed is not None and self._incarnation > 0 and not seat.was_reset:
            seed = renewed_seed(root_seed, self._incarnation)
        kwargs = {
            name: value
            for name, value in (("seed", seed), ("options", options))
            if value is not None or name in seat.needed_by_reset
        }
        result = seat.env.reset(**kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset of env {seat.index} returned {_shape_of(result)}: expected (obs, info)")
        seat.was_reset = True
        obs = self._conform(seat, result[0])
        if self.journals:
            seat.check = checksum(obs, 0 if seed is not None else seat.check)
        return obs, result[1]

    def _conform(self, seat: Seat, obs: Any) -> Any:
        if seat.spec is None:
            seat.spec = spec_of_value(obs)
        return conform(seat.spec, obs, seat.observation_name)


def checksum(obs: Any, before: int) -> int:
    """A checksum over an observation and those before it."""
    if isinstance(obs, dict):
        obs = tuple(obs.values())
    if isinstance(obs, tuple):
        return functools.reduce(lambda check, part: checksum(part, check), obs, before)
    if isinstance(obs, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(obs).data, before)
    return zlib.crc32(dumps(obs), before)


def find(env: Any, name: str) -> Any:
    """Finds an attribute of an env, also one that Gymnasium's wrappers hide.

    Raises:
        AttributeError: Neither the env nor one that it wraps has it.
    """
    value = getattr(env, name, _MISSING)
    if value is not _MISSING:
        return value
    getter = getattr(env, "get_wrapper_attr", None)
    if callable(getter):
        return getter(name)
    return getattr(env, name)


def renewed_seed(root_seed: int, incarnation: int) -> int:
    """The seed of a renewed env's first reset: distinct for each incarnation, the same in every run."""
    return int(np.random.SeedSequence(root_seed, spawn_key=(incarnation,)).generate_state(1)[0])


def _space_spec(env: Any, name: str) -> Spec | None:
    space = getattr(env, name, None)
    if space is None:
        return None
    spec = spec_of_space(space)
    return None if spec is OBJECT and not hasattr(space, "sample") else spec


def _needed_by(env: Any, method: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Which of these parameters a method of an env has without a default."""
    try:
        parameters = inspect.signature(getattr(env, method)).parameters
    except (AttributeError, TypeError, ValueError):
        return ()
    return tuple(name for name in names if name in parameters and parameters[name].default is inspect.Parameter.empty)


def _as_reward(seat: Seat, reward: Any) -> Any:
    if seat.plain_reward:
        if isinstance(reward, np.ndarray) and reward.size == 1:
            reward = reward.reshape(())
        return float(conform(seat.reward_spec, reward, f"the reward of env {seat.index}"))
    return conform(seat.reward_spec, reward, f"the reward of env {seat.index}")


def _shape_of(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
