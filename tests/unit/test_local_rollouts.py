"""Rollouts and evaluations of in-process vectors: no process is started."""

from __future__ import annotations

import dataclasses
import threading

import gymnasium
import numpy as np
import pytest

import envactors as ea
from envactors.backends.thread import ThreadMemory
from envactors.integrations.access import VectorAccess
from envactors.mailbox.messages import episode_seed
from envactors.rollout import memory


class Env:
    """Its rewards are the actions, and it raises at a step of each episode."""

    observation_space = gymnasium.spaces.Box(-9, 999, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(9)

    def __init__(self, length=5, raises_at=-1):
        self.length = length
        self.raises_at = raises_at

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1), {}

    def step(self, action):
        self.count += 1
        if self.count == self.raises_at:
            raise ValueError("as ordered")
        return np.full(1, float(self.count)), float(action), self.count >= self.length, False, {}


class Spaceless(Env):
    observation_space = None


def choose(obs, context):
    return np.ones(len(obs), np.int64)


def make_policy():
    return choose


def test_a_reset_shows_the_observations_of_envs_without_a_space():
    with ea.VectorEnv([Spaceless], backend="inline") as envs:
        with pytest.raises(ea.VectorInputError, match="rollouts need envs with an observation space"):
            envs.set_policy(make_policy)
        envs.reset(seed=0)
        envs.set_policy(make_policy)
        assert envs.rollout(2).rewards.shape == (2, 1)


class Divided(Env):
    reward_space = gymnasium.spaces.Dict({"speed": gymnasium.spaces.Box(-9, 9, ())})


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_policy_is_refused_for_envs_whose_reward_is_a_dict(backend):
    with ea.VectorEnv([Divided], backend=backend) as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.VectorInputError, match="rollouts need envs whose reward is one number or array"):
            envs.set_policy(make_policy)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_policy_that_cannot_be_called_is_refused(backend):
    reason = "make_policy returned a NoneType: expected a function"
    with ea.VectorEnv([Env], backend=backend) as envs, pytest.raises(TypeError, match=reason):
        envs.set_policy(lambda: None)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_actions_of_a_policy_that_do_not_fit_are_named_as_such(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.reset(seed=0)
        envs.set_policy(lambda: lambda obs, context: [0, 0])
        with pytest.raises(ea.SpaceMismatchError, match="2 actions of the policy for 1 envs"):
            envs.rollout(1)


class Fussy:
    """A policy that chooses what it has loaded. The one of env 1 cannot load 3 when it tries first."""

    made = 0

    def __init__(self):
        self.fails = Fussy.made == 1
        Fussy.made += 1
        self.action = 0

    def load(self, parameters):
        if self.fails and parameters == 3:
            self.fails = False
            raise ValueError("too large")
        self.action = int(parameters)

    def __call__(self, obs, context):
        return np.full(len(obs), self.action)


def test_parameters_that_a_policy_could_not_load_are_loaded_by_the_next_rollout():
    Fussy.made = 0
    with ea.VectorEnv([Env] * 3, backend="inline") as envs:
        envs.set_policy(Fussy)
        envs.reset(seed=0)
        envs.rollout(1, 2)
        with pytest.raises(ValueError, match="too large"):
            envs.rollout(1, 3)
        rollout = envs.rollout(1)
        assert rollout.rewards.tolist() == [[3.0, 3.0, 3.0]]
        assert rollout.policy_version.tolist() == [2, 2, 2]


class EmptyError(ValueError):
    def __len__(self):
        return 0


def test_the_first_error_of_a_policy_is_raised_also_if_it_counts_as_false():
    def raise_error(obs, context):
        raise EmptyError(context.env_ids[0])

    with ea.VectorEnv([Env] * 2, backend="inline") as envs:
        envs.set_policy(lambda: raise_error)
        envs.reset(seed=0)
        with pytest.raises(EmptyError, match="0"):
            envs.rollout(1)


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_failures_of_an_env_without_an_episode_to_play_do_not_end_an_evaluation(on_failure):
    factories = [lambda: Env(300), lambda: Env(300, raises_at=5)]
    restart = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
    with ea.VectorEnv(factories, backend="inline", on_failure=on_failure, restart=restart) as envs:
        envs.set_policy(make_policy)
        found = envs.evaluate(1)
    assert found.lengths.tolist() == [300]
    assert found.failures == []


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_episode_that_always_fails_raises_a_step_error_with_the_results_of_the_other_envs(on_failure, backend):
    factories = [Env, lambda: Env(raises_at=3)]
    restart = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
    with ea.VectorEnv(factories, backend=backend, on_failure=on_failure, restart=restart) as envs:
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorStepError, match=r"in evaluate; env 1.*as ordered") as raised:
            envs.evaluate(2)
    assert [*raised.value.failures] == [1]
    assert raised.value.__cause__ is raised.value.failures[1]
    assert raised.value.batch.valid[0, 0]


class Balky(Env):
    """Its first resets with the first seed fail. Its rewards are its seeds."""

    first_seed, failures_left = None, 0

    def reset(self, *, seed=None, options=None):
        if Balky.first_seed is None:
            Balky.first_seed = seed
        if seed == Balky.first_seed and Balky.failures_left:
            Balky.failures_left -= 1
            raise ValueError("not with this seed")
        self.seed = seed
        return super().reset()

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(self.seed), *rest


@pytest.mark.parametrize("left", [1, 2, 4, 5])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_reset_that_a_vector_has_repeated_with_another_seed_begins_no_episode_of_an_evaluation(backend, left):
    Balky.first_seed, Balky.failures_left = None, left
    restart = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
    with ea.VectorEnv([Balky], backend=backend, on_failure="renew", restart=restart) as envs:
        envs.set_policy(make_policy)
        if left == 5:
            with pytest.raises(ea.VectorStepError, match="not with this seed"):
                envs.evaluate(1)
            return
        found = envs.evaluate(1)
    assert found.returns.tolist() == [float(found.seeds[0]) * 5]
    assert [(number, type(error)) for number, error in found.failures] == [(0, ValueError)] * ((left + 1) // 2)


class Weighing:
    """A policy that chooses how many numbers it has loaded."""

    def __init__(self):
        self.count = 0

    def load(self, parameters):
        self.count = sum(array.size for array in parameters)

    def __call__(self, obs, context):
        return np.full(len(obs), self.count)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_arrays_of_parameters_may_be_empty(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.set_policy(Weighing)
        envs.reset()
        assert envs.rollout(1, [np.zeros((0, 3))]).actions == 0
        assert envs.rollout(1, [np.zeros(0), np.ones((2, 3)), np.zeros(0)]).actions == 6
        assert envs.rollout(1, [np.zeros(0)]).actions == 0


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_policy_and_parameters_that_cannot_be_pickled_are_rejected(backend):
    lock = threading.Lock()
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.reset()
        with pytest.raises(ea.SerializationError, match=r"^make_policy cannot be pickled: .*; make the object inside"):
            envs.set_policy(lambda: lock)
        envs.set_policy(Weighing)
        with pytest.raises(ea.SerializationError, match=r"^the parameters cannot be pickled: TypeError"):
            envs.rollout(1, [lock])
        assert envs.rollout(1).actions == 0


def test_parameters_that_are_rejected_leave_the_memory_of_an_earlier_rollout_for_the_next_one(monkeypatch):
    made = []
    make = memory.TrajectoryBuffer.__init__
    monkeypatch.setattr(memory.TrajectoryBuffer, "__init__", lambda *args: (made.append(1), make(*args))[1])
    with ea.VectorEnv([Env], backend="thread") as envs:
        envs.reset(seed=0)
        envs.set_policy(make_policy)
        for _ in range(3):
            envs.rollout(2)
        before = len(made)
        with pytest.raises(TypeError, match="no method load"):
            envs.rollout(2, 1)
        for _ in range(2):
            envs.rollout(2)
        assert len(made) == before


def test_a_first_rollout_that_is_refused_leaves_its_memory_for_the_next_one(monkeypatch):
    made = []
    make, extend = memory.TrajectoryBuffer.__init__, ThreadMemory.extend

    def extend_by_less_than_24(self, size):
        if size == 24:
            raise ValueError("more than the system can address")
        return extend(self, size)

    monkeypatch.setattr(memory.TrajectoryBuffer, "__init__", lambda *args: (made.append(1), make(*args))[1])
    monkeypatch.setattr(ThreadMemory, "extend", extend_by_less_than_24)
    with ea.VectorEnv([Env], backend="thread") as envs:
        envs.reset(seed=0)
        envs.set_policy(Weighing)
        with pytest.raises(ea.VectorEnvError, match="too little memory for 24 bytes of parameters"):
            envs.rollout(2, [np.ones(3)])
        envs.rollout(2)
        assert len(made) == 1


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_repeats_count_as_steps_complete(backend, monkeypatch):
    made = []
    make = memory.TrajectoryBuffer.__init__
    monkeypatch.setattr(memory.TrajectoryBuffer, "__init__", lambda *args: (made.append(args[0]), make(*args))[1])
    with ea.VectorEnv([Env, lambda: Env(2)], backend=backend, autoreset="disabled") as envs:
        envs.reset(seed=0)
        envs.set_policy(make_policy)
        assert envs.rollout(4).valid.sum(axis=0).tolist() == [4, 2]
    assert made[0].trajectory.steps_complete.tolist() == [4, 4]


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_the_last_result_is_the_one_before_the_repeats(backend):
    with ea.VectorEnv([lambda: Env(2)], backend=backend, autoreset="disabled", on_failure="renew") as envs:
        envs.reset(seed=0)
        envs.set_policy(make_policy)
        envs.rollout(4)
        last = envs.last_batch()
    assert (last.obs.item(), last.rewards.item(), last.terminated.item()) == (2.0, 1.0, True)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_without_autoreset_and_without_checks_of_resets_the_env_decides_about_steps_after_the_end(backend):
    with ea.VectorEnv([lambda: Env(length=2)], backend=backend, autoreset="disabled") as envs:
        VectorAccess(envs).disable_reset_checks()
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        first, second = envs.rollout(5), envs.rollout(2)
    assert first.obs.ravel().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert first.terminated.ravel().tolist() == [False, True, True, True, True]
    assert first.starts.ravel().tolist() == [True, False, False, False, False]
    assert second.obs.ravel().tolist() == [5.0, 6.0]
    assert first.valid.all()
    assert second.valid.all()


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_failure_leaves_the_observations_after_the_steps_that_were_made(backend):
    factories = [Env, lambda: Env(raises_at=2)]
    with ea.VectorEnv(factories, backend=backend, envs_per_actor=2) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.rollout(2)
    rollout = caught.value.batch
    assert rollout.obs[:, 0].tolist() == [[0.0], [1.0]]
    assert rollout.last_obs.tolist() == [[2.0], [0.0]]
    assert rollout.valid.tolist() == [[True, True], [True, False]]


class Failing(Env):
    """Its observations and rewards are never 0, and it raises at its tenth step."""

    def __init__(self, fails):
        super().__init__(length=99, raises_at=10 if fails else -1)

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + 100, *rest


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_steps_that_an_error_has_kept_from_running_are_zeros(backend):
    """Also in memory that an earlier rollout has used."""
    factories = [lambda: Failing(True), lambda: Failing(False)]
    with ea.VectorEnv(factories, backend=backend, envs_per_actor=2) as envs:
        envs.set_policy(lambda: Teller(1, [range(9)]))
        envs.reset(seed=0)
        for _ in range(3):
            envs.rollout(3)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.rollout(3)
    rollout = caught.value.batch
    assert rollout.obs[:, :, 0].T.tolist() == [[109.0, 0.0, 0.0], [109.0, 110.0, 0.0]]
    assert rollout.last_obs.tolist() == [[0.0], [0.0]]
    assert rollout.rewards.T.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert rollout.actions.T.tolist() == [[1, 0, 0]] * 2
    assert rollout.extras["value"].T.tolist() == [[7.0, 0.0, 0.0]] * 2


class Telling(Env):
    def reset(self, *, seed=None, options=None):
        return super().reset()[0], {"began": True}


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_failure_at_the_first_step_reports_the_info_before_the_rollout(backend):
    restart = ea.RestartPolicy(max_restarts=9, backoff=0.0)
    options = {"on_failure": "renew", "autoreset": "same_step", "restart": restart}
    with ea.VectorEnv([lambda: Telling(raises_at=1)], backend=backend, **options) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        ((step, index, info),) = envs.rollout(1).infos
    assert (step, index, info["final_info"]) == (0, 0, {"began": True})


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_each_of_several_failures_reports_the_info_of_the_reset_before_it(backend):
    """As `step` does: not the one with the failure before it, which would grow from failure to failure."""
    restart = ea.RestartPolicy(max_restarts=9, backoff=0.0)
    options = {"on_failure": "renew", "autoreset": "same_step", "restart": restart}
    with ea.VectorEnv([lambda: Telling(raises_at=1)], backend=backend, **options) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        infos = [info for _, _, info in envs.rollout(3).infos]
    assert [info["final_info"] for info in infos] == [{"began": True}] * 3


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_the_first_observation_of_a_lost_episode_is_still_the_first(backend):
    """Env 1 loses its episode to the exception of env 0, after its reset. Its next step says so."""
    factories = [lambda: Env(9, raises_at=2), lambda: Env(2)]
    restart = ea.RestartPolicy(max_restarts=9, backoff=0.0)
    options = {"envs_per_actor": 2, "on_failure": "renew", "autoreset": "same_step", "restart": restart}
    with ea.VectorEnv(factories, backend=backend, **options) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        rollout = envs.rollout(4)
    assert rollout.starts.tolist() == [[True, True], [False, False], [True, True], [False, True]]
    assert rollout.truncated[:, 1].tolist() == [False, False, True, False]


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_the_largest_seed_of_a_policy_works_and_larger_ones_are_refused(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match=r"^seed is 340282366920938463463374607431768211456: expected an int"):
            envs.set_policy(make_drawing_policy, seed=1 << 128)
        envs.set_policy(make_drawing_policy, seed=(1 << 128) - 1)
        assert envs.rollout(2).valid.all()


def make_drawing_policy():
    return lambda obs, context: context.rng.integers(0, 9, len(obs))


class Kept(Env):
    """Its state is the number of steps of its episode."""

    seeds: list = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        Kept.seeds.append(seed)
        return super().reset()

    def get(self):
        return self.count

    def set(self, state):
        self.count = state


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_episodes_of_a_restored_snapshot_may_have_large_seeds(backend):
    Kept.seeds = []
    options = {"snapshot": ea.SnapshotPolicy(Kept.get, Kept.set), "seed_episodes": True, "backend": backend}
    with ea.VectorEnv([lambda: Kept(2)], **options) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        (snapshot,) = envs.snapshot()
        envs.restore([dataclasses.replace(snapshot, root_seed=1 << 70, episode=0)])
        assert envs.rollout(4).valid[:, 0].tolist() == [True, True, False, True]
    assert Kept.seeds == [0, episode_seed(1 << 70, 1)]


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_too_little_memory_is_the_error_that_a_constructor_raises(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.reset(seed=0)
        envs.set_policy(make_policy)
        with pytest.raises(ea.VectorEnvError, match="there is too little memory for"):
            envs.rollout(10**18)
        assert envs.rollout(1).valid.all()


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_rollout_that_has_too_little_memory_does_not_change_the_parameters(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.reset(seed=0)
        envs.set_policy(Weighing)
        envs.rollout(1, [np.ones(1)])
        with pytest.raises(ea.VectorEnvError, match="there is too little memory for"):
            envs.rollout(10**18, [np.ones(2)])
        rollout = envs.rollout(1)
        assert (rollout.policy_version.tolist(), rollout.actions.tolist()) == ([1], [[1]])


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_exception_does_not_keep_other_envs_of_the_process_from_their_step(backend, on_failure):
    """As in `step`: env 1 takes the step in which env 0 raises. Then its episode is lost with the process."""
    factories = [lambda: Env(9, raises_at=2), lambda: Env(9), lambda: Env(9, raises_at=2)]
    restart = ea.RestartPolicy(max_restarts=9, backoff=0.0)
    options = {"envs_per_actor": 3, "on_failure": on_failure, "restart": restart}
    with ea.VectorEnv(factories, backend=backend, **options) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as caught:
                envs.rollout(3)
            assert [*caught.value.failures] == [0, 2]
            assert caught.value.batch.valid.tolist() == [[True] * 3, [False, True, False], [False] * 3]
        else:
            rollout = envs.rollout(3)
            assert rollout.truncated.tolist() == [[False] * 3, [True, False, True], [False, True, False]]
            assert rollout.valid.tolist() == [[True] * 3, [False, True, False], [False] * 3]
            assert [(step, index) for step, index, _ in rollout.failures] == [(1, 0), (1, 2), (2, 1)]


class Speaker(Env):
    """Its actions are texts."""

    action_space = gymnasium.spaces.Text(9)

    def step(self, action):
        return np.zeros(1), float(len(action)), False, False, {}


class Teller:
    """A policy that returns extras in the steps that its actor is told to."""

    def __init__(self, action, steps_by_env):
        self.action = action
        self.steps_by_env = steps_by_env

    def __call__(self, obs, context):
        actions = [self.action] * len(obs)
        if context.step not in self.steps_by_env[int(context.env_ids[0])]:
            return actions
        return actions, {"value": np.full(len(obs), 7.0)}


class Steered(Env):
    """Its rewards are the parts of its actions, which are dicts."""

    action_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(9))

    def step(self, action):
        return super().step(action["a"])


def choose_one_by_one(obs, context):
    return tuple({"a": 3 + i} for i in range(len(obs)))


def choose_with_extras(obs, context):
    actions = np.arange(3, 3 + len(obs))
    return {"a": actions}, {"a": actions / 2.0}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("policy", [choose_one_by_one, choose_with_extras])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_pair_of_actions_that_are_dicts_has_no_extras(backend, policy, count):
    with ea.VectorEnv([Steered] * count, backend=backend, envs_per_actor=count) as envs:
        envs.set_policy(lambda: policy)
        envs.reset(seed=0)
        rollout = envs.rollout(2)
    assert rollout.rewards.tolist() == [[3.0, 4.0, 5.0][:count]] * 2
    assert rollout.extras.keys() == ({"a"} if policy is choose_with_extras else set())


def test_room_for_the_extras_of_a_later_actor_keeps_actions_that_no_array_can_hold():
    with ea.VectorEnv([Speaker] * 2, backend="inline", envs_per_actor=1) as envs:
        envs.set_policy(lambda: Teller("ab", [[], [0, 1]]))
        envs.reset(seed=0)
        assert envs.rollout(2).actions.tolist() == [["ab", "ab"]] * 2


@pytest.mark.parametrize("steps_by_env", [[[0, 1], []], [[], [0, 1]], [[1], [0]]])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_steps_for_which_a_policy_returns_no_extras_have_zeros(backend, steps_by_env):
    expected = [[7.0 * (step in steps) for steps in steps_by_env] for step in range(2)]
    with ea.VectorEnv([Env] * 2, backend=backend, envs_per_actor=1) as envs:
        envs.set_policy(lambda: Teller(1, steps_by_env))
        envs.reset(seed=0)
        for _ in range(3):
            assert envs.rollout(2).extras["value"].tolist() == expected


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_rollout_without_extras_after_one_with_extras_has_zeros(backend):
    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.set_policy(lambda: Teller(1, [[2]]))
        envs.reset(seed=0)
        assert envs.rollout(2).extras == {}
        assert envs.rollout(3).extras["value"].tolist() == [[0.0], [0.0], [7.0]]
        assert envs.rollout(2).extras["value"].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_extras_that_differ_between_steps_are_refused(backend):
    def make_fickle():
        return lambda obs, context: (np.ones(len(obs), np.int64), {f"at_{context.step}": np.ones(len(obs))})

    with ea.VectorEnv([Env], backend=backend) as envs:
        envs.set_policy(make_fickle)
        envs.reset(seed=0)
        with pytest.raises(TypeError, match=r"expected \{'at_0': .*, as in an earlier step"):
            envs.rollout(2)


class Learned(Env):
    """It reports errors of its own in its infos, as an env may that learns from them."""

    def reset(self, *, seed=None, options=None):
        return super().reset()[0], {"failure": KeyError("its own")}

    def step(self, action):
        return *super().step(action)[:-1], {"failure": KeyError("its own")}


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_exception_that_an_env_puts_into_its_infos_is_no_failure(backend):
    with ea.VectorEnv([Learned], backend=backend) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        rollout = envs.rollout(2)
        assert (rollout.failures, rollout.valid.all()) == ([], True)
        assert [repr(info["failure"]) for _, _, info in rollout.infos] == ["KeyError('its own')"] * 2
        assert envs.evaluate(1).failures == []


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_too_little_memory_for_extras_is_no_error_of_the_policy(backend, monkeypatch):
    add_room = memory.TrajectoryBuffer.add_room

    def fail(*_):
        raise MemoryError("as ordered")

    def add_no_room(*args):
        monkeypatch.setattr(ThreadMemory, "extend", fail)
        add_room(*args)

    monkeypatch.setattr(memory.TrajectoryBuffer, "add_room", add_no_room)
    with ea.VectorEnv([Env] * 2, backend=backend, envs_per_actor=2) as envs:
        envs.set_policy(lambda: Teller(1, [range(9)]))
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError, match="too little memory for 3 steps") as caught:
            envs.rollout(3)
        assert [type(error) for error in caught.value.failures.values()] == [ea.ActorError] * 2
        assert not caught.value.batch.valid.any()


class Wordy(Env):
    """Short ones have rewards that do not fit into the arrays of a rollout."""

    reward_space = gymnasium.spaces.Text(9)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, "good" if self.length < 5 else 1.0, *rest


@pytest.mark.parametrize("envs_per_actor", [1, 3])
@pytest.mark.parametrize("raises_at", [-1, 1])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_error_that_is_not_of_the_policy_names_the_env(backend, raises_at, envs_per_actor):
    factories = [Wordy, lambda: Wordy(3), lambda: Wordy(5, raises_at)]
    with ea.VectorEnv(factories, backend=backend, envs_per_actor=envs_per_actor) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.rollout(2)
        assert sorted(caught.value.failures) == ([1] if raises_at == -1 else [1, 2])
        assert caught.value.batch.valid[0].tolist() == [True, False, raises_at == -1]


class Undecided(Env):
    """It cannot say whether its episode is over."""

    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, np.array([False, True]), False, {}


class UndecidedPicture(Undecided):
    observation_space = gymnasium.spaces.Box(-9, 999, (1, 1), np.float64)

    def reset(self, *, seed=None, options=None):
        return super().reset()[0][None], {}

    def step(self, action):
        obs, *rest = super().step(action)
        return obs[None], *rest


@pytest.mark.parametrize("env", [Undecided, UndecidedPicture])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_end_of_an_episode_that_is_no_bool_is_the_error_that_step_raises(backend, env):
    with ea.VectorEnv([env], backend=backend) as envs:
        envs.set_policy(make_policy)
        for run in (lambda: envs.step([1]), lambda: envs.rollout(1)):
            envs.reset(seed=0)
            with pytest.raises(ea.VectorStepError) as caught:
                run()
            assert type(caught.value.failures[0]) is ValueError


class Ending:
    """A policy that closes an actor before its first step."""

    envs: ea.VectorEnv

    def __call__(self, obs, context):
        Ending.envs.actors[int(context.env_ids[0])].kill()
        return np.ones(len(obs), np.int64)


def test_an_actor_that_is_closed_in_an_in_process_rollout_fails_its_envs():
    with ea.VectorEnv([Env] * 2, backend="inline") as envs:
        Ending.envs = envs
        envs.set_policy(Ending)
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.rollout(1)
        assert [type(error) for error in caught.value.failures.values()] == [ea.ActorClosedError] * 2


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_rollout_of_a_closed_actor_does_not_start(backend):
    with ea.VectorEnv([Env] * 2, backend=backend) as envs:
        envs.set_policy(make_policy)
        envs.reset(seed=0)
        envs.actors[1].kill()
        with pytest.raises(ea.ActorClosedError, match="cannot run rollout"):
            envs.rollout_async(1)
