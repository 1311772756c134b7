"""The drop-in for TorchRL: the same specs, rollouts, and training as `SerialEnv`, and its own features."""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
import warnings

import numpy as np
import pytest
from helpers import clocked, episode_seed, most_at_once

import envactors as ea

gymnasium = pytest.importorskip("gymnasium")
torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from gymenvs import HIGH, Complaint, Costly, Joined, Mirror, Mixed, Teller  # noqa: E402
from gymnasium import spaces  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torch import nn  # noqa: E402
from torchrl.data import Bounded, Composite, NonTensor, OneHot, Unbounded  # noqa: E402
from torchrl.envs import (  # noqa: E402
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.modules import ProbabilisticActor, ValueOperator  # noqa: E402
from torchrl.objectives import ClipPPOLoss  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

from envactors.integrations.torchrl import ActorEnv  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchRL's own classes
    from torchrl.collectors import Collector

torch.set_num_threads(1)  # its threads would count as leaked

cartpole = functools.partial(gymnasium.make, "CartPole-v1")
MASKS = {"[n]": (2,), "[n, 1]": (2, 1)}


def tellers(count=3, **kwargs):
    return [functools.partial(Teller, i, **kwargs) for i in range(count)]


@pytest.fixture
def make():
    """Makes envs, and closes them after the test."""
    made = []

    def make_one(env_fns, **kwargs):
        made.append(ActorEnv(env_fns, **kwargs))
        return made[-1]

    yield make_one
    for env in made:
        env.close()


@pytest.fixture
def in_one_process():
    """Makes TorchRL's own envs, of CartPole by default, which are closed in the end."""
    made = []

    def make_one(count, factory=lambda **kwargs: GymEnv("CartPole-v1", **kwargs), **kwargs):
        made.append(SerialEnv(count, lambda: factory(**kwargs), use_buffers=False))  # which would stay
        return made[-1]

    yield make_one
    for env in made:
        env.close(raise_if_closed=False)


def leaf_specs(env):
    return dict(env.specs.items(True, True))


def acting(env, action):
    """What asks all envs for the same action, by its number."""
    return env.full_action_spec.zero().set("action", torch.eye(10, dtype=torch.int64)[[action] * len(env.actors)])


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key, value in theirs.items(True, True):
        assert ours.get(key).dtype == value.dtype, key
        assert torch.equal(ours.get(key), value), key


# Specs ----------------------------------------------------------------------------------------------------

LEAVES = {
    "box": spaces.Box(-HIGH, HIGH, (2, 2), np.float32),
    "float64 without an axis": spaces.Box(-1.0, 1.0, (), np.float64),
    "pixels": spaces.Box(0, 255, (4, 8, 8), np.uint8),
    "discrete": spaces.Discrete(5),
    "multi-binary": spaces.MultiBinary(3),
    "multi-discrete": spaces.MultiDiscrete([2, 3, 4]),
    "multi-discrete, equal": spaces.MultiDiscrete([3, 3]),
}
NESTED = {
    "dict": spaces.Dict(b=spaces.Discrete(5), a=LEAVES["box"]),
    "dict of a dict": spaces.Dict(a=spaces.Dict(b=spaces.Discrete(3), c=LEAVES["pixels"]), d=LEAVES["multi-binary"]),
    "state": spaces.Dict(state=LEAVES["box"], goal=LEAVES["discrete"]),
}
encodings = pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])


@encodings
@pytest.mark.parametrize("envs_per_actor", [1, 3])
def test_check_env_specs(make, in_one_process, categorical, envs_per_actor):
    env = make([cartpole] * 3, categorical_action_encoding=categorical, envs_per_actor=envs_per_actor)
    assert env.batch_size == torch.Size([3])
    check_env_specs(env, seed=0)
    check_env_specs(env, break_when_any_done="both")
    theirs = in_one_process(3, categorical_action_encoding=categorical)
    assert leaf_specs(env) == leaf_specs(theirs)


@encodings
@pytest.mark.parametrize("name", [*LEAVES, *NESTED])
def test_spaces_are_those_of_gym_env(make, in_one_process, name, categorical):
    space = {**LEAVES, **NESTED}[name]
    factory = functools.partial(Mixed, space)
    ours = make([factory] * 2, categorical_action_encoding=categorical)
    own = copy.deepcopy  # two envs in one process have a generator each
    theirs = in_one_process(2, lambda: GymWrapper(Mixed(own(space)), categorical_action_encoding=categorical))
    check_env_specs(ours)
    assert leaf_specs(ours) == leaf_specs(theirs)
    ours.set_seed(3), theirs.set_seed(3)
    torch.manual_seed(0)
    one = ours.rollout(3)
    torch.manual_seed(0)
    assert_same(one, theirs.rollout(3))


@encodings
@pytest.mark.parametrize("name", LEAVES)
def test_actions_reach_the_env_in_its_space(make, name, categorical):
    env = make([functools.partial(Mirror, LEAVES[name])] * 2, categorical_action_encoding=categorical)
    steps = env.rollout(10)
    assert torch.equal(steps["action"], steps["next", "observation"])
    assert env.action_spec.is_in(steps["next", "observation"][:, 0])


def test_random_actions_are_those_of_gym_env(make, in_one_process):
    def factory():
        env = Mixed(spaces.Discrete(2))
        env.action_space = actions
        return env

    actions = NESTED["dict"]  # the order of its keys is not the alphabetic one
    ours, theirs = make([factory] * 2), in_one_process(2, lambda: GymWrapper(factory()))
    torch.manual_seed(0)
    one = ours.rand_action()
    torch.manual_seed(0)
    assert_same(one, theirs.rand_action())


@pytest.mark.parametrize("space", [spaces.Discrete(4, start=-2), spaces.MultiDiscrete([2, 3], start=[5, 7])], ids=str)
@encodings
def test_categories_that_do_not_begin_at_zero(make, space, categorical):
    env = make([functools.partial(Mirror, space)] * 2, categorical_action_encoding=categorical)
    check_env_specs(env)
    steps = env.rollout(20)
    assert torch.equal(steps["action"], steps["next", "observation"])


def test_tuples_are_composites(make):
    env = make([Joined] * 2)
    check_env_specs(env)
    assert set(env.observation_spec.keys(True, True)) == {("seen", "0"), ("seen", "1"), ("more", "0")}
    assert isinstance(env.full_action_spec["action", "0"], OneHot)
    steps = env.rollout(5)
    assert_same(steps["action"], steps["next", "seen"])
    alone = make([functools.partial(Mixed, Joined().action_space)] * 2)
    assert set(alone.observation_spec.keys(True, True)) == {("observation", "0"), ("observation", "1")}


@pytest.mark.parametrize(
    ("space", "what"),
    [
        (spaces.Text(5), "NonTensor"),
        (spaces.Dict(a=spaces.Text(5)), "'a'"),
        (spaces.MultiBinary([2, 3]), "TorchRL has no spec"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "expected a space of fixed shape"),
        (spaces.Graph(LEAVES["box"], None), "TorchRL has no spec"),
        (ea.ArraySpec((2,), np.dtype(np.float32)), r"expected a gymnasium\.spaces\.Space"),
    ],
    ids=["text", "nested text", "binary", "discrete", "graph", "spec"],
)
def test_spaces_without_a_torchrl_spec_are_rejected(space, what):
    with pytest.raises(ea.SpaceMismatchError, match=what):
        ActorEnv([functools.partial(Mixed, space)] * 2)


def test_an_action_and_an_observation_with_the_same_key_are_rejected():
    with pytest.raises(ea.SpaceMismatchError, match="'a'"):
        ActorEnv([functools.partial(Mirror, spaces.Dict(a=spaces.Discrete(2)))])


def test_rewards_of_several_numbers(make):
    env = make([Costly] * 3)
    check_env_specs(env)
    assert env.rollout(2)["next", "reward"].tolist() == [[[0.25, -0.5]] * 2] * 3


# Rollouts -------------------------------------------------------------------------------------------------


@encodings
@pytest.mark.parametrize("envs_per_actor", [1, 3])
@pytest.mark.parametrize(
    "how",
    [{}, {"break_when_any_done": False}, {"break_when_any_done": False, "break_when_all_done": True}],
    ids=["any", "never", "all"],
)
def test_rollouts_are_bit_for_bit_those_of_one_process(make, in_one_process, categorical, envs_per_actor, how):
    ours = make([cartpole] * 3, categorical_action_encoding=categorical, envs_per_actor=envs_per_actor)
    theirs = in_one_process(3, categorical_action_encoding=categorical)
    assert ours.set_seed(7) == theirs.set_seed(7)
    for _ in range(2):  # the second continues with the envs' own generators
        torch.manual_seed(1)
        one = ours.rollout(150, **how)
        torch.manual_seed(1)
        assert_same(one, theirs.rollout(150, **how))
        assert one["next", "done"].any()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", [0, 123, None])
def test_set_seed_seeds_each_env_and_returns_the_next(make, in_one_process, static, seed):
    ours, theirs = make(tellers()), in_one_process(3, lambda: GymWrapper(Teller()))
    assert ours.set_seed(seed, static_seed=static) == theirs.set_seed(seed, static_seed=static)
    seeds = [info["seed"] for info in ours.reset_infos]
    assert seeds[0] == seed
    assert len(set(seeds)) == (1 if static or seed is None else 3)


@pytest.mark.parametrize("seed", [-1, 1.5, "1", [1, 2]])
def test_what_is_no_seed_is_refused(make, seed):
    with pytest.raises(ea.VectorInputError, match=re.escape(f"seed is {seed!r}: expected an int >= 0, or None")):
        make([cartpole] * 2).set_seed(seed)


def test_results_are_not_changed_by_later_steps(make):
    env = make(tellers())
    env.reset()
    steps = [env.step(acting(env, action))["next"] for action in range(4)]
    assert [one["observation"][0].tolist() for one in steps] == [[0, i + 1, i] for i in range(4)]
    assert [one["reward"][0].item() for one in steps] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given,
        lambda given: given.refine_names("envs"),
        lambda given: given.to("cpu"),
        lambda given: given.set("next", given.select("observation").set("extra", torch.ones(3, 1))),
        lambda given: torch.stack([*given], 0),
        lambda given: given.set("_step", torch.tensor([True, False, True])),
    ],
    ids=["plain", "named", "with a device", "with next", "stacked", "masked"],
)
def test_every_tensordict_is_stepped_as_the_base_class_does(make, change):
    ours, theirs = make(tellers()), make(tellers())
    given = [change(env.reset().update(acting(env, 3))) for env in (ours, theirs)]
    stepped, expected = ours.step(given[0]), EnvBase.step(theirs, given[1])
    assert stepped is given[0]
    assert_same(stepped, expected)
    for one, other in ((stepped, expected), (stepped["next"], expected["next"])):
        assert (one.names, one.device, type(one)) == (other.names, other.device, type(other))


@pytest.mark.parametrize("terminates", [True, False, "both"])
def test_an_env_that_is_done_is_reset_alone(make, terminates):
    env = make([functools.partial(Teller, 0, 2, terminates), functools.partial(Teller, 1, 3, terminates)])
    env.reset()
    _, now = env.step_and_maybe_reset(acting(env, 1))
    seen, now = env.step_and_maybe_reset(now.update(acting(env, 2)))
    assert seen["next", "observation"].tolist() == [[0, 2, 2], [1, 2, 2]]  # the last one stays
    assert seen["next", "done"].tolist() == [[True], [False]]
    assert seen["next", "terminated"].tolist() == [[terminates in (True, "both")], [False]]
    assert seen["next", "truncated"].tolist() == [[terminates in (False, "both")], [False]]
    assert now["observation"].tolist() == [[0, 0, 0], [1, 2, 2]]
    assert not now["done"].any()
    assert env.infos == [{"n": 2}, {"n": 2}]


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_a_mask_resets_only_some_envs(make, shape):
    env = make(tellers(2))
    now = env.reset()
    _, now = env.step_and_maybe_reset(now.update(acting(env, 4)))
    now["_reset"] = torch.tensor([False, True]).reshape(shape)
    now = env.reset(now, seed=[9], options={"level": 3})
    assert now["observation"].tolist() == [[0, 1, 4], [1, 0, 0]]
    assert env.reset_infos == [{"seed": None, "options": None}, {"seed": 9, "options": {"level": 3}}]
    now["_reset"] = torch.zeros(shape, dtype=torch.bool)
    assert env.reset(now)["observation"].tolist() == [[0, 1, 4], [1, 0, 0]]


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_a_mask_steps_only_some_envs(make, shape):
    env = make(tellers(2))
    now = env.reset().update(acting(env, 4))
    now["_step"] = torch.tensor([True, False]).reshape(shape)
    after = env.step(now)["next"]
    assert after["observation"].tolist() == [[0, 1, 4], [1, 0, 0]]
    assert after["reward"].tolist() == [[0.5], [0.0]]
    assert not after["done"].any()
    assert env.infos == [{"n": 1}, {}]
    now.pop("_step")  # TorchRL leaves it there
    _, now = env.step_and_maybe_reset(env.step_mdp(now).update(acting(env, 5)))
    assert now["observation"].tolist() == [[0, 2, 5], [1, 1, 5]]
    now = now.update(acting(env, 6)).set("_step", torch.zeros(shape, dtype=torch.bool))
    assert env.step(now)["next", "observation"].tolist() == [[0, 2, 5], [1, 1, 5]]


def test_entries_of_infos(make):
    specs = {"n": Unbounded((), dtype=torch.int64), "seed": Bounded(0, 99, (1,))}
    env = make(tellers(2), info_spec=specs)
    check_env_specs(env, seed=None)
    assert env.reset(seed=[11, 12])["seed"].tolist() == [[11], [12]]
    after = env.step(acting(env, 1))["next"]
    assert (after["n"].tolist(), after["n"].dtype, after["seed"].tolist()) == ([1, 1], torch.int64, [[0], [0]])
    with pytest.raises(ea.SpaceMismatchError, match="reward"):
        ActorEnv(tellers(1), info_spec={"reward": Unbounded(())})


class Narrator(Teller):
    """Has a string in the info of action 7."""

    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "n": "forest" if int(action) == 7 else 1}


def test_an_info_entry_that_is_a_string_is_an_error_that_names_the_env_and_the_key(make):
    env = make([Teller, Narrator], info_spec={"n": Unbounded((), dtype=torch.int64)})
    env.reset()
    env.step(acting(env, 6))
    with pytest.raises(ea.SpaceMismatchError, match=r"'n' of env 1 is 'forest', .* with shape \(\)"):
        env.step(acting(env, 7))
    assert env.infos[1]["n"] == "forest"


@pytest.mark.parametrize("spec", [NonTensor(()), NonTensor((1,)), Composite(inner=NonTensor(()))])
def test_an_info_spec_without_tensors_is_an_error(spec):
    with pytest.raises(ea.SpaceMismatchError, match="contains 'text' with a NonTensor: expected specs of tensors"):
        ActorEnv(tellers(1), info_spec={"text": spec})


@pytest.mark.parametrize("value", [-1, 3])
def test_a_category_outside_its_space_is_an_error(make, value):
    class Lost(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            return 2, {}

        def step(self, action):
            return value, 0.0, False, False, {}

    env = make([Lost])
    assert env.reset()["observation"].tolist() == [[0, 0, 1]]
    with pytest.raises((AssertionError, RuntimeError), match="must be"):
        env.rand_step()


def test_a_device(make):
    env = make([cartpole] * 2)
    assert env.reset().device is None
    env.to("cpu")
    for each in (env, make([cartpole] * 2, device="cpu")):
        check_env_specs(each)
        assert each.rollout(2).device == each.device == each.observation_spec.device == torch.device("cpu")


def test_transforms(make, in_one_process):
    def wrap(env):
        return TransformedEnv(env).append_transform(StepCounter(20)).append_transform(RewardSum())

    ours, theirs = wrap(make([cartpole] * 3)), wrap(in_one_process(3))
    check_env_specs(ours)
    ours.set_seed(1), theirs.set_seed(1)
    torch.manual_seed(0)
    one = ours.rollout(60, break_when_any_done=False)
    torch.manual_seed(0)
    assert_same(one, theirs.rollout(60, break_when_any_done=False))
    assert one["next", "truncated"].any()


# Failures -------------------------------------------------------------------------------------------------


def ask(env, i, wants):
    env.actors[i].set("wants", wants).result()


def test_an_exception_reaches_the_caller_unchanged_and_the_others_continue(make):
    env = make(tellers())
    env.reset()
    ask(env, 1, "raise")
    with pytest.raises(Complaint) as caught:
        env.step(acting(env, 1))
    assert caught.value.index == 1
    assert isinstance(caught.value.__cause__, ea.RemoteTraceback)
    assert env.step(acting(env, 2))["next", "observation"].tolist() == [[0, 2, 2], [1, 1, 2], [2, 2, 2]]


def test_a_crashed_worker_raises_and_the_next_reset_continues(make):
    env = make(tellers())
    env.reset()
    ask(env, 1, "die")
    with pytest.raises(ea.ActorDiedError) as caught:
        env.step(acting(env, 1))
    assert (caught.value.index, caught.value.signal) == (1, signal.SIGKILL)
    with pytest.raises(ea.VectorInputError, match="env 1"):
        env.step(acting(env, 1))
    env.reset()
    assert env.step(acting(env, 2))["next", "observation"].tolist() == [[0, 1, 2], [1, 1, 2], [2, 1, 2]]


def test_a_renewed_envs_episode_is_truncated_and_the_rollout_continues(make):
    env = make(tellers(), on_failure="renew")
    now = env.reset()
    _, now = env.step_and_maybe_reset(now.update(acting(env, 1)))
    ask(env, 1, "die")
    seen, now = env.step_and_maybe_reset(now.update(acting(env, 2)))
    after = seen["next"]
    assert after["observation"].tolist() == [[0, 2, 2], [1, 1, 1], [2, 2, 2]]
    assert (after["truncated"].tolist(), after["terminated"].any()) == ([[False], [True], [False]], False)
    assert after["reward"].tolist() == [[1.0], [0.0], [1.0]]
    assert isinstance(env.infos[1]["failure"], ea.ActorDiedError)
    assert now["observation"].tolist() == [[0, 2, 2], [1, 0, 0], [2, 2, 2]]
    assert env.step(now.update(acting(env, 3)))["next", "observation"].tolist() == [[0, 3, 3], [1, 1, 3], [2, 3, 3]]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_with_replay_a_rollout_with_kills_is_bit_for_bit_one_without(make, in_one_process, envs_per_actor):
    kills = []

    def kill(env, tensordict):
        if len(kills) < 3 and len(tensordict["next", "done"]):
            kills.append(os.kill(env.actors[len(kills) % len(env.actors)].pid, signal.SIGKILL))

    options = {"on_failure": "replay", "restart": ea.RestartPolicy(max_restarts=20, backoff=0)}
    ours, theirs = make([cartpole] * 4, envs_per_actor=envs_per_actor, **options), in_one_process(4)
    ours.set_seed(5), theirs.set_seed(5)
    torch.manual_seed(0)
    one = ours.rollout(60, break_when_any_done=False, callback=kill)
    torch.manual_seed(0)
    assert_same(one, theirs.rollout(60, break_when_any_done=False))
    assert len(kills) == 3
    assert sum(actor.stats().restarts for actor in ours.actors) >= 2


def test_deadlines_restarts_and_standbys_are_passed_on(make):
    factory = functools.partial(Teller, 0)
    env = make([factory] * 2, deadlines=ea.Deadlines(step=0.5), restart=ea.RestartPolicy(max_restarts=1), standbys=1)
    env.reset()
    ask(env, 0, ("/nowhere", "/nowhere"))
    with pytest.raises(ea.ActorTimeoutError):
        env.step(acting(env, 1))
    env.reset()
    ask(env, 0, "die")
    with pytest.raises(ea.ActorDiedError):
        env.step(acting(env, 1))
    with pytest.raises(ea.RestartsExhaustedError):
        env.reset()


def test_episodes_with_seeds_of_their_own(make):
    env = make(tellers(2, length=2), seed_episodes=True)
    env.set_seed(3)
    roots = [info["episode_seed"] for info in env.reset_infos]
    env.reset()
    assert [info["episode_seed"] for info in env.reset_infos] == [episode_seed(root, 1) for root in roots]


def test_a_step_before_a_reset_or_after_the_end_raises(make):
    env = make(tellers(2, length=1))
    with pytest.raises(ea.VectorInputError, match="needs a reset"):
        env.step(acting(env, 1))
    env.reset()
    env.step(acting(env, 1))
    with pytest.raises(ea.VectorInputError, match="needs a reset"):
        env.step(acting(env, 1))
    env.close()
    env.close()
    assert env.is_closed
    with pytest.raises(ea.ActorClosedError):
        env.reset()


def test_the_factories_never_run_here(make):
    home = os.getpid()

    def factory():
        assert os.getpid() != home
        return Teller()

    make([factory])


@pytest.mark.fresh_processes
def test_no_more_envs_run_at_once_than_allowed(make, tmp_path):
    kind = clocked(Teller, tmp_path / "log")
    env = make([functools.partial(kind, i) for i in range(5)], max_running=2)
    env.rollout(4)
    assert most_at_once(tmp_path / "log") == 2


def test_a_factory_may_be_named(make):
    env = make(["gymenvs:Teller"] * 2)
    assert env.rollout(2).batch_size == torch.Size([2, 2])


@pytest.mark.fresh_processes
def test_workers_import_no_torch(make):
    env = make(tellers(1))
    env.rollout(2)
    assert env.actors[0].has_loaded("torch").result() is False


def test_a_constructor_that_fails_leaves_no_process_behind():
    with pytest.raises(ea.SpaceMismatchError):
        ActorEnv([cartpole, Teller])


# Learning -------------------------------------------------------------------------------------------------


class Learner:
    """PPO after TorchRL's tutorial: a collector, GAE, the clipped loss."""

    def __init__(self, env, seed=0):
        torch.manual_seed(seed)
        env.set_seed(seed)
        logits = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        values = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.policy = ProbabilisticActor(
            TensorDictModule(logits, in_keys=["observation"], out_keys=["logits"]),
            spec=env.action_spec,
            in_keys=["logits"],
            distribution_class=torch.distributions.OneHotCategorical,
            return_log_prob=True,
        )
        critic = ValueOperator(values, in_keys=["observation"])
        self.advantages = GAE(gamma=0.98, lmbda=0.9, value_network=critic, average_gae=True)
        self.loss = ClipPPOLoss(self.policy, critic, clip_epsilon=0.2, entropy_coeff=0.0)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=3e-3)

    def learn(self, batch, epochs):
        self.advantages(batch)
        rows = batch.reshape(-1)
        for _ in range(epochs):
            for part in rows[torch.randperm(len(rows))].split(256):
                losses = self.loss(part)
                self.optimizer.zero_grad()
                sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
                self.optimizer.step()

    def parameters(self):
        return [parameter.detach().numpy().tobytes() for parameter in self.loss.parameters()]


def train(env, frames, batch, epochs=2):
    """Trains, and returns the returns of the episodes of each batch, and the parameters."""
    env = TransformedEnv(env).append_transform(InitTracker()).append_transform(RewardSum())
    learner, returns = Learner(env), []
    collector = Collector(env, learner.policy, frames_per_batch=batch, total_frames=frames)
    for data in collector:
        returns.append(data["next", "episode_reward"][data["next", "done"]].tolist())
        learner.learn(data, epochs)
    collector.shutdown()
    return returns, learner.parameters()


def test_training_is_bit_for_bit_the_same_as_in_one_process(make, in_one_process):
    ours = train(make([cartpole] * 4, envs_per_actor=2), 512, 128)
    assert ours == train(in_one_process(4), 512, 128)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_ppo_learns_cartpole(make):
    returns, _ = train(make([cartpole] * 8, envs_per_actor=4), 20 * 1024, 1024, epochs=10)
    first, last = np.mean(returns[0]), np.mean(returns[-1])
    assert first < 40
    assert last > 100


class Painted(gymnasium.Env):
    """Observations are images of bytes, or whatever else the space has."""

    action_space = spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (96, 96, 3), np.uint8),
        spaces.Box(0, 255, (4,), np.uint8),
        spaces.Box(0, 255, (96, 96, 3), np.float32),
        spaces.Box(0, 254, (96, 96, 3), np.uint8),
        spaces.Dict(pixels=spaces.Box(0, 255, (8, 8, 3), np.uint8), state=spaces.Box(0, 1, (2,))),
        spaces.Dict(image=spaces.Box(0, 255, (8, 8, 3), np.uint8)),
    ],
)
def test_images_have_the_keys_of_gym_wrapper(space):
    theirs = GymWrapper(Painted(space))
    ours = ActorEnv([functools.partial(Painted, space)] * 2, backend="thread")
    try:
        assert set(ours.observation_spec.keys(True, True)) == set(theirs.observation_spec.keys(True, True))
        reset = ours.reset(seed=3)
        expected = Painted(space).reset(seed=3)[0]
        [*keys] = theirs.observation_spec.keys(True, True)
        for key in keys:
            value = expected if not isinstance(expected, dict) else expected["state" if key == "observation" else key]
            assert np.array_equal(reset[key][0].numpy(), value)
        rollout = ours.rollout(3)
        assert all(rollout["next", key].shape[:2] == (2, 3) for key in keys)
    finally:
        ours.close()
