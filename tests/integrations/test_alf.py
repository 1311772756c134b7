"""The drop-in for ALF: the behavior that its users rely on, and failures, with and without torch."""

from __future__ import annotations

import collections
import copy
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest
from alfenvs import AlfEnv, Camera, Complaint, Gated, Logged, Many, Nested, TensorSpec, Ticking, uneven, uneven_length
from helpers import (
    SOON,
    clocked,
    episode_seed,
    fork_server,
    is_gone,
    kept_fork_server,
    most_at_once,
    run_script,
    wait_for_path,
    wait_until,
)

import envactors as ea
from envactors.integrations.alf import ActorParallelEnvironment, StepType, parallel_environment
from envactors.integrations.alf.values import AlfTimeStep
from envactors.process import starting
from envactors.remote import LocalNodes
from envactors.vector.options import VectorSettings

FIRST, MID, LAST = range(3)


@pytest.fixture(scope="module", autouse=True)
def server_of_alf(helper_processes):
    with kept_fork_server(dict.fromkeys(starting.THREAD_CAPS, "1")):
        yield


@pytest.fixture(autouse=True)
def quick_starts_of_alf(request, monkeypatch):
    """Where it does not matter how processes start, the session's fork server starts them."""
    if "fresh_processes" not in request.keywords:
        monkeypatch.setattr(parallel_environment, "ProcessBackend", lambda _, **traits: fork_server(**traits))


@pytest.fixture
def make():
    """Makes parallel environments, and closes them after the test."""
    made = []

    def make_one(constructors, start_serially=False, **kwargs):
        made.append(ActorParallelEnvironment(constructors, start_serially, **kwargs))
        return made[-1]

    yield make_one
    while made:  # what was closed and still owes results keeps their memory
        made.pop().close()


def zeros(env):
    return np.zeros(env.batch_size, np.int64)


def rows(time_step):
    """``(env, episode, step)`` of each slot."""
    return [tuple(map(int, row[:3])) for row in np.asarray(time_step.observation)]


def types(time_step):
    return np.asarray(time_step.step_type).tolist()


# Constructor -----------------------------------------------------------------------------------------


def test_constructor(make):
    """Its parameters by position, and each constructor is called with its ``env_id``."""
    env = make([AlfEnv] * 3, False, blocking=False, flatten=True)
    env.close()
    env = ActorParallelEnvironment([AlfEnv] * 3, False, False, True, 1, 1, None)
    with env:
        assert (env.batch_size, env.num_spare_envs_for_reload, len(env.envs)) == (2, 1, 2)
        assert rows(env.reset()) == [(0, 1, 0), (1, 1, 0)]


def test_start_serially_waits_for_each_before_the_next(make, tmp_path):
    log = tmp_path / "log"
    make([functools.partial(Logged, log)] * 4, start_serially=True, num_spare_envs_for_reload=1)
    assert log.read_text().split("\n")[:-1] == [f"{what} {i}" for i in range(4) for what in ("begin", "end")]


def test_without_start_serially_all_start_side_by_side(make, tmp_path):
    log = tmp_path / "log"
    gates = [tmp_path / f"log.{i}" for i in range(4)]  # each is made when all have begun
    make([functools.partial(Logged, log, gates=gates)] * 4, start_serially=False)
    assert sorted(log.read_text().split("\n")[4:8]) == [f"end {i}" for i in range(4)]


@pytest.mark.fresh_processes
@pytest.mark.parametrize("name", ["fork", "spawn", None])
def test_names_of_start_methods_stand_for_the_default(make, name):
    env = make([AlfEnv], start_method=name)
    assert env.actors[0]._actor.config.backend.start_method == starting.DEFAULT
    assert rows(env.reset()) == [(0, 1, 0)]


@pytest.mark.fresh_processes
def test_an_unknown_start_method_is_a_value_error():
    with pytest.raises(ValueError, match="'by magic'"):
        ActorParallelEnvironment([AlfEnv], start_method="by magic")


def test_under_renew_processes_are_restarted_as_in_vectors(make):
    env = make([AlfEnv], on_failure="renew")
    assert env.actors[0]._actor.config.restart == VectorSettings().restart


def test_any_backend(make):
    env = make([AlfEnv] * 2, backend=ea.RemoteBackend(LocalNodes(2)))
    assert rows(env.reset()) == [(0, 1, 0), (1, 1, 0)]
    assert sorted(actor.node for actor in env.actors) == ["local-0", "local-1"]
    with pytest.raises(ValueError, match="expected only one"):
        ActorParallelEnvironment([AlfEnv], start_method="fork", backend="thread")


@pytest.mark.fresh_processes
@pytest.mark.parametrize("threads", [1, 2])
def test_torch_num_threads_per_env(make, threads):
    env = make([AlfEnv], torch_num_threads_per_env=threads)
    assert env.call_envs_with_same_args("environ", "OMP_NUM_THREADS") == [str(threads)]
    assert env.call_envs_with_same_args("loaded", "torch") == [False]  # unless the env itself wants it
    pytest.importorskip("torch")
    assert env.call_envs_with_same_args("torch_threads") == [threads]


def test_a_constructor_that_fails(make):
    def fail(env_id):
        raise Complaint(f"not env {env_id}")

    with pytest.raises(RuntimeError, match="not env 1") as caught:
        make([AlfEnv, fail])
    assert isinstance(caught.value.__cause__, ea.ActorStartError)
    assert isinstance(caught.value.__cause__.__cause__, Complaint)


# Specs -----------------------------------------------------------------------------------------------

DIFFERENT = {
    "action_spec": {"action": 5},
    "time_step_spec": {"observation": "float64"},
    "env_info_spec": {"env_info": {}},
    "reward_spec": {"reward": (2,)},
    "batch_size": {"batch_size": 2, "batched": True},
    "batched": {"batched": True},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_specs_must_agree(make, name):
    with pytest.raises(ValueError, match=f"same {name}: it is .* in env 2, but .* in env 0") as caught:
        make([AlfEnv, AlfEnv, functools.partial(AlfEnv, **DIFFERENT[name])])
    env = AlfEnv(0, **DIFFERENT[name])
    for one in (env, AlfEnv(0)):
        value = getattr(one, name)
        assert repr(value() if callable(value) else value) in str(caught.value)


def test_spare_envs_must_agree_too(make):
    with pytest.raises(ValueError, match=r"same action_spec: it is .* in env 1, but "):
        make([AlfEnv, functools.partial(AlfEnv, action=5)], num_spare_envs_for_reload=1)


def test_envs_of_tensors_are_rejected(make):
    with pytest.raises(ValueError, match="array-based"):
        make([functools.partial(AlfEnv, is_tensor_based=True)] * 2)


def test_a_spec_that_is_none_is_named(make):
    with pytest.raises(RuntimeError, match=r"env_info\['x'\] is 'no spec'"):
        make([functools.partial(AlfEnv, env_info={"x": "no spec"})])


def test_specs_are_those_of_the_envs(make):
    env, one = make([AlfEnv] * 2), AlfEnv(0)
    for specs in (env, env.envs[1]):
        for name in ("observation_spec", "action_spec", "reward_spec", "env_info_spec", "time_step_spec"):
            assert getattr(specs, name)() == getattr(one, name)()


# Step/reset ------------------------------------------------------------------------------------------


def test_step_and_reset(make):
    env = make([functools.partial(AlfEnv, length=2), AlfEnv])
    assert env.current_time_step() is None
    first = env.step(np.array([5, 5]))  # the very first step is a reset
    assert type(first) is AlfTimeStep
    assert types(first) == [FIRST, FIRST]
    assert rows(first) == [(0, 1, 0), (1, 1, 0)]
    second = env.step(np.array([6, 7]))
    assert env.current_time_step() is second
    assert ", ".join(second._fields) == (
        "step_type, reward, discount, observation, prev_action, env_id, untransformed, env_info"
    )
    assert np.asarray(second.observation).tolist() == [[0, 1, 1, 6], [1, 1, 1, 7]]
    assert np.asarray(second.prev_action).tolist() == [6, 7]
    assert np.asarray(second.env_id).tolist() == [0, 1]
    assert second.untransformed == ()
    assert np.asarray(second.env_info["draw"]).shape == (2,)
    dtypes = [np.asarray(value).dtype.name for value in (*second[:6], second.env_info["draw"])]
    assert dtypes == ["int32", "float32", "float32", "float32", "int64", "int32", "float64"]
    third = env.step(np.array([8, 9]))
    assert types(third) == [LAST, MID]
    assert np.asarray(third.reward).tolist() == [2, 2]
    assert np.asarray(third.discount).tolist() == [0, 1]
    assert third.is_last().tolist() == [True, False]
    assert third.is_mid().tolist() == [False, True]
    fourth = env.step(np.array([3, 3]))  # the first action is ignored
    assert types(fourth) == [FIRST, LAST]
    assert fourth.is_first().tolist() == [True, False]
    assert np.asarray(fourth.observation).tolist() == [[0, 2, 0, 0], [1, 1, 3, 3]]
    assert np.asarray(fourth.reward).tolist() == [0, 3]
    assert rows(env.reset()) == [(0, 3, 0), (1, 2 + 1, 0)]  # env 1 had already begun another one


def test_after_the_last_step_the_env_resets_at_once(make, tmp_path):
    gate = tmp_path / "gate"
    env = make([functools.partial(Gated, gate, length=2), functools.partial(AlfEnv, length=9)])
    env.reset()
    env.step(zeros(env))
    assert types(env.step(zeros(env))) == [LAST, MID]
    wait_for_path(tmp_path / "gate.0")  # before the next step
    gate.touch()
    assert rows(env.step(zeros(env))) == [(0, 2, 0), (1, 1, 3)]


def test_results_never_change(make):
    env = make([AlfEnv] * 2)
    results = [env.reset(), *(env.step(np.array([n, n])) for n in range(9))]
    kept = [copy.deepcopy([np.asarray(value).tolist() for value in result[:6]]) for result in results]
    for n in range(5):
        env.step(np.array([n, n]))
    assert [[np.asarray(value).tolist() for value in result[:6]] for result in results] == kept


def test_long_runs_are_those_of_the_envs_alone(make):
    lengths = [functools.partial(AlfEnv, length=n) for n in (1, 2, 5)]
    env, alone = make(lengths), [make_one(env_id=i) for i, make_one in enumerate(lengths)]
    ours, theirs = env.reset(), [one.reset() for one in alone]
    rng = np.random.default_rng(0)
    for _ in range(60):
        for name in ("step_type", "reward", "discount", "observation", "prev_action"):
            assert np.array_equal(getattr(ours, name), np.stack([getattr(one, name) for one in theirs]))
        actions = rng.integers(0, 100, 3)
        ours, theirs = env.step(actions), [one.step(action) for one, action in zip(alone, actions, strict=True)]


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ([1, 2, 3], "expected 2 rows"),
        (5, "expected 2 rows"),
        ([[1], [2]], "shape"),
        ([0.5, 1.5], "dtype float64: expected int64"),
    ],
)
def test_actions_that_do_not_fit(make, actions, said):
    env = make([AlfEnv] * 2)
    env.reset()
    with pytest.raises(ValueError, match=said):
        env.step(np.array(actions))
    assert rows(env.step(zeros(env))) == [(0, 1, 1), (1, 1, 1)]


def test_a_time_step_that_does_not_fit(make):
    class Odd(AlfEnv):
        def show(self, *args):
            return super().show(*args)._replace(observation=np.zeros(5, np.float32))

    with pytest.raises(RuntimeError, match=r"observation has shape \(5,\): expected \(4,\)") as caught:
        make([Odd]).reset()
    assert isinstance(caught.value.__cause__, ea.SpaceMismatchError)
    with pytest.raises(RuntimeError, match=r"the value has no env_info\['more'\]"):
        make([functools.partial(AlfEnv, env_info={"more": TensorSpec(())})]).reset()


def test_nests(make):
    env = make([Nested] * 2)
    env.reset()
    action = {"steer": np.array([[1, 2], [3, 4]], np.float64), "gear": (np.array([6, 7], np.int64),)}
    time_step = env.step(action)
    camera = time_step.observation["camera"]
    assert type(camera) is Camera
    assert np.asarray(camera.rgb).tolist() == np.stack([np.full((2, 2, 3), n) for n in (6, 7)]).tolist()
    assert type(camera.depth) is list
    assert np.asarray(camera.depth[0]).tolist() == [[1, 2], [3, 4]]
    assert np.asarray(time_step.observation["flags"][0]).tolist() == [False, True]
    assert np.asarray(time_step.prev_action["gear"][0]).tolist() == [6, 7]
    assert np.asarray(time_step.reward).tolist() == [1.5, 1.5]  # given as Python's float
    assert time_step.env_info == {}
    with pytest.raises(ValueError, match=r"the value has no action\['gear'\]\[0\]"):
        env.step({"steer": action["steer"]})


# Spare envs ------------------------------------------------------------------------------------------


def expected_slots(lengths, slots, spares, steps):
    """What ALF does: ``(env, episode, step)`` of each slot, step by step."""
    envs, queue = list(range(slots)), collections.deque(range(slots, slots + spares))
    episodes, done = [1] * (slots + spares), [0] * slots
    ended = [False] * slots
    for _ in range(steps):
        for slot in range(slots):
            if ended[slot]:
                envs[slot], done[slot] = queue.popleft(), 0
            else:
                done[slot] += 1
        yield [(envs[slot], episodes[envs[slot]], done[slot]) for slot in range(slots)]
        now = [not ended[s] and done[s] >= lengths(envs[s], episodes[envs[s]]) for s in range(slots)]
        for slot in range(slots):
            if now[slot]:
                queue.append(envs[slot])
                episodes[envs[slot]] += 1
        ended = now


@pytest.mark.parametrize("spares", [0, 1, 2, 5])
def test_spare_envs(make, spares):
    """A finished env queues at the back, its slot takes the front; the order is the same in each run."""
    env = make([uneven] * (3 + spares), num_spare_envs_for_reload=spares)
    expected = expected_slots(uneven_length, 3, spares, 40)
    env.reset()
    seen = set()
    for row in expected:
        time_step = env.step(zeros(env))
        assert rows(time_step) == row
        assert np.asarray(time_step.env_id).tolist() == [0, 1, 2]  # the slot
        seen |= {env_id for env_id, _, _ in row}
    assert seen == set(range(3 + spares))


def test_a_reset_gives_the_slots_back_to_the_first_envs(make):
    env = make([functools.partial(AlfEnv, length=1)] * 3, num_spare_envs_for_reload=1)
    env.reset()
    for _ in range(3):
        env.step(zeros(env))
    assert [env_id for env_id, _, _ in rows(env.reset())] == [0, 1]
    assert types(env.step(zeros(env))) == [LAST, LAST]


def test_resets_of_twenty_steps_hold_no_batch_up(make, tmp_path):
    """A reset ends when 20 further steps have been made: a step that waited for one would wait forever."""
    slots, length = 2, 10
    spares = slots * (Ticking.RESET // length + 1)
    clock = np.memmap(tmp_path / "clock", np.int64, "w+", shape=(1,))
    env = make(
        [functools.partial(Ticking, tmp_path / "clock", length=length)] * (slots + spares),
        num_spare_envs_for_reload=spares,
    )
    env.reset()
    firsts = []
    for _ in range(8 * length):
        clock[0] += 1
        time_step = env.step(zeros(env))
        firsts += [env_id for env_id, _, step in rows(time_step) if step == 0]
    assert len(firsts) >= 10
    assert firsts == [n % (slots + spares) for n in range(slots, slots + len(firsts))]
    clock[0] += Ticking.RESET  # those that still reset may end


def test_without_enough_spare_envs_a_step_waits_for_the_reset(make, tmp_path):
    gate = tmp_path / "gate"
    env = make([functools.partial(Gated, gate, length=1)] * 3, num_spare_envs_for_reload=2)
    env.reset()
    for _ in range(5):  # env 0 ends and resets, then 1, then 2, whose slot would need env 0
        env.step(zeros(env))
    for env_id in range(3):
        wait_for_path(tmp_path / f"gate.{env_id}")
    helper = subprocess.Popen(["sh", "-c", f"sleep 0.2; touch {gate}"])
    assert not gate.exists()
    assert rows(env.step(zeros(env))) == [(0, 2, 0)]
    assert gate.exists()
    helper.wait()


@pytest.mark.parametrize("spares", [3, 4, -1, True])
def test_a_number_of_spare_envs_that_makes_no_sense(make, spares):
    with pytest.raises(ValueError, match="num_spare_envs_for_reload"):
        make([AlfEnv] * 3, num_spare_envs_for_reload=spares)


# Batched envs ----------------------------------------------------------------------------------------


def test_batched_envs(make):
    """Each env has a slice of the batch, and resets its episodes itself."""
    env = make([Many] * 2)
    assert (env.batched, env.batch_size) == (True, 6)
    assert rows(env.reset()) == [(i, 1, 0) for i in range(6)]
    alone = [AlfEnv(i, length=2 + i % 3) for i in range(6)]
    for one in alone:
        one.reset()
    for turn in range(12):
        actions = np.arange(6) + turn
        ours, theirs = env.step(actions), [one.step(action) for one, action in zip(alone, actions, strict=True)]
        for name in ("step_type", "reward", "discount", "observation", "prev_action"):
            assert np.array_equal(getattr(ours, name), np.stack([getattr(one, name) for one in theirs]))
        assert np.asarray(ours.env_id).tolist() == list(range(6))
        assert np.asarray(ours.env_info["draw"]).shape == (6,)


def test_a_batch_of_one_is_a_batch(make):
    env = make([functools.partial(Many, size=1)] * 2)
    assert (env.batched, env.batch_size) == (True, 2)
    env.reset()
    assert [types(env.step(zeros(env))) for _ in range(3)] == [[MID, MID], [LAST, LAST], [FIRST, FIRST]]


def test_batched_is_always_true(make):
    assert make([AlfEnv]).batched is True


def test_spare_envs_are_rejected_with_batched_envs(make):
    with pytest.raises(RuntimeError, match="num_spare_envs_for_reload is 1 and the batch_size of each env is 3"):
        make([Many] * 2, num_spare_envs_for_reload=1)


# Calls, attributes, seeds -----------------------------------------------------------------


def test_promises_resolve_to_their_own_call_in_any_order(make, tmp_path):
    env = make([AlfEnv] * 2)
    promises = {(i, n): env.envs[i].call("add", n, times=10) for n in range(20) for i in range(2)}
    for i, n in sorted(promises, key=lambda key: (key[1] * 7) % 20):
        assert promises[i, n]() == i + 10 * n
        assert promises[i, n]() == i + 10 * n  # can be called repeatedly
    waiting = env.envs[0].call("wait_for", str(tmp_path / "go"))
    assert env.envs[1].call("add", 1)() == 2
    (tmp_path / "go").touch()
    assert waiting() == 0


def test_promises_and_steps_do_not_mix(make):
    env = make([AlfEnv] * 2)
    env.reset()
    promise = env.envs[0].call("add", 5)
    assert rows(env.step(zeros(env))) == [(0, 1, 1), (1, 1, 1)]
    assert promise() == 5


def test_a_promise_raises_the_exception_of_the_env(make):
    env = make([AlfEnv] * 2)
    promise = env.envs[1].call("add")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        promise()
    assert env.envs[1].call("add", 1)() == 2


def test_call_envs_with_same_args(make):
    env = make([AlfEnv] * 3, num_spare_envs_for_reload=1)
    assert env.call_envs_with_same_args("add", 2, times=3) == [6, 7]


def test_attribute_access(make):
    env = make([AlfEnv] * 2)
    assert [one.env_id for one in env.envs] == [0, 1]
    assert env.envs[0].metadata == {"render_fps": 7}
    with pytest.raises(AttributeError, match="nothing"):
        _ = env.envs[0].nothing
    with pytest.raises(AttributeError, match="underscore"):
        _ = env.envs[0]._private


def test_a_single_env_steps_and_resets(make):
    env = make([AlfEnv] * 2)
    one = env.envs[1]
    assert one.reset().observation.tolist() == [1, 1, 0, 0]
    assert one.step(np.int64(4)).observation.tolist() == [1, 1, 1, 4]
    assert one.step(np.int64(5), blocking=False)().observation.tolist() == [1, 1, 2, 5]
    assert one.reset(blocking=False)().observation.tolist() == [1, 2, 0, 0]


def test_seed_goes_to_all_envs_and_then_to_the_spare_ones(make):
    env = make([functools.partial(AlfEnv, length=1)] * 3, num_spare_envs_for_reload=1)
    with pytest.raises(ValueError, match="2 seeds for 3 envs"):
        env.seed([1, 2])
    expected = [np.random.default_rng(seed).random() for seed in (4, 5, 6)]
    for _ in range(2):
        assert env.seed([4, 5, 6]) == ["seeded with 4", "seeded with 5", "seeded with 6"]
        assert np.asarray(env.reset().env_info["draw"]).tolist() == expected[:2]
        env.step(zeros(env))
        assert np.asarray(env.step(zeros(env)).env_info["draw"])[0] == expected[2]


def test_a_seed_is_used_by_one_reset(make):
    env = make([AlfEnv])
    env.seed([4])
    rng = np.random.default_rng(4)
    assert [np.asarray(env.reset().env_info["draw"])[0] for _ in range(3)] == [rng.random() for _ in range(3)]


def test_sync_progress(make, tmp_path):
    env = make([functools.partial(Gated, tmp_path / "gate", length=1)] * 3, num_spare_envs_for_reload=1)
    env.reset()
    env.step(zeros(env))
    env.sync_progress()  # two of them reset and are not waited for
    (tmp_path / "gate").touch()
    env.envs[0].sync_progress()
    assert [handle.get("synced").result() for handle in env.actors] == [2, 1, 1]


def test_progress_that_an_env_cannot_set_is_logged(make, caplog):
    class Stubborn(AlfEnv):
        def sync_progress(self):
            raise Complaint("no progress")

    env = make([Stubborn])
    env.sync_progress()
    wait_until(lambda: "no progress" in caplog.text)


def test_render_metadata_and_tasks_are_those_of_env_0(make):
    env = make([AlfEnv] * 2)
    assert env.render().tolist() == np.zeros((2, 2, 3)).tolist()
    assert env.render("human") == "human"
    assert env.envs[1].render("rgb_array")[0, 0, 0] == 1
    assert env.metadata == {"render_fps": 7}
    assert (env.num_tasks, env.task_names) == (2, ("walk", "run"))


def test_close_closes_the_envs_and_may_be_called_again(make, tmp_path):
    log = tmp_path / "log"
    env = make([functools.partial(Logged, log)] * 3, num_spare_envs_for_reload=1)
    pids = env.call_envs_with_same_args("pid")
    env.close()
    env.close()
    assert sorted(log.read_text().split("\n")[-4:-1]) == [f"close {i}" for i in range(3)]
    assert all(map(is_gone, pids))
    with pytest.raises(ea.ActorClosedError):
        env.step(np.zeros(2, np.int64))


@pytest.mark.fresh_processes
def test_close_at_exit(tmp_path, run_warm):
    done = run_warm(
        """
        import functools, pathlib, sys
        sys.modules["torch"] = None  # it takes seconds to load
        sys.path.insert(0, sys.argv[2])
        from alfenvs import Logged
        from envactors.integrations.alf import ActorParallelEnvironment

        env = ActorParallelEnvironment([functools.partial(Logged, pathlib.Path(sys.argv[1]))] * 2)
        env.reset()
        print(*env.call_envs_with_same_args("pid"))
        """,
        str(tmp_path / "log"),
        os.path.dirname(os.path.dirname(__file__)),  # noqa: PTH120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted((tmp_path / "log").read_text().split("\n")[-3:-1]) == ["close 0", "close 1"]
    assert all(is_gone(int(pid)) for pid in done.stdout.split())


# Failures ---------------------------------------------------------------------------------------------


def test_a_killed_worker_is_a_runtime_error_with_its_cause(make):
    env = make([AlfEnv] * 3)
    env.reset()
    env.envs[1].call("want", "die")()
    with pytest.raises(RuntimeError, match=r"ProcessEnvironment is interrupted: .*env 1.*SIGKILL") as caught:
        env.step(zeros(env))
    cause = caught.value.__cause__
    assert isinstance(cause, ea.ActorDiedError)
    assert (cause.index, cause.signal) == (1, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="SIGKILL"):  # as there, that was the end
        env.reset()


def test_a_worker_killed_from_outside_while_idle(make):
    env = make([AlfEnv] * 2, restart=ea.RestartPolicy(max_restarts=1))
    env.reset()
    pid = env.envs[0].call("pid")()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        env.step(zeros(env))
    assert isinstance(caught.value.__cause__, ea.ActorDiedError)
    assert rows(env.reset()) == [(0, 1, 0), (1, 2, 0)]
    assert rows(env.step(zeros(env))) == [(0, 1, 1), (1, 2, 1)]


def test_a_hang_in_c_ends_with_its_deadline(make):
    env = make([AlfEnv] * 2, deadlines=ea.Deadlines(start=None, step=0.5))
    env.reset()
    env.envs[0].call("want", "hang")()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="interrupted") as caught:
        env.step(zeros(env))
    assert time.monotonic() - begun < SOON
    assert isinstance(caught.value.__cause__, ea.ActorTimeoutError)


def test_a_promise_of_a_lost_worker_is_a_runtime_error(make, tmp_path):
    env = make([AlfEnv] * 2)
    promise = env.envs[0].call("wait_for", str(tmp_path / "never"))
    os.kill(env.actors[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="interrupted") as caught:
        promise()
    assert isinstance(caught.value.__cause__, ea.ActorDiedError)


def test_an_exception_in_a_step_is_a_runtime_error_and_the_env_continues(make):
    env = make([AlfEnv] * 2)
    env.reset()
    env.envs[1].call("want", "raise")()
    with pytest.raises(RuntimeError, match="no more steps") as caught:
        env.step(zeros(env))
    assert isinstance(caught.value.__cause__, Complaint)
    assert isinstance(caught.value.__cause__.__cause__, ea.RemoteTraceback)
    assert rows(env.step(zeros(env))) == [(0, 1, 2), (1, 1, 1)]


@pytest.mark.parametrize("what", ["die", "hang", "raise"])
def test_a_renewed_env_ends_its_episode(make, what):
    env = make([functools.partial(AlfEnv, length=9)] * 2, on_failure="renew", deadlines=ea.Deadlines(step=1.0))
    env.reset()
    env.step(zeros(env))
    env.envs[1].call("want", what)()
    lost = env.step(zeros(env))
    assert types(lost) == [MID, LAST]
    assert rows(lost) == [(0, 1, 2), (1, 1, 1)]
    assert (np.asarray(lost.reward).tolist(), np.asarray(lost.discount).tolist()) == ([2, 0], [1, 1])
    kinds = {"die": ea.ActorDiedError, "hang": ea.ActorTimeoutError, "raise": Complaint}
    assert {slot: type(error) for slot, error in env.failures.items()} == {1: kinds[what]}
    fresh = env.step(zeros(env))
    assert types(fresh) == [MID, FIRST]
    assert rows(fresh) == [(0, 1, 3), (1, 1, 0)]
    assert env.failures == {}


def test_a_renewed_batch_ends_all_its_episodes(make):
    env = make([Many] * 2, on_failure="renew")
    env.reset()
    env.envs[0].call("want", "die")()
    assert types(env.step(zeros(env))) == [LAST] * 3 + [MID] * 3
    assert types(env.step(zeros(env)))[:3] == [FIRST] * 3


def test_a_spare_env_takes_the_slot_of_one_that_was_lost(make):
    env = make([functools.partial(AlfEnv, length=9)] * 3, on_failure="renew", num_spare_envs_for_reload=1)
    env.reset()
    env.envs[0].call("want", "die")()
    assert types(env.step(zeros(env))) == [LAST, MID]
    assert rows(env.step(zeros(env))) == [(2, 1, 0), (1, 1, 2)]
    env.envs[1].call("want", "die")()
    assert types(env.step(zeros(env))) == [MID, LAST]
    assert rows(env.step(zeros(env))) == [(2, 1, 2), (0, 1, 0)]


def test_a_replayed_env_continues_as_if_nothing_had_happened(make):
    def run(kill):
        env = make([functools.partial(AlfEnv, length=5)] * 2, on_failure="replay")
        env.seed([3, 4])
        results = [env.reset()]
        for turn in range(12):
            if kill and turn in (3, 9):
                os.kill(env.actors[1].pid, signal.SIGKILL)
            results.append(env.step(np.array([turn, turn])))
            assert env.failures == {}
        incarnations = [actor.incarnation for actor in env.actors]
        return incarnations, [[np.asarray(v).tolist() for v in (*r[:6], r.env_info["draw"])] for r in results]

    (kills_without, expected), (kills_with, result) = run(False), run(True)
    assert (kills_without, kills_with) == ([0, 0], [0, 2])
    assert result == expected


@pytest.mark.fresh_processes
def test_a_killed_caller_leaves_no_resources_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.modules["torch"] = None  # it takes seconds to load
            sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
            import numpy as np
            from alfenvs import AlfEnv
            from envactors.integrations.alf import ActorParallelEnvironment

            env = ActorParallelEnvironment([AlfEnv] * 3, num_spare_envs_for_reload=1)
            env.reset()
            pids = [handle.pid for handle in env.actors]
            env.envs[1].call("want", "hang")()
            print(*pids, flush=True)
            env.step(np.zeros(2, np.int64))
            """  # noqa: PTH120
        )
    )
    caller = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in caller.stdout.readline().split()]
    assert len(pids) == 3
    wait_until(lambda: sum(psutil.Process(pids[1]).cpu_times()[:2]) > 0.3)  # it is in the middle of its loop
    caller.kill()
    caller.wait()
    caller.stdout.close()
    wait_until(lambda: all(map(is_gone, pids)))


# torch, and alf -------------------------------------------------------------------------------------------


def test_results_are_torch_tensors_and_so_may_actions_be(make):
    torch = pytest.importorskip("torch")

    class Torch(AlfEnv):
        def action_spec(self):
            return TensorSpec((2,), torch.float32)

        def reset(self):
            return self.shown(np.zeros(2, np.float32))

        step = lambda self, action: self.shown(action)  # noqa: E731

        def shown(self, action):
            assert (type(action), action.dtype) == (np.ndarray, np.float32)
            return super().show(StepType.MID, 1, action[0])._replace(prev_action=action)

    env = make([Torch] * 2)
    assert env.is_tensor_based
    assert env.action_spec().dtype is torch.float32
    env.reset()
    for dtype in (torch.float16, torch.float32, torch.float64):
        time_step = env.step(torch.tensor([[1, 2], [3, 4]], dtype=dtype, requires_grad=True))
        values = [*time_step[:6], time_step.env_info["draw"]]
        assert all(type(value) is torch.Tensor and value.is_contiguous() for value in values)
        assert time_step.prev_action.tolist() == [[1, 2], [3, 4]]
    flipped = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T
    assert env.step(flipped).prev_action.tolist() == [[1, 2], [3, 4]]
    time_step.observation.zero_()  # its memory is the result's alone


def test_without_torch_results_are_numpys(run_warm):
    done = run_warm(
        """
        import sys
        sys.modules["torch"] = None
        sys.path.insert(0, sys.argv[1])
        import numpy as np
        from alfenvs import AlfEnv
        from envactors.integrations.alf import ActorParallelEnvironment

        with ActorParallelEnvironment([AlfEnv] * 2) as env:
            assert not env.is_tensor_based
            env.reset()
            time_step = env.step(np.array([1, 2]))
            assert all(type(value) is np.ndarray for value in time_step[:6])
            assert time_step.observation.flags.owndata
        """,
        os.path.dirname(os.path.dirname(__file__)),  # noqa: PTH120
    )
    assert (done.returncode, done.stderr) == (0, "")


ALF = {
    "__init__.py": """
        device = "cpu"

        def get_default_device():
            return device

        def set_default_device(name):
            global device
            device = name
        """,
    "data_structures.py": """
        import collections

        names = "step_type reward discount observation prev_action env_id untransformed env_info"
        Fields = collections.namedtuple("Fields", names, defaults=((),) * 8)

        class TimeStep(Fields):
            pass
        """,
    "environments/__init__.py": "",
    "environments/alf_environment.py": """
        import abc

        class AlfEnvironment(abc.ABC):
            def __init__(self):
                self._current_time_step = None

            @abc.abstractmethod
            def observation_spec(self): ...

            @abc.abstractmethod
            def action_spec(self): ...

            @abc.abstractmethod
            def env_info_spec(self): ...

            @abc.abstractmethod
            def _step(self, action): ...

            @abc.abstractmethod
            def _reset(self): ...
        """,
    "utils/__init__.py": "",
    "utils/schedulers.py": """
        progress = {}

        def get_all_progresses():
            return [("percent", 0.25)]

        def update_all_progresses(progresses):
            progress.update(progresses)
        """,
}


@pytest.fixture
def path_with_alf(tmp_path):
    """Where a package stands with the few names of ALF that the drop-in uses."""
    for name, code in ALF.items():
        file = tmp_path / "alf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(code))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.path.dirname(os.path.dirname(__file__))])}  # noqa: PTH120


def test_with_alf_it_is_an_alf_environment_and_gives_alfs_time_steps(path_with_alf):
    done = run_script(
        """
        import sys
        sys.modules["torch"] = None  # it takes seconds to load
        import numpy as np
        from alf.data_structures import TimeStep
        from alf.environments.alf_environment import AlfEnvironment
        from alfenvs import AlfEnv
        from envactors.integrations.alf import ActorParallelEnvironment

        class Scheduled(AlfEnv):
            def progress(self):
                from alf.utils.schedulers import progress
                return progress

        with ActorParallelEnvironment([Scheduled] * 2) as env:
            assert isinstance(env, AlfEnvironment)
            env.reset()
            assert type(env.step(np.zeros(2, np.int64))) is TimeStep
            env.sync_progress()
            assert env.call_envs_with_same_args("progress") == [{"percent": 0.25}] * 2
            assert [one.synced for one in env.envs] == [1, 1]
        """,
        env=path_with_alf,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_with_alf_results_are_on_alfs_device_and_workers_on_the_processor(path_with_alf):
    pytest.importorskip("torch")
    done = run_script(
        """
        import alf, torch
        from alfenvs import AlfEnv
        from envactors.integrations.alf import ActorParallelEnvironment

        class Placed(AlfEnv):
            def device(self):
                import alf
                return alf.get_default_device()

        alf.set_default_device("meta")
        with ActorParallelEnvironment([Placed]) as env:
            time_step = env.reset()
            assert time_step.observation.device.type == "meta"
            assert time_step._cpu.observation.tolist() == [[0, 1, 0, 0]]
            assert env.call_envs_with_same_args("device") == ["cpu"]
        """,
        env=path_with_alf,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_package_called_alf_is_none(tmp_path):
    (tmp_path / "alf.py").touch()
    done = run_script(
        """
        import sys
        sys.modules["torch"] = None  # it takes seconds to load
        from alfenvs import AlfEnv
        from envactors.integrations.alf import ActorParallelEnvironment, TimeStep

        with ActorParallelEnvironment([AlfEnv]) as env:
            assert type(env.reset()) is TimeStep
            env.sync_progress()
        """,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.path.dirname(os.path.dirname(__file__))])},  # noqa: PTH120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_of_all_dtypes_arrive_as_they_are(make):
    names = ["bool", *(f"{u}int{n}" for n in (8, 16, 32, 64) for u in ("", "u")), "float16", "float32", "float64"]
    values = {name: np.dtype(name).type(1 if name == "bool" else 100) for name in names}

    class Numbers(AlfEnv):
        def show(self, *args):
            return super().show(*args)._replace(env_info=values)

    env = make([functools.partial(Numbers, env_info={name: TensorSpec((), name) for name in names})] * 2)
    for time_step in (env.reset(), env.step(zeros(env))):
        for name, value in time_step.env_info.items():
            assert (np.asarray(value).dtype.name, np.asarray(value).tolist()) == (name, [values[name]] * 2)
        assert rows(time_step)[1][0] == 1


@pytest.mark.parametrize("odd", [0.5, 1 << 40, "one", np.zeros(1, np.int32)])
def test_a_number_that_does_not_fit_is_reported(make, odd):
    class Odd(AlfEnv):
        def show(self, *args):
            return super().show(*args)._replace(env_info={"n": odd})

    with pytest.raises(RuntimeError, match=r"env_info\['n'\] (has|is)"):
        make([functools.partial(Odd, env_info={"n": TensorSpec((), "int32")})]).reset()


def test_no_more_envs_run_at_once_than_allowed(make, tmp_path):
    env = make([clocked(AlfEnv, tmp_path / "log")] * 5, num_spare_envs_for_reload=1, max_running=2)
    env.reset()
    for _ in range(8):
        env.step(zeros(env))
    promises = [single.step(np.int64(0), blocking=False) for single in env.envs]
    assert [int(promise().observation[0]) for promise in promises] == [0, 1, 2, 3]
    assert most_at_once(tmp_path / "log") == 2


def test_slots_say_the_seeds_of_their_episodes(make):
    env = make([AlfEnv] * 3, num_spare_envs_for_reload=1, seed_episodes=True)
    env.seed([10, 11, 12])
    env.reset()
    assert env.episode_seeds == {0: 10, 1: 11}
    draws, seeds = [], []
    for _ in range(12):
        step = env.step(zeros(env))
        for slot in np.flatnonzero(np.asarray(step.step_type) == FIRST).tolist():
            seeds.append(env.episode_seeds[slot])
            draws.append(float(step.env_info["draw"][slot]))
    assert len(set(seeds)) == len(seeds) > 4
    assert set(seeds) < {episode_seed(root, number) for root in (10, 11, 12) for number in range(6)}
    assert draws == [np.random.default_rng(seed).random() for seed in seeds]


def test_envs_that_reset_themselves_have_no_seeds_for_episodes(make):
    with pytest.raises(RuntimeError, match="seed_episodes"):
        make([functools.partial(AlfEnv, batched=True, batch_size=2)], seed_episodes=True)
