"""The drop-in for ML-Agents: the behavior that its users rely on, with real faults and envs of its ``BaseEnv``.

Where the package ``mlagents`` is installed too, all of it runs on its own base class.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings

import numpy as np
import pytest
from helpers import SOON, clocked, is_gone, most_at_once, wait_for_path, wait_until
from interrupting import interrupt

import envactors as ea
from envactors.remote import LocalNodes

pytest.importorskip("mlagents_envs")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what protobuf says of its messages
    from mlagents_envs import timers
    from mlagents_envs.base_env import ActionTuple, DecisionSteps, TerminalSteps
    from mlagents_envs.exception import UnityTimeOutException
    from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig
    from mlagents_envs.side_channel.stats_side_channel import StatsAggregationMethod
    from mlenvs import CHASER, LATE, RUNNER, Field

    from envactors.integrations.mlagents import ActionInfo, ActorEnvManager, EnvironmentStep, EnvManager

ENGINE = EngineConfig(80, 60, 2, 20.0, -1, 30)
OFTEN = ea.RestartPolicy(max_restarts=100, backoff=0.0)
PATIENT = ea.Deadlines()  # on a busy machine anything may take a second
HANGING = ea.Deadlines(step=2.0, reset=2.0)


class Policy:
    """Policy that numbers its actions within the behavior's range and records its requests."""

    def __init__(self, name):
        self.name, self.numbers, self.asked = name, itertools.count(1), []

    def get_action(self, decisions, worker_id):
        self.asked.append((worker_id, decisions))
        chosen = np.array([[next(self.numbers)] for _ in decisions.agent_id], np.float32).reshape(-1, 1)
        if self.name == CHASER:
            action = ActionTuple(discrete=(chosen % 3).astype(np.int32))
        elif self.name == RUNNER:
            action = ActionTuple(continuous=np.repeat(chosen, 2, axis=1))
        else:
            action = ActionTuple(continuous=chosen)
        return ActionInfo(chosen, action, {}, decisions.agent_id)


class Manager:
    """An agent manager that notes what it is told."""

    class Queue:
        """Without policies, after both the real kind of queue and ours."""

        def get_nowait(self):
            try:
                from mlagents.trainers.agent_processor import AgentManagerQueue
            except ImportError:
                import queue

                raise queue.Empty from None
            raise AgentManagerQueue.Empty

    def __init__(self):
        self.told, self.stats, self.policy, self.policy_queue = [], [], None, self.Queue()

    def end_episode(self):
        self.told.append("end")

    def add_experiences(self, decisions, terminals, worker_id, action_info):
        self.told.append((worker_id, decisions, terminals, action_info))

    def record_environment_stats(self, stats, worker_id):
        self.stats.append((worker_id, dict(stats)))


@pytest.fixture
def make(tmp_path):
    """Makes managers that are closed in the end; their envs misbehave as files in the test's directory say."""
    made = []

    def make_one(n_env=2, factory=None, run_options=ENGINE, policies=True, **kwargs):
        factory = factory or functools.partial(Field, mishaps=tmp_path)
        if kwargs.setdefault("restart", OFTEN) is None:
            del kwargs["restart"]  # the limits of ML-Agents
        manager = ActorEnvManager(factory, run_options, n_env, **kwargs)
        made.append(manager)
        for name in (RUNNER, CHASER, LATE) if policies else ():
            manager.set_policy(name, Policy(name))
        return manager

    timers.reset_timers()
    yield make_one
    for manager in made:
        manager.close(0)


@pytest.fixture
def arm(tmp_path):
    """Make a worker misbehave."""

    def arm_one(worker, when, what, always=False):
        (tmp_path / f"{worker}.{when}.{what}").write_text("always" if always else "")

    return arm_one


def test_no_more_envs_run_at_once_than_allowed(make, tmp_path):
    manager = make(5, functools.partial(clocked(Field, tmp_path / "log"), mishaps=tmp_path), max_running=2)
    manager.reset()
    for _ in range(6):
        manager.get_steps()
    assert most_at_once(tmp_path / "log") == 2
    with pytest.raises(ea.VectorInputError, match="max_running is 0"):
        make(max_running=0)


def ask(manager, name):
    """An attribute of all envs."""
    return [worker.actor.get(name).result(SOON) for worker in manager.env_workers]


def workers_of(steps):
    return [step.worker_id for step in steps]


def counts_of(steps):
    """How many steps each env had made by its first of these, by what its runners see."""
    return {step.worker_id: int(step.current_all_step_result[RUNNER][0].obs[0][0, 1]) for step in reversed(steps)}


def run(manager, rounds):
    """Steps until each env has made this many steps more; gives all steps."""
    steps = []
    while any(workers_of(steps).count(worker.worker_id) < rounds for worker in manager.env_workers):
        steps += manager.get_steps()
    return steps


def test_any_backend(make):
    manager = make(backend=ea.RemoteBackend(LocalNodes(2)))
    manager.reset()
    assert {*workers_of(run(manager, 2))} == {0, 1}
    assert sorted(worker.actor.node for worker in manager.env_workers) == ["local-0", "local-1"]


def check_pairs(step):
    """Compares the actions that agents have seen with those that were chosen; gives how many there were."""
    results, worker_id, infos, _ = step
    looked = 0
    for name, info in infos.items():
        decisions, terminals = results[name]
        assert isinstance(decisions, DecisionSteps)
        assert isinstance(terminals, TerminalSteps)
        chosen = dict(zip(info.agent_ids.tolist(), info.action[:, 0].tolist(), strict=True))
        for part in (decisions, terminals):
            assert part.obs[0][:, 0].tolist() == [worker_id] * len(part)
            for agent, told in zip(part.agent_id.tolist(), part.obs[0][:, 3].tolist(), strict=True):
                expected = chosen.get(agent, -1)
                assert told == (expected % 3 if name == CHASER and agent in chosen else expected)
                looked += told != -1
    return looked


# Behavior that users rely on -------------------------------------------------------------------------------


def test_factory_gets_a_number_and_side_channels_and_is_pickled_by_value(make, tmp_path):
    home, field = os.getpid(), Field

    def factory(worker_id, side_channels):
        assert os.getpid() != home
        return field(worker_id, side_channels, tmp_path)

    manager = make(3, factory)
    manager.reset({"gravity": 9.75})
    assert ask(manager, "worker_id") == [0, 1, 2]
    assert ask(manager, "parameters") == [[("gravity", 9.75)]] * 3
    configured = {
        "SCREEN_RESOLUTION": (80, 60),
        "QUALITY_LEVEL": 2,
        "TIME_SCALE": 20.0,
        "TARGET_FRAME_RATE": -1,
        "CAPTURE_FRAME_RATE": 30,
    }
    assert ask(manager, "engine") == [configured] * 3
    stats = {step.worker_id: dict(step.environment_stats) for step in reversed(run(manager, 1))}
    # Those of the reset and of the first step, each env's own.
    told = [(0.0, StatsAggregationMethod.SUM), (1.0, StatsAggregationMethod.SUM)]
    assert stats[0] == stats[1] == stats[2] == {"steps": told}


def test_get_steps_sends_to_every_idle_worker_and_returns_with_the_first(make, arm, tmp_path):
    manager = make(3)
    manager.reset()
    arm(1, "step", "wait")
    steps = []
    while set(workers_of(steps)) != {0, 2}:
        steps += manager.get_steps()
    wait_for_path(tmp_path / "1.waits")
    assert [worker.waiting for worker in manager.env_workers][1]
    for _ in range(5):
        more = manager.get_steps()
        assert len(set(workers_of(more))) == len(more) > 0
        assert 1 not in workers_of(more)
        steps += more
    (tmp_path / "1.go").touch()
    wait_until(manager.env_workers[1].future.done)
    assert 1 in workers_of(manager.get_steps())  # though the others are as quick as can be


def test_get_steps_asks_the_policies_once_for_each_step(make, arm, tmp_path):
    manager = make(2)
    manager.reset()
    arm(1, "step", "wait")
    while counts_of(manager.get_steps()).get(0, 0) < 3:
        pass
    asked = [worker_id for worker_id, _ in manager.policies[RUNNER].asked]
    assert (asked.count(0), asked.count(1)) == (3, 1)
    assert all(isinstance(decisions, DecisionSteps) for _, decisions in manager.policies[RUNNER].asked)
    (tmp_path / "1.go").touch()


def test_get_steps_leaves_out_empty_actions_and_behaviors_without_a_policy(make):
    manager = make(1)
    del manager.policies[LATE]
    manager.reset()
    acted = []
    for _ in range(6):
        manager.get_steps()
        acted += ask(manager, "acted")
    # Chasers are asked every second step; the late ones have no policy.
    assert acted == [[CHASER, RUNNER], [RUNNER]] * 3


def test_get_steps_never_spins(make, arm, tmp_path):
    manager = make(2)
    manager.reset()
    for worker in (0, 1):
        arm(worker, "step", "wait")
    opener = subprocess.Popen(["sh", "-c", 'sleep 0.8; touch "$0"/0.go "$0"/1.go', str(tmp_path)])
    before, begun = time.process_time(), time.monotonic()
    assert manager.get_steps()
    waited, worked = time.monotonic() - begun, time.process_time() - before
    opener.wait()
    assert waited > 0.4
    assert worked < 0.25 * waited


def test_get_steps_is_fair_to_all_workers(make):
    manager = make(4)
    manager.reset()
    taken = dict.fromkeys(range(4), 0)
    while max(taken.values()) < 60:
        # Every finished worker is returned: none can be passed over a second time.
        ready = {
            worker.worker_id for worker in manager.env_workers if worker.future is not None and worker.future.done()
        }
        steps = manager.get_steps()
        assert ready <= set(workers_of(steps))
        for worker in workers_of(steps):
            taken[worker] += 1
    assert min(taken.values()) > 0


def test_result_is_an_environment_step_paired_with_the_action_that_caused_it(make):
    manager = make(2)
    manager.reset()
    steps = run(manager, 6)
    assert all(isinstance(step, EnvironmentStep) for step in steps)
    for step in steps:
        assert list(step.name_behavior_ids) == list(step.current_all_step_result)
        assert isinstance(step.environment_stats["steps"], list)
    assert sum(map(check_pairs, steps)) > 20


def test_reset_waits_for_pending_steps(make, arm, tmp_path):
    manager = make(2)
    manager.reset()
    arm(1, "step", "wait")
    assert workers_of(manager.get_steps()) == [0]
    wait_for_path(tmp_path / "1.waits")
    (tmp_path / "1.go").touch()
    assert manager.reset() == 2
    assert not any(worker.waiting for worker in manager.env_workers)
    assert counts_of(manager.first_step_infos) == {0: 0, 1: 0}
    assert counts_of(run(manager, 1))[1] == 1


def test_reset_sends_the_parameters(make):
    class Sampler:
        def apply(self, key, channel):
            channel.set_uniform_sampler_parameters(key, 0.0, 1.0, 3)

    manager = make(2)
    manager.reset({"gravity": 9.75, "wind": Sampler()})
    assert ask(manager, "parameters") == [[("gravity", 9.75), ("wind", "sampler")]] * 2
    manager.set_env_parameters({"gravity": 1.5})
    run(manager, 1)
    assert {tuple(parameters[2:]) for parameters in ask(manager, "parameters")} == {(("gravity", 1.5),)}
    assert manager.env_parameters.keys() == {"gravity", "wind"}
    with pytest.raises(ea.VectorInputError, match="'gravity' is 'strong'"):
        manager.reset({"gravity": "strong"})


def test_reset_runs_side_by_side(make, arm, tmp_path):
    manager = make(3)
    for worker in range(3):
        arm(worker, "reset", "wait")
    # None continues before all have come.
    opening = 'cd "$0"; until [ -e 0.waits -a -e 1.waits -a -e 2.waits ]; do sleep 0.01; done; touch 0.go 1.go 2.go'
    opener = subprocess.Popen(["sh", "-c", opening, str(tmp_path)])
    assert manager.reset() == 3
    assert opener.wait(SOON) == 0


def test_reset_ends_the_episodes_and_the_first_steps_are_passed_on_before_others(make):
    manager = make(2)
    agents = Manager()
    manager.set_agent_manager(RUNNER, agents)
    manager.reset()
    assert agents.told == ["end"]
    steps = manager.get_steps()
    assert [(worker, decisions.obs[0][0, 1]) for worker, decisions, *_ in agents.told[1:]] == [(0, 0.0), (1, 0.0)]
    assert manager.process_steps(steps) == len(steps)
    worker, decisions, _, info = agents.told[3]
    assert (worker, decisions.obs[0][0, 1]) == (steps[0].worker_id, 1.0)
    assert info is steps[0].brain_name_to_action_info[RUNNER]
    assert agents.stats[-1] == (steps[-1].worker_id, dict(steps[-1].environment_stats))


def test_training_behaviors_and_get_properties_are_merged_over_the_workers(make):
    def factory(worker_id, channels):
        env = Field(worker_id, channels)
        env.behaviors[f"Own{worker_id}"] = env.behaviors[RUNNER]
        env._batch = lambda *args, batch=env._batch: batch(*args)
        observe = env._observe

        def observe_all():
            observe()
            env.steps[f"Own{worker_id}"] = env.steps[RUNNER]

        env._observe = observe_all
        return env

    manager = make(2, factory)
    assert isinstance(manager, EnvManager)
    manager.reset({"gravity": 9.75})
    behaviors = manager.training_behaviors
    assert behaviors.keys() == {RUNNER, CHASER, "Own0", "Own1"}
    assert behaviors[CHASER].action_spec.discrete_branches == (3,)
    assert manager.external_brains == behaviors
    assert manager.get_properties == {"gravity": 9.75, "of 0": 0.5, "of 1": 1.5}


def worker_timers():
    return timers.get_timer_tree()["children"]["workers"]["children"]["worker_root"]


def test_timers_of_the_workers_are_merged(make):
    manager = make(2)
    manager.reset()
    steps = run(manager, 5)
    root = worker_timers()
    assert root["is_parallel"]
    assert root["count"] == len(steps)
    step = root["children"]["Field.step"]
    assert step["count"] == step["children"]["simulate"]["count"] == len(steps)
    assert root["total"] >= step["total"] >= step["children"]["simulate"]["total"] > 0
    policies = timers.get_timer_tree()["children"]["ActorEnvManager._take_step"]
    assert policies["count"] == len(manager.policies[RUNNER].asked)


def test_timers_of_a_worker_that_crashes_later_are_merged(make):
    manager = make(1)
    manager.reset()
    for _ in range(3):
        manager.get_steps()
    before = worker_timers()
    os.kill(manager.env_workers[0].actor.pid, signal.SIGKILL)
    manager.get_steps()
    after = worker_timers()
    assert (before["count"], after["count"]) == (3, 4)
    assert after["total"] > before["total"]


def test_timers_of_the_caller_measure_envs_in_its_thread(make):
    """Each step used to merge them into themselves, until they were too deep to be copied."""
    manager = make(1, backend="inline")
    manager.reset()
    with timers.hierarchical_timer("training"):
        for _ in range(3):
            manager.get_steps()
    tree = timers.get_timer_tree()["children"]
    assert tree.keys() == {"training"}
    assert tree["training"]["children"]["Field.step"]["count"] == 3


FAULTS = {"die": ea.ActorDiedError, "hang": ea.ActorTimeoutError, "complain": UnityTimeOutException}
AND_MORE = ["segfault", "exit", "stop"]


@pytest.mark.parametrize(
    ("what", "when"), [*itertools.product(FAULTS, ["step", "reset"]), *((what, "step") for what in AND_MORE)]
)
def test_restarts_reset_all_envs_and_send_the_parameters_again(make, arm, caplog, what, when):
    hangs = what in ("hang", "stop")
    manager = make(2, deadlines=HANGING if hangs else PATIENT)
    agents = Manager()
    manager.set_agent_manager(RUNNER, agents)
    manager.reset({"gravity": 9.75})
    manager.set_env_parameters({"wind": 2.5})
    pids = [worker.actor.pid for worker in manager.env_workers]
    run(manager, 2)
    agents.told.clear()
    arm(1, when, what)
    with caplog.at_level(logging.WARNING):
        if when == "reset":
            manager.reset()
        while counts_of(manager.get_steps()).get(1) != 1:
            pass
    assert "restarting worker 1 after" in caplog.text
    now = [worker.actor.pid for worker in manager.env_workers]
    assert now[1] != pids[1]
    assert now[0] == pids[0] or hangs  # on a busy machine it may have passed the deadline too
    assert ask(manager, "parameters")[1] == [("gravity", 9.75), ("wind", 2.5)]
    # All episodes end, and each env's first observations come before anything else.
    assert agents.told.count("end") == 1 or hangs
    after = agents.told[agents.told.index("end") + 1 :][:2]
    assert [(told[0], told[1].obs[0][0, 1]) for told in after] == [(0, 0.0), (1, 0.0)]
    assert is_gone(pids[1])


def test_restarts_after_a_crash_while_idle(make):
    manager = make(2)
    manager.reset({"gravity": 9.75})
    run(manager, 2)
    worker = manager.env_workers[0]
    while worker.waiting:
        manager.get_steps()
    os.kill(worker.actor.pid, signal.SIGKILL)
    wait_until(lambda: worker.actor.incarnation == 1)
    worker.actor.get("parameters").result(SOON)  # on the new process, which knows nothing yet
    while workers_of(steps := manager.get_steps()).count(0) == 0:
        pass
    assert counts_of(steps)[0] == 1
    assert ask(manager, "parameters")[0] == [("gravity", 9.75)]


def test_restarts_when_the_new_process_crashes_in_its_start(make, arm):
    manager = make(1)
    manager.reset()
    arm(0, "step", "die")
    arm(0, "start", "die")
    assert counts_of(manager.get_steps()) == {0: 1}
    assert manager.env_workers[0].actor.incarnation == 2


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_many_restarts_mix_nothing_up(make, arm):
    deadlines = ea.Deadlines(start=5.0, step=1.0, reset=1.0)
    manager = make(3, deadlines=deadlines, restart=ea.RestartPolicy(math.inf, backoff=0.0))
    manager.reset({"gravity": 9.75})
    rng, last, looked = random.Random(0), dict.fromkeys(range(3), 0), 0
    for _ in range(60):
        arm(rng.randrange(3), rng.choice(["step", "reset", "start"]), rng.choice([*FAULTS, *AND_MORE]))
        for _ in range(rng.randrange(1, 30)):
            for step in manager.get_steps():
                looked += check_pairs(step)
                (count,) = counts_of([step]).values()
                assert count in (1, last[step.worker_id] + 1)
                last[step.worker_id] = count
    assert sum(worker.actor.incarnation for worker in manager.env_workers) > 30
    assert looked > 500

    def have_parameters():
        manager.get_steps()  # the last faults may still be ahead, and processes on their way
        return [set(parameters) for parameters in ask(manager, "parameters")] == [{("gravity", 9.75)}] * 3

    wait_until(have_parameters)


@pytest.mark.parametrize("name", ["training_behaviors", "get_properties"])
def test_restarts_when_another_request_finds_the_crash(make, name):
    manager = make(1)
    assert len(manager.training_behaviors) == 2
    manager.reset()
    run(manager, 5)
    os.kill(manager.env_workers[0].actor.pid, signal.SIGKILL)
    assert len(getattr(manager, name)) == {"training_behaviors": 2, "get_properties": 1}[name]
    assert counts_of(manager.get_steps()) == {0: 1}


def options(lifetime=10, count=1, period=60):
    """As ML-Agents' RunOptions, as far as a manager reads them."""
    engine = types.SimpleNamespace(**ENGINE._asdict(), no_graphics=False)
    limits = {"max_lifetime_restarts": lifetime, "restarts_rate_limit_n": count, "restarts_rate_limit_period_s": period}
    return types.SimpleNamespace(engine_settings=engine, env_settings=types.SimpleNamespace(num_envs=1, **limits))


def restarts_until_it_ends(manager, arm, what, most):
    """Let a worker fail repeatedly; return the number of restarts and the final error."""
    manager.reset()
    for count in range(most):
        arm(0, "step", what)
        try:
            while counts_of(manager.get_steps())[0] != 1:
                pass
        except Exception as error:
            return count, error
    return most, None


@pytest.mark.parametrize("what", FAULTS)
def test_restarts_once_in_a_period_by_default_and_then_the_original_exception(make, arm, what):
    manager = make(1, restart=None, deadlines=HANGING if what == "hang" else PATIENT)
    count, error = restarts_until_it_ends(manager, arm, what, 5)
    assert count == 1
    assert type(error) is FAULTS[what]
    if what == "complain":
        assert error.args == ("no answer from 0",)
        assert isinstance(error.__cause__, ea.RemoteTraceback)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((3, -1, 60), 3), ((10, 2, 60), 2), ((2, 100, 0.001), 2), ((0, 5, 60), 0), ((10, 0, 60), 0), ((-1, -1, 60), 4)],
)
def test_restarts_have_a_limit_for_the_lifetime_and_one_for_a_period(make, arm, limits, expected):
    manager = make(1, run_options=options(*limits), restart=None)
    assert ask(manager, "engine") == [{}]
    count, error = restarts_until_it_ends(manager, arm, "complain", 4)
    assert (count, type(error)) == (expected, UnityTimeOutException if expected < 4 else type(None))


def test_restarts_of_another_worker_are_its_own(make, arm):
    manager = make(2, restart=ea.RestartPolicy(max_restarts=1, window=600.0, backoff=0.0))
    manager.reset()
    for worker in (0, 1):
        arm(worker, "step", "die")
        while counts_of(manager.get_steps()).get(worker) != 1:
            pass
    arm(0, "step", "die")
    with pytest.raises(ea.ActorDiedError) as caught:
        run(manager, 3)
    assert (caught.value.index, caught.value.signal) == (0, signal.SIGKILL)


def test_an_env_whose_factory_raises_is_not_started_again(make, arm):
    arm(0, "start", "complain", always=True)
    manager = make(1, restart=ea.RestartPolicy(max_restarts=2, backoff=0.0))
    with pytest.raises(UnityTimeOutException, match="no answer from 0"):
        manager.reset()
    assert manager.env_workers[0].actor.incarnation == 0


def test_restarts_are_not_for_other_exceptions_and_the_env_continues(make, arm):
    manager = make(2)
    manager.reset()
    run(manager, 2)
    pids = [worker.actor.pid for worker in manager.env_workers]
    arm(1, "step", "raise")
    with pytest.raises(ZeroDivisionError, match="in 1"):
        run(manager, 2)
    before = manager.env_workers[1].previous_step
    steps = run(manager, 1)
    assert counts_of(steps)[1] == counts_of([before])[1] + 1
    assert [worker.actor.pid for worker in manager.env_workers] == pids


def test_multi_agent_steps_have_each_behaviors_own_batch(make):
    manager = make(1)
    manager.reset()
    seen = {name: [] for name in (RUNNER, CHASER, LATE)}
    gone = []
    for _ in range(8):
        (step,) = manager.get_steps()
        for name, (decisions, terminals) in step.current_all_step_result.items():
            seen[name].append(decisions.agent_id.tolist())
            gone += terminals.agent_id.tolist()
    # Runners leave in steps 3 and 4, and others come in the step after; chasers decide in every second step.
    assert seen[RUNNER] == [[1, 2], [1, 2], [2], [3], [3, 4], [4], [5], [5, 6]]
    assert seen[CHASER] == [[], [11, 12, 13]] * 4
    assert seen[LATE] == [[21]] * 5
    assert gone == [1, 2, 3, 4]


def test_close_lets_the_envs_close(make, tmp_path):
    manager = make(2)
    manager.reset()
    manager.get_steps()
    manager.close()
    assert all((tmp_path / f"{worker}.closed").exists() for worker in range(2))
    manager.close()
    with pytest.raises(ea.ActorClosedError):
        manager.reset()


def test_close_is_bounded_with_crashed_and_hung_workers(make, arm, tmp_path):
    manager = make(3, deadlines=ea.Deadlines(close=0.5), restart=ea.RestartPolicy(max_restarts=0))
    manager.reset()
    pids = [worker.actor.pid for worker in manager.env_workers]
    arm(1, "step", "hang")
    manager.get_steps()
    wait_for_path(tmp_path / "1.hangs")
    os.kill(pids[2], signal.SIGKILL)
    begun = time.monotonic()
    manager.close()
    assert time.monotonic() - begun < SOON
    wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.parametrize(("method", "where"), [("get_steps", "_collect"), ("reset", "_reset_env")])
def test_steps_after_an_interrupt_have_actions_for_the_agents_of_their_env(make, method, where):
    """They used to have those for the observations before the interrupt, which the env refused."""
    manager = make(2)
    manager.reset()
    for number in itertools.count():
        was_interrupted = interrupt(getattr(manager, method), number, only={where})
        run(manager, 3)
        if was_interrupted is None:
            break
    assert number > 3


# More behavior ------------------------------------------------------------------------------------------


def test_real_run_options_are_read(make):
    settings = pytest.importorskip("mlagents.trainers.settings")
    given = settings.RunOptions()
    given.engine_settings.width, given.engine_settings.height = 40, 30
    given.env_settings.max_lifetime_restarts = 2
    manager = make(1, run_options=given, restart=None)
    policy = manager.env_workers[0].actor._actor.config.restart
    assert (policy.max_restarts, policy.window, policy.max_lifetime_restarts) == (1, 60, 2)
    manager.reset({"mass": settings.ConstantSettings(value=4.0), "size": settings.GaussianSettings(mean=1.0)})
    assert ask(manager, "engine")[0]["SCREEN_RESOLUTION"] == (40, 30)
    assert ask(manager, "parameters") == [[("mass", 4.0), ("size", "sampler")]]


def test_the_base_class_is_the_real_one_where_there_is_one():
    real = pytest.importorskip("mlagents.trainers.env_manager")
    assert issubclass(ActorEnvManager, real.EnvManager)
    assert EnvironmentStep is real.EnvironmentStep


def test_a_killed_caller_leaves_no_workers():
    script = textwrap.dedent(
        """
        import sys, time, warnings
        warnings.simplefilter("ignore")
        sys.path.insert(0, sys.argv[1])
        from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig
        from mlenvs import Field
        from envactors.integrations.mlagents import ActorEnvManager

        manager = ActorEnvManager(Field, EngineConfig.default_config(), 2)
        manager.reset()
        manager.get_steps()
        print("pids", *[worker.actor.pid for worker in manager.env_workers], flush=True)
        while True:
            manager.get_steps()
        """
    )
    here = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    with subprocess.Popen([sys.executable, "-c", script, here], stdout=subprocess.PIPE, text=True) as caller:
        told = next(line for line in caller.stdout if line.startswith("pids"))  # after warnings, with mlagents
        pids = [int(pid) for pid in told.split()[1:]]
        assert len(pids) == 2
        caller.kill()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_factory_that_cannot_be_pickled_is_rejected_at_once():
    lock = threading.Lock()
    with pytest.raises(ea.SerializationError, match="the factory of actor 'worker-0' cannot be pickled"):
        ActorEnvManager(lambda worker_id, channels: lock, ENGINE, 2)
