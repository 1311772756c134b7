# ruff: noqa: RUF012
"""What the page for users of ML-Agents imports: an env that implements ``BaseEnv``, and a policy."""

import numpy as np
from mlagents_envs.base_env import (
    ActionSpec,
    ActionTuple,
    BaseEnv,
    BehaviorSpec,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalSteps,
)

from envactors.integrations.mlagents import ActionInfo

SEEN = ObservationSpec((1,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "place")
WALKER = BehaviorSpec([SEEN], ActionSpec(1, ()))


class Walk(BaseEnv):
    behavior_specs = {"Walker": WALKER}

    def __init__(self, worker_id, side_channels):
        self.reset()

    def reset(self):
        self.place = np.zeros(2, np.float32)  # two agents

    def set_actions(self, behavior_name, action):
        self.moves = action.continuous[:, 0]

    def set_action_for_agent(self, behavior_name, agent_id, action):
        self.moves[agent_id] = action.continuous[0, 0]

    def step(self):
        self.place = self.place + self.moves

    def get_steps(self, behavior_name):
        agents, groups = np.arange(2, dtype=np.int32), np.zeros(2, np.int32)
        decisions = DecisionSteps([self.place[:, None]], self.place, agents, None, groups, np.zeros(2, np.float32))
        return decisions, TerminalSteps.empty(WALKER)

    def close(self):
        pass


class Forwards:
    def get_action(self, decisions, worker_id):
        action = ActionTuple(continuous=np.ones((len(decisions), 1), np.float32))
        return ActionInfo(action, action, {}, decisions.agent_id)
