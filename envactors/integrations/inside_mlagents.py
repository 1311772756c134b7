"""What the drop-in for ML-Agents runs in the worker, around its env."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envactors.integrations.inside import Guest


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
