"""OpenEnv environments that fail on request; workers import this module."""

from __future__ import annotations

import collections
import itertools
import os
import signal

from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class Order(Action):
    """The requested action."""

    text: str


class Report(Observation):
    """The observation."""

    text: str = ""
    pid: int = 0


class Robot(Environment):
    """Does what the action says, even if that ends its process."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="none", step_count=0)

    def reset(self, seed=None, episode_id=None):
        self._state = State(episode_id=episode_id or f"seed {seed}", step_count=0)
        return Report(text="ready", pid=os.getpid())

    def step(self, action, timeout_s=None):
        self._state.step_count += 1
        if action.text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif action.text == "hang":
            collections.deque(itertools.repeat(0), maxlen=0)
        elif action.text == "fail":
            raise ValueError("the robot refuses")
        return Report(text=action.text, pid=os.getpid(), reward=1.0)

    @property
    def state(self):
        return self._state


class PatientRobot(Robot):
    """Has asynchronous methods of its own."""

    async def step_async(self, action, timeout_s=None):
        return self.step(action)


class Toolbox(MCPEnvironment):
    """Counts the calls of its tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("toolbox")
        self.count = 0

        @server.tool
        def add(n: int) -> int:
            """Add to the count."""
            self.count += n
            return self.count

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State(episode_id="tools", step_count=self.count)


def make_robot():
    """Makes a robot without saying so in an annotation."""
    return Robot()
