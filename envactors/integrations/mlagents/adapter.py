"""The adapter around an ML-Agents env in its worker. It imports ``mlagents_envs`` only when an env is created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envactors.integrations.adapter import EnvAdapter


class UnityEnvAdapter(EnvAdapter):
    """An env with the semantics of ML-Agents and the side channels of its workers.

    Args:
        factory: Creates the env, given its worker id and its side channels.
        worker_id: Worker id of the env.
        engine: Engine configuration, an ``EngineConfig``.
        is_inline: Whether it runs in the thread of the caller, whose timers measure it.
    """

    def __init__(self, factory: Callable[[int, list[Any]], Any], worker_id: int, engine: Any, is_inline: bool) -> None:
        from mlagents_envs import timers
        from mlagents_envs.side_channel.engine_configuration_channel import EngineConfigurationChannel
        from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
        from mlagents_envs.side_channel.float_properties_channel import FloatPropertiesChannel
        from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

        self._timers = None if is_inline else timers
        self._parameters, self._stats = EnvironmentParametersChannel(), StatsSideChannel()
        self._properties = FloatPropertiesChannel()
        self._sent: dict[str, float] = {}
        configuration = EngineConfigurationChannel()
        configuration.set_configuration(engine)
        channels = [self._parameters, configuration, self._stats, self._properties]
        super().__init__(lambda: factory(worker_id, channels))

    def envactors_send(self, parameters: dict[str, Any]) -> None:
        """Send parameters: numbers, or objects such as samplers with ``apply(name, channel)``."""
        for name, value in parameters.items():
            if hasattr(value, "apply"):
                value.apply(name, self._parameters)
            else:
                self._parameters.set_float_parameter(name, value)
                self._sent[name] = value

    def envactors_properties(self) -> dict[str, float]:
        """Return the numbers that the caller sent and the properties that the env sent."""
        return {**self._sent, **self._properties.get_property_dict_copy()}

    def envactors_behaviors(self) -> dict[str, Any]:
        """Return the specs of the behaviors that are known so far."""
        return dict(self._env.behavior_specs)

    def reset(self, parameters: dict[str, Any]) -> dict[str, Any]:
        self.envactors_send(parameters)
        self._env.reset()
        return self._results()

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Step with actions by behavior; return steps by behavior, own timers since the last step, and stats."""
        for name, action in actions.items():
            self._env.set_actions(name, action)
        self._env.step()
        results, times = self._results(), None
        if self._timers is not None:
            times = self._timers.get_timer_root()
            self._timers.reset_timers()
        return results, times, self._stats.get_and_reset_stats()

    def _results(self) -> dict[str, Any]:
        return {name: self._env.get_steps(name) for name in self._env.behavior_specs}
