"""What drop-ins run in the worker, around its env; imports no framework, so that workers stay as small as their envs.

Names begin with ``envactors_`` where the env's own methods must not be hidden. ``envactors_set`` is what writes an
attribute where a framework does not write it as Gymnasium's wrappers do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from envactors.errors import VectorInputError
from envactors.worker.context import current_actor


class Guest:
    """An env, seen through; subclasses add what their framework asks of it.

    Args:
        factory: Makes the env.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        return self._env.step(action)


class StableBaselinesGuest(Guest):
    """An env as stable-baselines3 treats it."""

    def envactors_set(self, name: str, value: Any) -> None:
        """Writes to the outermost wrapper, as there."""
        setattr(self._env, name, value)

    def envactors_has(self, name: str) -> bool:
        """Whether the env, or one that it wraps, has an attribute; its value need not pickle."""
        if hasattr(self._env, name):
            return True
        try:
            self._env.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def envactors_is_wrapped(self, module: str, qualname: str) -> bool:
        """Whether one of Gymnasium's wrappers around the env is of a class, or derived from it.

        The class comes by its name: to send it would have the worker import its module, and with it perhaps torch.
        """
        gymnasium = sys.modules.get("gymnasium")
        env = self._env
        while gymnasium is not None and isinstance(env, gymnasium.Wrapper):
            if any((base.__module__, base.__qualname__) == (module, qualname) for base in type(env).__mro__):
                return True
            env = env.env
        return False


class TianshouGuest(Guest):
    """An env as tianshou treats it."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        super().__init__(factory)
        context = current_actor()
        self._needs_reset = context is not None and context.incarnation > 0

    def reset(self, **kwargs: Any) -> Any:
        self._needs_reset = False
        return self._env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self._needs_reset:
            raise VectorInputError(
                "step of an env whose process was replaced, with its episode: it needs a reset first"
            )
        return self._env.step(action)

    def envactors_set(self, name: str, value: Any) -> None:
        """Writes to the innermost env, as there."""
        setattr(self._env.unwrapped, name, value)

    def render(self, **kwargs: Any) -> Any:
        return self._env.render(**kwargs) if hasattr(self._env, "render") else None

    def envactors_seed(self, seed: int | None) -> Any:
        """Seeds by the env's own ``seed``, or where it has none its actions and, by a reset, the env."""
        if hasattr(self._env, "seed"):
            return self._env.seed(seed)
        self._env.action_space.seed(seed=seed)
        self.reset(seed=seed)
        return None


class UnityGuest(Guest):
    """An env as ML-Agents treats it, with the side channels that its worker has there.

    Args:
        factory: Makes the env, from its number and its side channels.
        worker_id: Its number.
        engine: The engine's configuration, an ``EngineConfig``.
    """

    def __init__(self, factory: Callable[[int, list[Any]], Any], worker_id: int, engine: Any) -> None:
        from mlagents_envs import timers
        from mlagents_envs.side_channel.engine_configuration_channel import EngineConfigurationChannel
        from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
        from mlagents_envs.side_channel.float_properties_channel import FloatPropertiesChannel
        from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

        self._timers = timers
        self._parameters, self._stats, self._properties = (
            EnvironmentParametersChannel(),
            StatsSideChannel(),
            FloatPropertiesChannel(),
        )
        self._sent: dict[str, float] = {}
        configuration = EngineConfigurationChannel()
        configuration.set_configuration(engine)
        channels = [self._parameters, configuration, self._stats, self._properties]
        super().__init__(lambda: factory(worker_id, channels))

    def envactors_send(self, parameters: dict[str, Any]) -> None:
        """Sends parameters: numbers, and objects such as samplers that know how to send themselves."""
        for name, value in parameters.items():
            if hasattr(value, "apply"):
                value.apply(name, self._parameters)
            else:
                self._parameters.set_float_parameter(name, value)
                self._sent[name] = value

    def envactors_properties(self) -> dict[str, float]:
        """The numbers that were sent, and what the env says of itself."""
        return {**self._sent, **self._properties.get_property_dict_copy()}

    def envactors_behaviors(self) -> dict[str, Any]:
        """The specs of the behaviors that there are by now."""
        return dict(self._env.behavior_specs)

    def reset(self, parameters: dict[str, Any]) -> dict[str, Any]:
        self.envactors_send(parameters)
        self._env.reset()
        return self._results()

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Steps with the actions of each behavior; gives its steps, the timers' tree, which begins anew, and stats."""
        for name, action in actions.items():
            self._env.set_actions(name, action)
        self._env.step()
        reply = self._results(), self._timers.get_timer_root(), self._stats.get_and_reset_stats()
        self._timers.reset_timers()
        return reply

    def _results(self) -> dict[str, Any]:
        return {name: self._env.get_steps(name) for name in self._env.behavior_specs}


def guests(guest: Callable[[Callable[[], Any]], Guest], factories: Iterable[Callable[[], Any]]) -> list[Any]:
    """Makes factories of guests; one and the same factory stays one, as standbys need it."""
    made: dict[int, Any] = {}
    return [made.setdefault(id(factory), functools.partial(guest, factory)) for factory in list(factories)]
