"""An env of ML-Agents that writes down what happens to it; workers import this module."""

from __future__ import annotations

from mlenvs import Field
from optionenvs import Witness


class Unity(Witness, Field):
    """A field of agents."""

    def __init__(self, log, worker_id, channels):
        Witness.__init__(self, log)
        Field.__init__(self, worker_id, channels)

    def reset(self):
        self.begin()
        super().reset()

    def step(self):
        self.act()
        super().step()
