"""The scripts that measure the figures of the docs: our sides run, and take turns in fresh processes."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium")
FIGURES = Path(__file__).parents[2] / "docs/figures"


@pytest.fixture(autouse=True)
def path_of_figures(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)


@pytest.fixture
def workloads():
    return importlib.import_module("workloads")


@pytest.fixture
def vectors():
    return importlib.import_module("vectors")


@pytest.mark.parametrize("name", ["loop", "sync", "step", "packed", "recv", "rollout"])
@pytest.mark.parametrize("policy", [True, False], ids=["policy", "random"])
def test_a_side_makes_steps(name, policy, vectors):
    if name == "rollout" and not policy:
        pytest.skip("rollouts have a policy")
    (side,) = vectors.sides([name], vectors.ENVS["CartPole-v1"], 2, policy=policy).values()
    with side() as turn:
        assert turn(0.01) > 0


def test_sides_take_turns_in_fresh_processes(vectors, workloads):
    turns = importlib.import_module("turns")
    rates = turns.compare(vectors.sides(["rollout", "apart"], workloads.nothing, 1, policy=True), 2, 0.01)
    assert {name: len(each) for name, each in rates.items()} == {"rollout": 2, "apart": 2}
    assert min(rates["rollout"] + rates["apart"]) > 0
    assert vectors.show_rollouts({"does nothing": rates | {"packed": rates["apart"]}}).count("\n") == 3


def test_an_error_of_a_side_ends_the_comparison(capfd):
    turns = importlib.import_module("turns")
    with pytest.raises(EOFError):
        turns.compare({"broken": dict}, 1)
    assert "context manager" in capfd.readouterr().err


def test_turns_alternate_after_a_warm_up():
    turns = importlib.import_module("turns")
    taken = []
    sides = {name: lambda seconds, name=name: taken.append((name, seconds)) or len(taken) for name in "ab"}
    assert turns.alternate(sides, 2, 3.0) == {"a": [3, 6], "b": [4, 5]}
    assert taken == [("a", turns.WARM_UP), ("b", turns.WARM_UP), ("a", 3.0), ("b", 3.0), ("b", 3.0), ("a", 3.0)]


@pytest.mark.parametrize("case", [1, 2])
def test_an_executor_makes_calls(case):
    executors = importlib.import_module("executors")
    with executors.calling("envactors", [*executors.CASES][case]) as turn:
        assert turn(0.01) > 0


@pytest.mark.parametrize("name", ["nothing", "image", "busy_100us", "busy_1ms", "sleeping", "pong", "humanoid"])
def test_workloads(name, workloads):
    if name == "pong":
        pytest.importorskip("ale_py")
        pytest.importorskip("cv2")
    if name == "humanoid":
        pytest.importorskip("mujoco")
    env = getattr(workloads, name)()
    obs, _ = env.reset(seed=1)
    assert env.observation_space.contains(obs)
    obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs)
    assert (terminated, truncated) == (False, False)
    shape = {"image": (4, 84, 84), "pong": (4, 84, 84), "humanoid": (348,)}.get(name, (4,))
    assert obs.shape == shape
    env.close()


def test_work_is_an_amount_and_waits_follow_the_seed(workloads, monkeypatch):
    turns, waits = [], []
    monkeypatch.setattr(workloads, "compute", turns.append)
    for make in (workloads.busy_100us, workloads.busy_1ms):
        env = make()
        env.reset()
        env.step(0)
    assert turns == [workloads._TURNS_PER_100_US, 10 * workloads._TURNS_PER_100_US]
    monkeypatch.setattr(workloads.time, "sleep", waits.append)
    env = workloads.sleeping()
    for _ in range(2):
        env.reset(seed=3)
        for _ in range(200):
            env.step(0)
    assert waits[:200] == waits[200:]
    assert np.mean(waits) == pytest.approx(0.002, rel=0.3)
