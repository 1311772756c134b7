"""The drop-in for DI-engine: the behavior that its users rely on; most of it needs no DI-engine."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
from dingenvs import Bare, Complaint, Env, Late, Nested, Rewarding, Teller
from helpers import FORK_SERVER, SOON, clocked, episode_seed, most_at_once, run_script, wait_until

import envactors as ea
from envactors.process import starting
from envactors.remote import LocalNodes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DI-engine's and its dependencies', where it is installed
    from envactors.integrations.ding import ActorEnvManagerV2, AsyncActorEnvManager, SyncActorEnvManager
    from envactors.integrations.ding.values import BaseEnvTimestep, EnvState, tnp

BOTH = pytest.mark.parametrize("manager", [AsyncActorEnvManager, SyncActorEnvManager])
PLAIN = np.zeros(2, np.float32)


def envs(count=2, kind=Env, **kwargs):
    return [functools.partial(kind, index, **kwargs) for index in range(count)]


@pytest.fixture
def make():
    """Makes managers that are closed in the end, launched unless asked otherwise."""
    made = []

    def make_one(manager=SyncActorEnvManager, env_fn=None, *, launch=True, **options):
        if "context" not in options:
            options.setdefault("backend", FORK_SERVER)
        made.append(manager(envs() if env_fn is None else env_fn, manager.default_config(), **options))
        if launch:
            made[-1].launch()
        return made[-1]

    yield make_one
    for manager in made:
        manager.close()


def step(manager, *ids, action=PLAIN):
    return manager.step(dict.fromkeys(ids, action))


def until(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Construction ---------------------------------------------------------------------------------------------


@BOTH
def test_nothing_starts_before_launch(manager):
    before = psutil.Process().children(recursive=True)
    env_manager = manager(envs(), manager.default_config())
    env_manager.seed(3)
    env_manager.enable_save_replay("somewhere")
    assert (env_manager.env_num, env_manager.closed, env_manager._closed) == (2, True, True)
    assert psutil.Process().children(recursive=True) == before


def test_spaces_and_env_ref_may_be_read_before_launch_from_one_worker(make, tmp_path):
    manager = make(env_fn=envs(3, closed=tmp_path / "closed"), launch=False)
    assert manager.observation_space.shape == (3,)
    pid = manager._env_ref.pid
    assert pid != os.getpid()
    assert manager._env_ref.user_defined(5) == 5
    assert (manager.env_ref._hidden, manager.env_ref.pid) == ("hidden 0", pid)
    assert (manager.action_space.shape, manager.reward_space.shape) == ((2,), (1,))
    manager.launch()
    assert (tmp_path / "closed").exists()
    assert pid not in manager.pid
    assert manager._env_ref.pid == manager.pid[0]
    with pytest.raises(AttributeError):
        manager._env_ref.nowhere  # noqa: B018


class Placed(Bare):
    def __init__(self):
        super().__init__()
        self.device = os.environ.get("DEVICE")


@pytest.mark.parametrize("env_vars", [lambda index: {"DEVICE": str(index)}, [{"DEVICE": "0"}, None]])
def test_the_env_that_is_read_before_launch_has_the_variables_of_the_first(make, env_vars):
    manager = make(env_fn=[Placed] * 2, launch=False, env_vars=env_vars)
    assert manager._env_ref.device == "0"


def test_default_config_and_relaunch_after_close(make):
    config = AsyncActorEnvManager.default_config()
    config.episode_num = 2
    assert (config.cfg_type, config["episode_num"]) == ("AsyncActorEnvManagerDict", 2)
    assert AsyncActorEnvManager.default_config().episode_num == float("inf")
    manager = make()
    first = manager.pid
    step(manager, 0, 1)
    manager.close()
    manager.close()
    assert manager._env_states == dict.fromkeys(range(2), EnvState.VOID)
    manager.launch()
    assert not {*first} & {*manager.pid}
    assert [obs.tolist() for obs in manager.ready_obs.values()] == [[0, 0, 0], [1, 0, 0]]


def test_refusals_are_assertion_errors(make):
    for wrong in ({"retry_type": "again"}, {"on_failure": "ignore"}, {"auto_reset": False, "reset_inplace": True}):
        with pytest.raises(AssertionError):
            SyncActorEnvManager(envs(), SyncActorEnvManager.default_config(), **wrong)
    with pytest.raises(AssertionError):
        SyncActorEnvManager([], {})
    with pytest.raises(TypeError, match="retries"):
        SyncActorEnvManager(envs(), {}, retries=2)
    manager = make(launch=False)
    for call in (lambda: manager.reset([]), lambda: manager.step([]), lambda: manager.ready_obs, lambda: manager.index):
        with pytest.raises(AssertionError, match="launch"):
            call()
    manager.launch()
    with pytest.raises(AssertionError, match=r"call close\(\) first"):
        manager.launch()
    for call in (lambda: step(manager, 0, 7), lambda: manager.reset({7: None}), lambda: manager.reset({0: 3})):
        with pytest.raises(AssertionError):
            call()
    assert list(step(manager, 0, 1)) == [0, 1]


def test_a_failed_background_reset_is_raised_at_the_next_call(make):
    manager = make(env_fn=envs(length=1))
    manager.reset({0: {"first": None}, 1: None})
    manager._reset_param[0] = {"always": ("raise", 5)}
    step(manager, 0, 1)
    with pytest.raises(RuntimeError, match="asked to") as caught:
        until(lambda: manager.done)
    assert isinstance(caught.value.__cause__, Complaint)
    assert manager.closed


def test_a_step_that_raises_closes_and_raises_the_envs_own_error(make):
    manager = make()
    with pytest.raises(Complaint) as caught:
        manager.step({0: PLAIN, 1: ("raise", 5)})
    assert caught.value.code == 5
    assert "misbehave" in str(caught.value.__cause__)
    assert manager.closed
    assert manager._env_states[1] == EnvState.VOID


def test_cfg_has_the_defaults_of_di_engine():
    alike = {
        "episode_num": float("inf"),
        "max_retry": 1,
        "retry_type": "reset",
        "retry_waiting_time": 0.1,
        "auto_reset": True,
        "step_timeout": None,
        "reset_timeout": None,
        "shared_memory": True,
        "copy_on_get": True,
        "connect_timeout": 60,
        "reset_inplace": False,
    }
    ours = {
        "context": starting.DEFAULT,
        "on_failure": "raise",
        "restart": ea.RestartPolicy(max_restarts=10, backoff_max=5.0),
    }
    ours |= {"seed_episodes": False, "max_running": None, "backend": None}
    ours |= {"recycle": None, "standbys": 0, "snapshot": None, "env_vars": None, "name": None, "crash_dir": None}
    waits = {"wait_num": 2, "step_wait_timeout": 0.01}
    waits_for_all = {"wait_num": float("inf"), "step_wait_timeout": None}
    assert AsyncActorEnvManager.config == {**alike, **waits, **ours}
    assert SyncActorEnvManager.config == ActorEnvManagerV2.config == {**alike, **waits_for_all, **ours}


@pytest.mark.parametrize(
    ("context", "method"), [("loky", "loky"), *((name, starting.DEFAULT) for name in ("fork", "spawn", "forkserver"))]
)
def test_context_names_a_start_method(make, context, method):
    manager = make(context=context)
    assert manager.vector.actors[0]._actor.config.backend.start_method == method
    assert list(step(manager, 0, 1)) == [0, 1]


def test_any_backend(make):
    manager = make(backend=ea.RemoteBackend(LocalNodes(2)))
    assert list(step(manager, 0, 1)) == [0, 1]
    assert sorted(actor.node for actor in manager.vector.actors) == ["local-0", "local-1"]


@pytest.mark.parametrize("copy_on_get", [True, False])
def test_copy_on_get(make, copy_on_get):
    manager = make(env_fn=envs(length=1000), copy_on_get=copy_on_get)
    first = step(manager, 0, 1)[0].obs
    assert first[1] == 1
    for _ in range(2):
        step(manager, 0, 1)
    assert first[1] == (1 if copy_on_get else 3)


# Launching, states ----------------------------------------------------------------------------------------


@BOTH
def test_launch_needs_a_closed_manager_and_one_entry_an_env(make, manager):
    env_manager = make(manager, launch=False)
    with pytest.raises(AssertionError, match="one per env"):
        env_manager.launch({0: {}})
    env_manager.launch({0: {"stat": 1}, 1: {"stat": 2}})
    assert env_manager.resets == [[{"stat": 1}], [{"stat": 2}]]


def test_states(make, tmp_path):
    manager = make(launch=False, env_fn=envs(length=1), episode_num=2)
    assert [*EnvState] == list(range(7))
    assert manager._env_states == dict.fromkeys(range(2), EnvState.VOID)
    manager.launch()
    assert manager._env_states == dict.fromkeys(range(2), EnvState.RUN)
    manager._reset_param[0] = {"always": ("wait", tmp_path / "go")}
    step(manager, 0)
    assert manager._env_states == {0: EnvState.RESET, 1: EnvState.RUN}
    manager.step({1: ("return", None, None, True, {"abnormal": True})})
    assert manager._env_states[1] == EnvState.ERROR
    (tmp_path / "go").touch()
    until(lambda: manager._env_states[0] == EnvState.RUN)
    step(manager, 0)
    assert manager._env_states[0] == EnvState.DONE
    assert manager.env_state_done(0)
    assert not manager.done


def test_ready_obs_ready_env_and_ready_obs_id(make, tmp_path):
    manager = make(AsyncActorEnvManager, env_fn=envs(2, length=2), episode_num=1, wait_num=1)
    assert manager.active_env == manager.ready_env == manager.ready_obs_id == [0, 1]
    assert list(manager.step({0: PLAIN, 1: ("wait", tmp_path / "go")})) == [0]
    assert manager.ready_env == manager.ready_obs_id == list(manager.ready_obs) == [0]
    assert manager.active_env == [0, 1]
    assert manager.ready_obs[0].tolist() == [0, 1, 0]
    with pytest.raises(AssertionError, match="have a pending step"):
        step(manager, 1)
    assert list(manager.step({0: ("return", None, None, None, {"abnormal": True})})) == [0]
    assert manager.ready_obs == {}  # the other step is pending
    (tmp_path / "go").touch()
    assert list(manager.step({})) == [1]
    manager.reset({0: None})
    for _ in range(2):
        timesteps = step(manager, *manager.ready_obs)
        while manager._states.waiting:
            timesteps |= manager.step({})
    assert manager.done
    assert manager.ready_obs == {}  # where there it never ends


def test_ready_obs_waits_while_no_env_is_in_run(make, tmp_path):
    manager = make(env_fn=envs(length=1))
    param = {"always": ("wait", tmp_path / "go")}
    manager._reset_param = dict.fromkeys(range(2), param)
    step(manager, 0, 1)
    assert manager.active_env == []
    timer = threading.Timer(0.2, (tmp_path / "go").touch)
    timer.start()
    assert 0 < len(manager.ready_obs) <= 2
    timer.join()


def test_ready_imgs(make):
    assert make().ready_imgs == {0: "rgb_array 0", 1: "rgb_array 1"}


# Stepping -------------------------------------------------------------------------------------------------


@BOTH
def test_step_takes_any_subset_and_gives_timesteps(make, manager):
    env_manager = make(manager, env_fn=envs(3))
    timesteps = step(env_manager, 2, 0)
    assert sorted(timesteps) == [0, 2]
    assert type(timesteps[2]) is BaseEnvTimestep
    obs, reward, done, info = timesteps[2]
    assert (obs.dtype, obs.tolist(), done, info) == (np.float32, [2, 1, 0], False, {})
    assert (reward.dtype, reward.tolist()) == (np.float32, [0.5])
    assert env_manager.steps == [1, 0, 1]
    env_manager.step({1: ("return", None, None, True, {"abnormal": True})})
    with pytest.raises(AssertionError, match="'ERROR'"):
        step(env_manager, 0, 1)


def test_step_returns_values_that_do_not_fit_the_spaces_unchanged(make):
    manager = make(env_fn=envs(kind=Rewarding, length=1000))
    for reward in (1.5, 2, True, 2**60, np.float32(0.1), np.float64(0.1), np.array([0.1]), np.array([1, 2]), "much"):
        timesteps = manager.step({0: ("reward", reward), 1: ("reward", reward)})
        for timestep in timesteps.values():
            assert type(timestep.reward) is type(reward)
            assert np.array_equal(timestep.reward, reward)
            assert getattr(timestep.reward, "dtype", None) == getattr(reward, "dtype", None)
    obs = {"else": [1, 2]}
    timesteps = manager.step({0: ("reward", 1.0), 1: ("return", obs, 1.0, False, {"n": 1})})
    assert timesteps[1] == (obs, 1.0, False, {"n": 1})
    assert manager.ready_obs[1] == obs


@pytest.mark.parametrize("kind", [Bare, Env, Late])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_step_of_envs_with_and_without_spaces(make, kind, shared_memory):
    manager = make(env_fn=envs(kind=kind), shared_memory=shared_memory)
    for count in (1, 2, 3):
        timesteps = step(manager, 0, 1)
        assert [timestep.obs.tolist() for timestep in timesteps.values()] == [[0, count, 0], [1, count, 0]]
        assert [timestep.reward.tolist() for timestep in timesteps.values()] == [[count / 2]] * 2
    assert timesteps[1].done
    assert len(manager.ready_obs) > 0


def test_async_steps_may_return_earlier_unfinished_ones(make, tmp_path):
    manager = make(AsyncActorEnvManager, env_fn=envs(3), wait_num=1)
    assert list(manager.step({0: PLAIN, 1: ("wait", tmp_path / "go")})) == [0]
    (tmp_path / "go").touch()
    came = manager.step({2: PLAIN})
    while len(came) < 2:
        came |= manager.step({})
    assert sorted(came) == [1, 2]
    assert came[1].obs.tolist() == [1, 1, 0]


def test_wait_num_and_step_wait_timeout(make, tmp_path):
    go = tmp_path / "go"
    manager = make(AsyncActorEnvManager, env_fn=envs(4), wait_num=2, step_wait_timeout=0.3)
    begun = time.monotonic()
    came = manager.step({0: PLAIN, 1: PLAIN, 2: PLAIN, 3: ("wait", go)})
    assert sorted(came) == [0, 1, 2]
    assert time.monotonic() - begun >= 0.3  # enough had come, and the time had not passed
    go.touch()
    assert sorted(manager.step({})) == [3]
    go.unlink()
    timer = threading.Timer(0.6, go.touch)
    timer.start()
    begun = time.monotonic()
    assert sorted(manager.step({0: PLAIN, 1: ("wait", go)})) == [0, 1]
    assert time.monotonic() - begun > 0.3  # the time had passed, and not enough had come
    timer.join()


def test_step_wait_timeout_none_waits_for_all(make, tmp_path):
    manager = make(AsyncActorEnvManager, env_fn=envs(2), wait_num=1, step_wait_timeout=None)
    timer = threading.Timer(0.3, (tmp_path / "go").touch)
    timer.start()
    assert sorted(manager.step({0: PLAIN, 1: ("wait", tmp_path / "go")})) == [0, 1]
    timer.join()


def test_a_step_continues_while_all_received_results_are_done(make, tmp_path):
    manager = make(AsyncActorEnvManager, env_fn=[*envs(1, length=1), *envs(2, length=9)[1:]], wait_num=1)
    timer = threading.Timer(0.3, (tmp_path / "go").touch)
    timer.start()
    came = manager.step({0: PLAIN, 1: ("wait", tmp_path / "go")})
    assert {env_id: timestep.done for env_id, timestep in came.items()} == {0: True, 1: False}
    timer.join()


# Ending episodes, resetting -------------------------------------------------------------------------------


@BOTH
def test_done_with_auto_reset(make, manager, tmp_path):
    env_manager = make(manager, env_fn=envs(1), episode_num=2)
    env_manager._reset_param[0] = {"always": ("wait", tmp_path / "go")}
    for _ in range(3):
        timesteps = step(env_manager, 0)
    assert (timesteps[0].done, timesteps[0].obs.tolist()) == (True, [0, 3, 0])
    assert env_manager._env_states[0] == EnvState.RESET
    assert env_manager._env_episode_count == {0: 1}
    (tmp_path / "go").touch()
    assert env_manager.ready_obs[0].tolist() == [0, 0, 0]
    for _ in range(3):
        assert not env_manager.done
        step(env_manager, 0)
    assert env_manager.done
    assert env_manager._env_states[0] == EnvState.DONE
    assert len(env_manager.resets[0]) == 2


def test_at_episode_num_an_env_is_done_without_auto_reset_too(make):
    manager = make(env_fn=envs(1, length=1), episode_num=1, auto_reset=False)
    step(manager, 0)
    assert manager.done


def test_reset_inplace(make):
    manager = make(env_fn=envs(length=2), reset_inplace=True, episode_num=2)
    step(manager, 0, 1)
    timesteps = step(manager, 0, 1)
    assert [timestep.done for timestep in timesteps.values()] == [True, True]
    assert timesteps[1].obs.tolist() == manager.ready_obs[1].tolist() == [1, 0, 0]
    assert manager.active_env == [0, 1]
    step(manager, 0, 1)
    step(manager, 0, 1)
    assert manager.done


def test_auto_reset_false_needs_reset(make):
    manager = make(env_fn=envs(length=1), auto_reset=False)
    step(manager, 0)
    assert manager._env_states == {0: EnvState.NEED_RESET, 1: EnvState.RUN}
    with pytest.raises(AssertionError, match="NEED_RESET"):
        step(manager, 0)
    manager.reset({0: {"stat": 1}})
    step(manager, 0)
    manager.reset({0: None})
    assert manager.active_env == [0, 1]
    assert manager.resets[0] == [{}, {"stat": 1}, {}]


def test_reset_remembers_parameters_for_automatic_resets(make):
    manager = make(env_fn=envs(length=1))
    manager.reset({1: {"stat": 1}})
    step(manager, 0, 1)
    until(lambda: manager.active_env == [0, 1])
    manager.reset()
    assert manager.resets == [[{}, {}, {}], [{}, {"stat": 1}, {"stat": 1}, {"stat": 1}]]


def test_reset_drops_a_pending_steps_result(make, tmp_path):
    manager = make(AsyncActorEnvManager, wait_num=1)
    assert list(manager.step({0: PLAIN, 1: ("wait", tmp_path / "go")})) == [0]
    (tmp_path / "go").touch()
    manager.reset({1: None})
    assert manager.ready_obs[1].tolist() == [1, 0, 0]
    assert list(step(manager, 1)) == [1]
    assert manager.step({}) == {}


def test_resets_run_side_by_side(make, tmp_path):
    manager = make()
    here, there = tmp_path / "here", tmp_path / "there"
    # Each waits for what the other leaves.
    both = {0: {"first": ("wait", there), "mark": here}, 1: {"first": ("wait", here), "mark": there}}
    manager.reset(both)
    assert manager.active_env == [0, 1]


def test_retries_up_to_max_retry_in_the_same_process(make, tmp_path):
    manager = make(max_retry=2, retry_waiting_time=0.0, shared_memory=False)
    pids = manager.pid
    manager.reset({0: {"first": ("raise", 5), "mark": tmp_path / "mark"}})
    assert manager.pid == pids
    assert len(manager.resets[0]) == 3
    with pytest.raises(RuntimeError, match=r"max_retry=2.*asked to") as caught:
        manager.reset({0: {"always": ("raise", 5)}})
    assert isinstance(caught.value.__cause__, Complaint)
    assert manager.closed


def test_retries_by_renew_take_a_new_process(make, tmp_path):
    manager = make(max_retry=2, retry_waiting_time=0.0, retry_type="renew")
    pids = manager.pid
    manager.reset({0: {"first": ("raise", 5), "mark": tmp_path / "mark"}})
    assert (manager.pid[0] != pids[0], manager.pid[1] == pids[1]) == (True, True)
    assert manager.who == [1, 0]


def test_a_process_that_crashes_in_a_reset_is_a_failed_attempt(make, tmp_path):
    manager = make(max_retry=2, retry_waiting_time=0.0)
    manager.reset({0: {"first": ("die",), "mark": tmp_path / "mark"}})
    assert manager.who == [1, 0]
    with pytest.raises(RuntimeError) as caught:
        manager.reset({0: {"always": ("die",)}})
    assert isinstance(caught.value.__cause__, ea.ActorDiedError)


def test_no_answer_in_connect_timeout_is_a_failed_try(make, tmp_path):
    manager = make(max_retry=2, retry_waiting_time=0.0, connect_timeout=0.4)
    manager.reset({0: {"first": ("hang",), "mark": tmp_path / "mark"}})
    assert manager.who == [1, 0]
    with pytest.raises(RuntimeError) as caught:
        manager.reset({1: {"always": ("sleep",)}})
    assert isinstance(caught.value.__cause__, ea.ActorTimeoutError)
    assert manager.closed


def test_an_env_that_cannot_be_made_is_a_runtime_error(make):
    manager = make(env_fn=[Env, functools.partial(Env, 1, nonsense=1)], launch=False)
    with pytest.raises(RuntimeError) as caught:
        manager.launch()
    assert isinstance(caught.value.__cause__, ea.ActorStartError)
    assert manager.closed


# Failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "info",
    [{"abnormal": True}, [{"abnormal": True}, {}], ({}, {"abnormal": True})],
    ids=["one agent", "the first of two", "the second of two"],
)
def test_abnormal_timesteps(make, info):
    manager = make()
    timesteps = manager.step({0: ("return", None, None, True, info), 1: PLAIN})
    assert timesteps[0] == (None, None, True, info)
    assert manager._env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    assert list(manager.ready_obs) == [1]
    manager.reset({0: None})
    assert list(manager.ready_obs) == [0, 1]
    assert manager.who == [0, 0]


@BOTH
def test_an_unreadable_reply_becomes_an_abnormal_timestep_and_a_new_process(make, manager):
    env_manager = make(manager)
    timesteps = env_manager.step({0: ("unreadable",), 1: PLAIN})
    assert timesteps[0] == (None, None, None, {"abnormal": True})
    assert env_manager._env_states[0] == EnvState.ERROR
    env_manager.reset({0: None})
    assert env_manager.who == [1, 0]
    assert sorted(step(env_manager, 0, 1)) == [0, 1]


@BOTH
@pytest.mark.parametrize("how", ["sleep", "hang", "sleep in C"])
def test_step_timeout_with_a_fraction_of_a_second(make, manager, how):
    env_manager = make(manager, step_timeout=0.4)
    pids = env_manager.pid
    begun = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        env_manager.step({0: (how,)})
    assert isinstance(caught.value, ea.ActorTimeoutError)
    assert 0.4 <= time.monotonic() - begun < SOON
    assert env_manager.closed
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("how", ["sleep", "hang"])
def test_timeouts_work_off_the_main_thread(make, how):
    manager = make(step_timeout=0.4, reset_timeout=0.4)
    raised = []

    def run():
        for call in (lambda: manager.reset({1: {"always": (how,)}}), lambda: manager.step({0: (how,)})):
            manager.close()
            manager.launch()
            try:
                call()
            except Exception as error:
                raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(error) for error in raised] == [RuntimeError, ea.ActorTimeoutError]
    assert isinstance(raised[0].__cause__, ea.ActorTimeoutError)


@BOTH
def test_a_killed_worker_is_raised_and_closes(make, manager):
    env_manager = make(manager)
    with pytest.raises(ea.ActorDiedError) as caught:
        env_manager.step({0: ("die",), 1: PLAIN})
    assert (caught.value.index, caught.value.signal) == (0, signal.SIGKILL)
    assert env_manager.closed
    env_manager.launch()
    os.kill(env_manager.pid[1], signal.SIGKILL)
    with pytest.raises(ea.ActorDiedError):
        for _ in range(100):
            step(env_manager, 0, 1)
            env_manager.reset({0: None})


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_reset_renews_an_env_whose_worker_was_killed(make, is_noticed):
    """It used to count as a failed reset if the kill was noticed only after the request was sent."""
    manager = make()
    os.kill(manager.pid[1], signal.SIGKILL)
    if is_noticed:
        until(lambda: manager.vector[1].state is ea.ActorState.DEAD)
    manager.reset({1: None})
    assert manager.who == [0, 1]


@BOTH
@pytest.mark.parametrize("how", [("die",), ("hang",), ("raise", 5)], ids=["killed", "hung in C", "raised"])
def test_on_failure_renew_keeps_the_manager_open(make, manager, how):
    env_manager = make(manager, on_failure="renew", step_timeout=0.4)
    timesteps = env_manager.step({0: how, 1: PLAIN})
    while 0 not in timesteps:
        timesteps |= env_manager.step({})
    obs, reward, done, info = timesteps[0]
    assert (obs, reward, done, info["abnormal"]) == (None, None, None, True)
    kinds = {"die": ea.ActorDiedError, "hang": ea.ActorTimeoutError, "raise": Complaint}
    assert isinstance(info["failure"], kinds[how[0]])
    assert env_manager._env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    env_manager.reset({0: None})
    assert env_manager.who == [1, 0]
    assert sorted(step(env_manager, 0, 1)) == [0, 1]


def test_on_failure_renew_ends_with_the_restarts(make):
    manager = make(on_failure="renew", restart=ea.RestartPolicy(max_restarts=1, backoff=0.0))
    assert manager.step({0: ("die",)})[0].info["abnormal"]
    manager.reset({0: None})
    with pytest.raises(ea.ActorDiedError):
        manager.step({0: ("die",)})
    assert manager.closed


def test_a_killed_caller_leaves_no_resources_behind(run_warm):
    script = f"""
        import functools, os, signal, sys, warnings
        warnings.simplefilter("ignore")
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from dingenvs import Env
        from envactors.integrations.ding import SyncActorEnvManager
        manager = SyncActorEnvManager([functools.partial(Env, i) for i in range(2)], {{"context": "loky"}})
        manager.launch()
        print(*manager.pid, flush=True)
        manager._reset_param[0] = {{"always": ("hang",)}}
        manager._begin_reset(0)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_warm(script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


# Seeding, attributes --------------------------------------------------------------------------------------


def test_seeds_are_an_int_a_list_or_a_dict(make):
    manager = make(launch=False)
    manager.seed(5)
    manager.launch()
    assert manager.seeded == [5, 6]
    manager.seed([7, 8])
    assert manager.seeded == [5, 6]  # sent at the next reset
    manager.reset({0: None})
    assert manager.seeded == [7, 6]
    manager.seed({1: 20}, dynamic_seed=False)
    manager.reset()
    assert manager.seeded == [7, 20]
    assert manager.dynamic_seed == [None, False]
    with pytest.raises(AssertionError):
        manager.seed([1])
    with pytest.raises(TypeError):
        manager.seed("1")


@pytest.mark.parametrize("seeds", [-1, [1, -3], [1.5, 2], {0: "3"}, {1: -1}, [True, 2]])
def test_invalid_seeds_are_refused_at_once_and_forgotten(make, seeds):
    """They used to be refused at the launch, and again at each later reset, whatever its seeds."""
    manager = make(launch=False)
    with pytest.raises(ea.VectorInputError, match="seed has"):
        manager.seed(seeds)
    manager.seed([5, 6])
    manager.launch()
    assert [obs[2] for obs in manager.ready_obs.values()] == [5, 6]


def test_a_failing_seed_is_only_logged(make, caplog):
    manager = make(launch=False)
    manager.seed([13, 14])
    with caplog.at_level(logging.WARNING):
        manager.launch()
    assert "13 brings bad luck" in caplog.text
    assert manager.seeded == [0, 14]
    assert manager.active_env == [0, 1]


def test_seeds_are_kept_for_renewals(make):
    def seeds():
        manager = make(on_failure="renew", launch=False)
        manager.seed(5)
        manager.launch()
        manager.step({0: ("die",)})
        manager.reset({0: None})
        return manager.seeded

    first, second = seeds()
    assert first not in (0, 5)  # each process has another one
    assert (second, [first, second]) == (6, seeds())


def test_attributes_are_one_value_an_env(make):
    manager = make()
    assert manager.index == [0, 1]
    assert manager._hidden == ["hidden 0", "hidden 1"]
    with pytest.raises(AttributeError, match="xxx"):
        manager.xxx  # noqa: B018
    assert not hasattr(manager, "xxx")
    with pytest.raises(RuntimeError, match="method_name_list"):
        manager.user_defined()
    assert manager.reward_shaping(1, [5]) == [5, 1]
    manager.enable_save_figure(0, "figures")
    assert manager._env_ref.figure_path == "figures"
    assert not manager.closed

    class Manager(SyncActorEnvManager):
        @property
        def method_name_list(self):
            return [*super().method_name_list, "user_defined"]

    assert make(Manager).user_defined(5) == [5, 6]


@pytest.mark.parametrize("paths", ["replays", ["here", "there"]])
def test_replay_settings_survive_a_renewal(make, paths):
    manager = make(launch=False, on_failure="renew")
    manager.enable_save_replay(paths)
    manager.launch()
    each = [paths] * 2 if isinstance(paths, str) else paths
    assert manager.replay_path == each
    manager.step({0: ("die",)})
    manager.reset({0: None})
    assert manager.who == [1, 0]
    assert manager.replay_path == each
    with pytest.raises(AssertionError):
        manager.enable_save_replay(["one"])


def test_random_action_of_the_envs_that_are_ready(make):
    manager = make(env_fn=envs(3), launch=False)
    manager.seed(10)
    manager.launch()
    manager.step({1: ("return", None, None, True, {"abnormal": True})})
    assert {env_id: action.tolist() for env_id, action in manager.random_action().items()} == {0: [11, 11], 2: [12, 12]}


# V2 -------------------------------------------------------------------------------------------------------


def test_v2_takes_and_gives_stacked_arrays(make):
    manager = make(ActorEnvManagerV2, env_fn=envs(length=2), episode_num=1)
    assert manager.ready_obs.tolist() == [[0, 0, 0], [1, 0, 0]]
    timesteps = manager.step(np.zeros((2, 2), np.float32))
    assert [(t.env_id, t.obs.tolist(), bool(t.done)) for t in timesteps] == [
        (0, [0, 1, 0], False),
        (1, [1, 1, 0], False),
    ]
    assert timesteps[1]["reward"].tolist() == [0.5]
    manager.step([PLAIN, PLAIN])
    assert manager.done
    assert np.shape(manager.ready_obs) == (0, 3)


def test_v2_nests_and_makes_identifiers_of_an_infos_keys(make):
    manager = make(ActorEnvManagerV2, env_fn=envs(kind=Nested))
    assert manager.ready_obs.agent.shape == (2, 3)
    assert manager.ready_obs["time"].tolist() == [0, 0]
    first, second = manager.step([PLAIN, PLAIN])
    assert second.obs.agent.tolist() == [1, 1, 0]
    assert sorted(first.info.keys()) == ["TimeLimit_truncated", "_1st", "count"]
    assert first.info.count == 1 if tnp is None else first.info["count"] == 1


def test_v2_splits_nested_actions(make):
    actions = {"move": np.array([[0, 1], [2, 3]]), "act": np.array([5, 6])}
    manager = make(ActorEnvManagerV2, env_fn=envs(kind=Teller))
    given = actions if tnp is None else tnp.array(actions)
    manager.step(given)
    told = manager.told
    assert [(one["move"].tolist(), int(one["act"])) for one in told] == [([0, 1], 5), ([2, 3], 6)]


# Names, DI-engine itself ----------------------------------------------------------------------------------


def test_names_that_users_tests_touch(make):
    manager = make(max_retry=3, step_timeout=5, connect_timeout=8, reset_timeout=7)
    assert manager._closed is False
    assert manager._env_states == {0: EnvState.RUN, 1: EnvState.RUN}
    assert (manager._retry_type, manager._max_retry) == ("reset", 3)
    assert (manager._step_timeout, manager._connect_timeout, manager._reset_timeout) == (5, 8, 7)
    manager._retry_type = "renew"
    assert manager._env_episode_count == {0: 0, 1: 0}
    manager._env_ref.user_defined()


def test_where_di_engine_is_installed_the_managers_are_its_own(make):
    pytest.importorskip("ding")
    from ding.envs import BaseEnvTimestep as TheirTimestep
    from ding.envs.env_manager import BaseEnvManager, create_env_manager
    from easydict import EasyDict

    config = EasyDict(type="actor", import_names=["envactors.integrations.ding"], shared_memory=True)
    manager = create_env_manager(config, envs())
    try:
        assert isinstance(manager, (SyncActorEnvManager, BaseEnvManager))
        manager.launch()
        assert type(step(manager, 0, 1)[0]) is TheirTimestep
    finally:
        manager.close()
    for name, kind in (("async_actor", AsyncActorEnvManager), ("actor_v2", ActorEnvManagerV2)):
        assert type(create_env_manager(EasyDict(type=name), envs())) is kind
    assert isinstance(AsyncActorEnvManager.default_config(), EasyDict)


def test_real_envs_of_di_engine_take_the_same_trajectories():
    pytest.importorskip("ding")
    done = run_script(SIDE_BY_SIDE)  # in its own process, since DI-engine leaves zombies and descriptors
    assert done.stdout.split()[-2:] == ["same", "True"], done.stderr


SIDE_BY_SIDE = """
    import warnings
    warnings.simplefilter("ignore")
    import gym
    import numpy as np
    import treetensor.numpy as tnp
    from ding.envs import BaseEnv, BaseEnvTimestep
    from ding.envs.env_manager import SubprocessEnvManagerV2
    from envactors.integrations.ding import ActorEnvManagerV2

    class Cart(BaseEnv):
        def __init__(self, cfg=None):
            self._env = gym.make("CartPole-v1")
            self._reward_space = gym.spaces.Box(0, 1, (1,), np.float32)

        observation_space = property(lambda self: self._env.observation_space)
        action_space = property(lambda self: self._env.action_space)
        reward_space = property(lambda self: self._reward_space)

        def seed(self, seed, dynamic_seed=None):
            self._seed = seed

        def reset(self):
            self._env.seed(self._seed)
            return np.asarray(self._env.reset(), np.float32)

        def step(self, action):
            obs, reward, done, info = self._env.step(int(action))
            return BaseEnvTimestep(np.asarray(obs, np.float32), np.array([reward], np.float32), done, info)

        def close(self):
            self._env.close()

        def __repr__(self):
            return "Cart()"

    def play(kind):
        config = kind.default_config()
        config.update(episode_num=2, reset_inplace=True)
        manager = kind([Cart] * 2, config)
        manager.seed(7)
        manager.launch()
        told = []
        while not manager.done:
            for timestep in manager.step([np.array(int(obs[2] > 0)) for obs in manager.ready_obs]):
                assert isinstance(timestep, tnp.ndarray)
                told.append([np.asarray(timestep[key]).tolist() for key in ("env_id", "obs", "reward", "done")])
                told.append(sorted(timestep.info.keys()))
        manager.close()
        return told

    theirs, ours = play(SubprocessEnvManagerV2), play(ActorEnvManagerV2)
    print("same", len(theirs) > 100 and theirs == ours)
"""


@BOTH
def test_no_more_envs_run_at_once_than_allowed(make, manager, tmp_path):
    kind = clocked(Env, tmp_path / "log")
    made = make(manager, env_fn=[functools.partial(kind, i) for i in range(5)], max_running=2)
    for _ in range(8):
        made.step(dict.fromkeys(made.ready_obs_id, PLAIN))
    assert most_at_once(tmp_path / "log") == 2


@BOTH
def test_the_manager_has_the_seeds_of_episodes(make, manager):
    made = make(manager, seed_episodes=True, launch=False)
    made.seed(10)
    made.launch()
    seen = [made.episode_seeds]
    while len(seen) < 4:
        made.step(dict.fromkeys(made.ready_obs_id, PLAIN))
        wait_until(lambda: len(made.ready_obs_id) == 2)  # an automatic reset may be pending
        if made.episode_seeds != seen[-1]:
            seen.append(made.episode_seeds)
            assert dict(enumerate(made.seeded)) == made.episode_seeds
    assert seen[0] == {0: 10, 1: 11}
    for env_id in range(2):
        of_env = list(dict.fromkeys(seeds[env_id] for seeds in seen))
        assert len(of_env) > 1
        assert of_env == [episode_seed(10 + env_id, number) for number in range(len(of_env))]


def test_envs_that_reset_in_place_have_no_seeds_for_episodes(make):
    with pytest.raises(AssertionError, match="seed_episodes"):
        make(seed_episodes=True, reset_inplace=True, launch=False)
