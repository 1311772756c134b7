"""An OpenEnv environment with bugs: some pulls crash, some hang, and each episode leaks."""

import ctypes
import random
import time

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

LEAKED = []  # what its episodes leave behind


class Pull(Action):
    """Which arm to pull."""

    arm: int


class Payout(Observation):
    """What is left of the episodes before this one, in MB."""

    leaked: int = 0


class Bandit(Environment):
    """Arms of which the last one pays best; some pulls crash, and some hang."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._rng = random.Random()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None):
        self._rng.seed(seed)
        self._state = State(episode_id=episode_id, step_count=0)
        leaked = len(LEAKED)
        LEAKED.append(bytes(1 << 20))
        return Payout(leaked=leaked)

    def step(self, action, timeout_s=None):
        self._state.step_count += 1
        luck = self._rng.random()
        if luck < 0.02:
            ctypes.string_at(0)  # a segmentation fault
        if luck > 0.99:
            time.sleep(1000)
        return Payout(reward=float(self._rng.random() < (action.arm + 1) / 5), done=self._state.step_count == 5)

    @property
    def state(self):
        return self._state
