"""The own classes that replace those of the package ``mlagents``, and the error if ``mlagents_envs`` is missing."""

from __future__ import annotations

import logging
import queue

import pytest

from envactors.integrations.mlagents.training import ActionInfo, EnvironmentStep, EnvManager


class Scripted(EnvManager):
    """A manager of two envs whose steps are made up."""

    def __init__(self):
        super().__init__()
        self.resets, self.steps = [], 0

    def _results(self, worker_id, infos):
        return EnvironmentStep({"a": ("decisions", "terminals")}, worker_id, infos, {"speed": [(1.5, "mean")]})

    def _reset_env(self, config=None):
        self.resets.append(config)
        return [self._results(worker_id, {}) for worker_id in range(2)]

    def _step(self):
        self.steps += 1
        return [self._results(0, {"a": ActionInfo("out", "action", {}, [7])})]

    def set_env_parameters(self, config=None):
        self.resets.append(config)

    @property
    def training_behaviors(self):
        return {"a": "spec"}

    def close(self):
        self.steps = None


class Agents:
    """An agent manager that notes what it is told."""

    def __init__(self):
        self.told, self.policy, self.policy_queue = [], None, queue.Queue()

    def end_episode(self):
        self.told.append("end")

    def add_experiences(self, *experiences):
        self.told.append(experiences)

    def record_environment_stats(self, *stats):
        self.told.append(stats)


@pytest.fixture
def manager():
    manager = Scripted()
    manager.set_agent_manager("a", Agents())
    return manager


STATS = {"speed": [(1.5, "mean")]}


def test_the_steps_of_a_reset_are_passed_on_before_the_first_steps(manager):
    assert manager.reset({"gravity": 1.0}) == 2
    assert manager.resets == [{"gravity": 1.0}]
    told = manager.agent_managers["a"].told
    assert told == ["end"]
    steps = manager.get_steps()
    nothing = ActionInfo.empty()
    assert told[1:] == [
        ("decisions", "terminals", 0, nothing),
        (STATS, 0),
        ("decisions", "terminals", 1, nothing),
        (STATS, 1),
    ]
    del told[:]
    assert manager.process_steps(steps) == 1
    assert told == [("decisions", "terminals", 0, ActionInfo("out", "action", {}, [7])), (STATS, 0)]
    manager.get_steps()
    assert len(told) == 2


def test_the_newest_policy_is_taken_over(manager):
    agents = manager.agent_managers["a"]
    for policy in ("old", "new"):
        agents.policy_queue.put(policy)
    manager.get_steps()
    assert (manager.policies, agents.policy) == ({"a": "new"}, "new")
    manager.get_steps()
    assert (manager.policies, agents.policy) == ({"a": "new"}, "new")


def test_a_policy_may_be_set_before_its_agent_manager(manager):
    manager.set_policy("b", "policy")
    assert manager.policies == {"b": "policy"}


def test_steps_of_a_behavior_without_an_agent_manager_are_dropped_with_a_warning(manager, caplog):
    del manager.agent_managers["a"]
    with caplog.at_level(logging.WARNING):
        assert manager.process_steps(manager.get_steps()) == 1
    assert "dropping the steps of behavior a, which has no agent manager" in caplog.text


def test_an_empty_step():
    step = EnvironmentStep.empty(3)
    assert (step.worker_id, list(step.name_behavior_ids), step.brain_name_to_action_info) == (3, [], {})
