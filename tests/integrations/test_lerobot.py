"""LeRobot's evaluation with its envs in actors: tasks start when they run, and fail alone."""

from __future__ import annotations

import functools

import pytest

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("lerobot")
torch = pytest.importorskip("torch")

from lerobot.envs.utils import freeze_after_episode_end  # noqa: E402
from lerobot.policies import PreTrainedPolicy  # noqa: E402
from lerobot.scripts import lerobot_eval  # noqa: E402
from lerobotenvs import Task, most_alive  # noqa: E402
from tqdm import tqdm  # noqa: E402
from trainingfaults import Failing  # noqa: E402

from envactors.integrations.lerobot import LazyActorVectorEnv, eval_policy_all  # noqa: E402

torch.set_num_threads(1)  # its threads would count as leaked, and so would the thread and the lock of tqdm
tqdm.monitor_interval = 0
tqdm.get_lock()


class Policy(PreTrainedPolicy):
    """Acts on the observation."""

    config_class = object
    name = "policy"

    def __init__(self):
        torch.nn.Module.__init__(self)

    def reset(self):
        pass

    def select_action(self, batch, **kwargs):
        return torch.tanh(batch["observation.state"][:, :1] / 10)

    def forward(self, batch):
        raise NotImplementedError

    def predict_action_chunk(self, batch, **kwargs):
        raise NotImplementedError

    def get_optim_params(self):
        return {}


class FailingPolicy(Policy):
    def select_action(self, batch, **kwargs):
        raise ArithmeticError("policy")


def evaluate(function, envs, policy=None, **kwargs):
    """Evaluate without changes to what the policy gets and gives."""
    same = [lambda value: value] * 4
    return function(envs, policy or Policy(), *same, n_episodes=4, start_seed=3, **kwargs)


@pytest.fixture
def make():
    """Makes vector envs of a task, and closes them after the test."""
    made = []

    def make_one(count, *args, **options):
        made.append(LazyActorVectorEnv([functools.partial(Task, *args)] * count, **options))
        return made[-1]

    yield make_one
    for envs in made:
        envs.close()


def test_results_are_those_of_lerobot(make):
    fns = [freeze_after_episode_end(Task)] * 2
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    theirs = {"suite": {i: gymnasium.vector.SyncVectorEnv(fns, autoreset_mode=mode) for i in range(2)}}
    ours = {"suite": {i: make(2) for i in range(2)}}
    expected = evaluate(lerobot_eval.eval_policy_all, theirs)
    found = evaluate(eval_policy_all, ours)
    assert found.pop("failed") == []
    for info in (found, expected):
        for name in ("eval_s", "eval_ep_s"):
            assert info["overall"].pop(name) > 0
    assert found == expected
    assert found["per_task"][0]["metrics"]["successes"] == [True, True, False, False]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tasks", [2, pytest.param(12, marks=pytest.mark.soak)])
def test_results_with_failures_that_are_replayed_are_those_of_lerobot(tasks, tmp_path):
    def failing():
        return Failing(Task(tmp_path), 4, 2)

    restart = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
    ours = {"suite": {i: LazyActorVectorEnv([failing] * 2, on_failure="replay", restart=restart) for i in range(tasks)}}
    fns = [freeze_after_episode_end(Task)] * 2
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    theirs = {"suite": {i: gymnasium.vector.SyncVectorEnv(fns, autoreset_mode=mode) for i in range(tasks)}}
    found = evaluate(eval_policy_all, ours)
    expected = evaluate(lerobot_eval.eval_policy_all, theirs)
    assert len(list(tmp_path.glob("pid-*"))) > 2 * tasks  # processes were replaced
    assert found.pop("failed") == []
    for info in (found, expected):
        for name in ("eval_s", "eval_ep_s"):
            info["overall"].pop(name)
    assert found == expected


def test_lerobots_own_evaluation_takes_them(make):
    found = evaluate(lerobot_eval.eval_policy_all, {"suite": {0: make(2)}})
    assert found["overall"]["n_episodes"] == 4


@pytest.mark.timeout(300)
def test_of_fifty_tasks_those_that_hang_or_raise_fail_alone(make, tmp_path):
    faults = {7: "hang", 9: "raise"}
    options = {"deadlines": ea.Deadlines(start=20.0), "restart": ea.RestartPolicy(max_restarts=0)}
    make(1).reset()  # the fork server has started, and imported LeRobot
    envs = {"suite": {i: make(2, tmp_path, faults.get(i), **options) for i in range(50)}}
    found = evaluate(eval_policy_all, envs, max_parallel_tasks=2)
    failed = {one["task_id"]: one["error"] for one in found["failed"]}
    assert failed.keys() == {7, 9}
    assert "OSError('no EGL device')" in failed[9]
    assert found["overall"]["n_episodes"] == 48 * 4
    assert most_alive(tmp_path) <= 4


def test_no_process_starts_before_it_is_needed(make, tmp_path):
    envs = make(2, tmp_path)
    assert not list(tmp_path.iterdir())
    assert envs.call("_max_episode_steps") == (8, 8)
    assert len(list(tmp_path.glob("pid-*"))) == 2


def test_each_process_has_its_gpu(make):
    envs = make(2, env_vars=[{"MUJOCO_EGL_DEVICE_ID": str(i)} for i in range(2)])
    assert envs.get_attr("gpu") == ("0", "1")


def test_an_exception_of_the_policy_is_raised(make):
    policy = FailingPolicy()
    with pytest.raises(ArithmeticError, match="policy"):
        evaluate(eval_policy_all, {"suite": {0: make(1)}}, policy)
    assert policy.training


def test_standbys_replace_processes_of_the_same_factory(make):
    """They used to be refused, since each env got another factory."""
    envs = make(2, standbys=1)
    assert envs.reset(seed=3)[0] is not None


def test_options_are_checked_before_anything_starts():
    with pytest.raises(ea.VectorInputError, match="autoreset='same_step'"):
        LazyActorVectorEnv([Task], autoreset="same_step")
    with pytest.raises(TypeError, match="did you mean 'standbys'"):
        LazyActorVectorEnv([Task], standby=1)
