"""Envs of the tests of ML-Agents' drop-in, after the real ``BaseEnv``; workers import this module."""

from __future__ import annotations

import collections
import ctypes
import itertools
import os
import signal
import time

import numpy as np
from mlagents_envs.base_env import (
    ActionSpec,
    BaseEnv,
    BehaviorSpec,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalSteps,
)
from mlagents_envs.exception import UnityTimeOutException
from mlagents_envs.side_channel import IncomingMessage, OutgoingMessage
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.float_properties_channel import FloatPropertiesChannel
from mlagents_envs.side_channel.stats_side_channel import StatsAggregationMethod, StatsSideChannel
from mlagents_envs.timers import hierarchical_timer, timed


def spec(size, continuous, branches):
    shape = ObservationSpec((size,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "all")
    return BehaviorSpec([shape], ActionSpec(continuous, branches))


RUNNER, CHASER, LATE = "Runner?team=0", "Chaser?team=1", "Late?team=0"


class Field(BaseEnv):
    """An env with two behaviors whose agents join and leave, and a third behavior that appears later.

    Runners leave after three steps (the second one of the first two after four), and others come in their places in the
    next; chasers stay, but only every second step asks them for a decision. Observations: the worker, the count of
    steps, the agent, and its last action.

    Args:
        worker_id: The env's number.
        channels: Its side channels.
        mishaps: A directory: a file ``worker.when.what`` in there has the worker misbehave when it steps, resets or
            starts; once, or always where the file has any text.
    """

    def __init__(self, worker_id, channels, mishaps=None):
        self.worker_id, self.mishaps = worker_id, mishaps
        self.channels = {type(channel): channel for channel in channels}
        self.messages = []  # what a Unity program would have received
        self.acted = []  # the behaviors that were given actions in the last step
        self.behaviors = {RUNNER: spec(4, 2, ()), CHASER: spec(4, 0, (3,))}
        self.is_reset = False
        self._mishap("start")

    # What UnityEnvironment does with channels, without the wire.
    def _exchange(self):
        for channel in self.channels.values():
            self.messages += [(type(channel), bytes(message)) for message in channel.message_queue]
            channel.message_queue.clear()
        self._receive(StatsSideChannel, "steps", float(self.count), StatsAggregationMethod.SUM.value)
        self._receive(FloatPropertiesChannel, f"of {self.worker_id}", 0.5 + self.worker_id)

    def _receive(self, kind, key, value, method=None):
        message = OutgoingMessage()
        message.write_string(key)
        message.write_float32(value)
        if method is not None:
            message.write_int32(method)
        self.channels[kind].on_message_received(IncomingMessage(message.buffer))

    @property
    def parameters(self):
        """The environment parameters that have arrived, in order."""
        found = []
        for kind, buffer in self.messages:
            if kind is EnvironmentParametersChannel:
                message = IncomingMessage(buffer)
                key, is_sampler = message.read_string(), message.read_int32()
                found.append((key, "sampler" if is_sampler else message.read_float32()))
        return found

    @property
    def engine(self):
        """The engine's configuration that has arrived: ``{which: values}``."""
        kinds = EngineConfigurationChannel.ConfigurationType
        found = {}
        for kind, buffer in self.messages:
            if kind is EngineConfigurationChannel:
                message = IncomingMessage(buffer)
                which = kinds(message.read_int32())
                if which is kinds.SCREEN_RESOLUTION:
                    found[which.name] = message.read_int32(), message.read_int32()
                else:
                    found[which.name] = message.read_float32() if which is kinds.TIME_SCALE else message.read_int32()
        return found

    def reset(self):
        self._mishap("reset")
        self.is_reset, self.count = True, 0
        self.runners = {1: 3, 2: 4}  # agent: the step in which it leaves
        self.next_runner = 3
        self.actions = {}
        self._exchange()
        self._observe()

    @timed
    def step(self):
        assert self.is_reset, "step before reset"
        self.acted = sorted(self.actions)
        self._mishap("step")
        with hierarchical_timer("simulate"):
            self.count += 1
            if self.count == 4:
                self.behaviors[LATE] = spec(4, 1, ())
        self._exchange()
        self._observe()
        self.actions = {}

    def _observe(self):
        leaving = [agent for agent, when in self.runners.items() if when == self.count]
        for agent in leaving:
            del self.runners[agent]
        steps = {RUNNER: (list(self.runners), leaving), CHASER: ([11, 12, 13] if self.count % 2 == 0 else [], [])}
        if LATE in self.behaviors:
            steps[LATE] = [21], []
        self.steps = {
            name: (
                self._batch(DecisionSteps, name, here, None),
                self._batch(TerminalSteps, name, gone, [True] * len(gone)),
            )
            for name, (here, gone) in steps.items()
        }
        for _ in leaving:  # one comes for each that leaves, and is seen in the next step
            self.runners[self.next_runner] = self.count + 3
            self.next_runner += 1

    def _batch(self, kind, name, agents, third):
        told = [float(self.actions.get(name, {}).get(agent, -1)) for agent in agents]
        obs = np.array([(self.worker_id, self.count, *pair) for pair in zip(agents, told, strict=True)], np.float32)
        rewards, groups = np.full(len(agents), 0.5, np.float32), np.zeros(len(agents), np.int32)
        ids = np.array(agents, np.int32)
        if kind is DecisionSteps:
            return kind([obs.reshape(-1, 4)], rewards, ids, third, groups, rewards)
        return kind([obs.reshape(-1, 4)], rewards, np.array(third, bool), ids, groups, rewards)

    def get_steps(self, behavior_name):
        return self.steps[behavior_name]

    @property
    def behavior_specs(self):
        return self.behaviors

    def set_actions(self, behavior_name, action):
        agents = self.steps[behavior_name][0].agent_id
        values = np.concatenate([action.continuous, action.discrete], axis=1)
        assert len(values) == len(agents) > 0
        self.actions[behavior_name] = {int(agent): value[0] for agent, value in zip(agents, values, strict=True)}

    def set_action_for_agent(self, behavior_name, agent_id, action):
        raise NotImplementedError

    def close(self):
        if self.mishaps is not None:
            self.mark("closed")

    def _mishap(self, when):
        for what, do in MISHAPS.items() if self.mishaps is not None else ():
            path = self.mishaps / f"{self.worker_id}.{when}.{what}"
            if path.exists():
                if not path.read_text():
                    path.unlink()
                do(self)

    def mark(self, what):
        (self.mishaps / f"{self.worker_id}.{what}").touch()


def _wait(env):
    env.mark("waits")
    while not (env.mishaps / f"{env.worker_id}.go").exists():
        time.sleep(0.002)


def _raise(error):
    raise error


def _hang(env):
    env.mark("hangs")
    collections.deque(itertools.repeat(0), maxlen=0)


MISHAPS = {
    "wait": _wait,
    "die": lambda env: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda env: ctypes.string_at(0),
    "exit": lambda env: os._exit(3),
    "stop": lambda env: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "complain": lambda env: _raise(UnityTimeOutException(f"no answer from {env.worker_id}")),
    "raise": lambda env: _raise(ZeroDivisionError(f"in {env.worker_id}")),
}
