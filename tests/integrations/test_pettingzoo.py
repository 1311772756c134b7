"""The drop-in for PettingZoo: batches per agent, agents that join and leave, single copies, and failures."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import signal
import warnings

import numpy as np
import pytest
from helpers import clocked, episode_seed, most_at_once

import envactors as ea
from envactors.mailbox.specs import ArraySpec, flatten, spec_of_space
from envactors.remote import LocalNodes

pytest.importorskip("pettingzoo")

from gymnasium.vector.utils import batch_space, iterate
from pettingzoo import ParallelEnv
from pettingzoo.utils.wrappers import BaseParallelWrapper
from pzenvs import AGENTS, KNIGHTS, Complaint, Fused, Party, Words, die_once, knights, pistons, stones

from envactors.integrations.pettingzoo import ActorParallelEnv
from envactors.integrations.pettingzoo.layout import AgentLayout

# PettingZoo's envs import it, and so do its own tests.
needs_pygame = pytest.mark.skipif(importlib.util.find_spec("pygame") is None, reason="pygame is not installed")
needs_knights = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pygame", KNIGHTS)), reason=f"{KNIGHTS} is not installed"
)
needs_pymunk = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pygame", "pymunk")), reason="pymunk is not installed"
)
GAMES = [
    pytest.param(knights, marks=needs_knights),
    pytest.param(pistons, marks=needs_pymunk),
    pytest.param(stones, marks=needs_pygame),
]


@pytest.fixture
def make():
    """Makes vector envs, and closes them after the test."""
    made = []

    def make_one(env_fns=(Party,) * 2, **options):
        made.append(ActorParallelEnv(env_fns, **options))
        return made[-1]

    yield make_one
    for envs in made:
        envs.close()


@pytest.fixture
def loop_over():
    """Starts loops, each in a process of its own: games leave descriptors open, which the tests would find."""
    loops = []

    def start(env, count, autoreset="next_step"):
        loops.append(ea.spawn(functools.partial(Loop, env, count, autoreset)))
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


class Loop:
    """The copies one after the other: what a user writes without this library."""

    def __init__(self, make, count, autoreset="next_step"):
        self.envs, self.autoreset = [make() for _ in range(count)], autoreset

    def reset(self, seed):
        return [self._entry(env, *env.reset(seed=seed + i)) for i, env in enumerate(self.envs)]

    def step(self, actions):
        return [self._step(i, env, actions) for i, env in enumerate(self.envs)]

    def _step(self, i, env, actions):
        if not env.agents:
            return self._entry(env, *env.reset())
        obs, *others = env.step({name: actions[name][i] for name in env.agents})
        rewards, terminations, truncations, infos = others
        entry = self._entry(env, obs, infos, rewards, terminations, truncations)
        if self.autoreset == "same_step" and not env.agents:
            entry["final"] = obs, infos
            entry["obs"], entry["infos"] = env.reset()
            entry["agents"] = list(env.agents)
        return entry

    def _entry(self, env, obs, infos, rewards=(), terminations=(), truncations=()):
        return {
            "obs": obs,
            "infos": infos,
            "rewards": dict(rewards),
            "terminations": dict(terminations),
            "truncations": dict(truncations),
            "agents": list(env.agents),
        }


def equal(ours, theirs):
    """Returns whether values are equal, dtypes included; an array without axes is as good as a NumPy scalar."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return ours.dtype.kind == theirs.dtype.kind and np.array_equal(ours, theirs)


def check_equal(envs, entries, results):
    """Checks a batch against those of a loop, bit for bit."""
    obs, rewards, terminations, truncations, infos = results
    assert list(obs) == list(rewards) == list(terminations) == list(truncations) == envs.possible_agents
    for (i, entry), name in itertools.product(enumerate(entries), envs.possible_agents):
        given = flatten(spec_of_space(envs.single_observation_space(name)), obs[name])
        if name in entry["obs"]:
            for ours, theirs in zip(
                given, flatten(spec_of_space(envs.single_observation_space(name)), entry["obs"][name]), strict=True
            ):
                assert ours.dtype == np.asarray(theirs).dtype
                assert np.array_equal(ours[i], theirs)
        else:
            assert not any(leaf[i].any() for leaf in given)
        assert rewards[name].dtype == np.float64
        assert rewards[name][i] == entry["rewards"].get(name, 0.0)
        for flags, key in ((terminations, "terminations"), (truncations, "truncations")):
            assert flags[name].dtype == np.bool_
            assert flags[name][i] == entry[key].get(name, False)
        assert envs.masks[name][i] == (name in entry["agents"])
    for told, entry in zip(infos, entries, strict=True):
        if "final" in entry:
            final_obs, final_infos = entry["final"]
            for name in final_obs:
                assert equal(told[name].pop("final_obs"), final_obs[name])
                assert told[name].pop("final_info") == final_infos[name]
            for name in final_obs.keys() - entry["infos"].keys():  # it is not in the next episode from its start
                assert told.pop(name) == {}
        assert told == entry["infos"]


def actions_of(envs, steps, seed=0):
    """Returns random actions, a batch per agent and step."""
    found = [{name: batch_space(envs.single_action_space(name), envs.num_envs) for name in envs.agents}]
    for number, space in enumerate(found[0].values()):
        space.seed(seed + number)
    return [{name: space.sample() for name, space in found[0].items()} for _ in range(steps)]


def run(envs, batches, seed=3, before=lambda number: None):
    """Returns what a run returns."""
    results = [(*envs.reset(seed=seed), None, None, envs.masks)]
    for number, actions in enumerate(batches):
        before(number)
        results.append((*envs.step(actions), envs.masks))
    return results


# Equality with a loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("env", [Party, *GAMES])
def test_equal_to_a_loop_bit_for_bit(make, loop_over, env, autoreset):
    envs, loop = make([env] * 3, envs_per_actor=2, autoreset=autoreset), loop_over(env, 3, autoreset)
    steps, gone, ended = 100 if env is knights else 25, 0, 0
    obs, infos = envs.reset(seed=11)
    nothing = [dict.fromkeys(envs.agents, np.zeros(3, dtype)) for dtype in (np.float64, np.bool_, np.bool_)]
    check_equal(envs, loop.reset(11).result(), (obs, *nothing, infos))
    for actions in actions_of(envs, steps):
        results = envs.step(actions)
        entries = loop.step(actions).result()
        check_equal(envs, entries, results)
        gone += sum(0 < len(entry["agents"]) < len(envs.agents) for entry in entries)
        ended += sum(not entry["agents"] or "final" in entry for entry in entries)
    assert ended
    assert gone or env in (pistons, stones)  # all of them stay to the end there


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_equal_on_every_backend(make, backend):
    envs, loop = make(backend=backend), Loop(Party, 2)
    envs.reset(seed=5)
    loop.reset(5)
    for actions in actions_of(envs, 12):
        check_equal(envs, loop.step(actions), envs.step(actions))


@pytest.fixture
def pettingzoos():
    """PettingZoo's own tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("pettingzoo.test")


@needs_pygame
@pytest.mark.parametrize("env", [Party, *GAMES])
def test_every_copy_passes_pettingzoos_api_test(make, pettingzoos, env):
    envs = make([env] * 2)
    for copy in envs.copies:
        assert isinstance(copy, ParallelEnv)
        with warnings.catch_warnings():
            if env is Party:  # of an agent that comes after the reset
                warnings.filterwarnings("ignore", message="Agent was given|Live agent was not given|No agents present")
            pettingzoos.parallel_api_test(copy, num_cycles=30)
    assert [copy.agents for copy in envs.copies] == [
        [name for name in envs.agents if envs.masks[name][i]] for i in range(2)
    ]


@needs_pygame
def test_copies_pass_pettingzoos_seed_test(make, pettingzoos):
    envs = make()
    pettingzoos.parallel_seed_test(iter(envs.copies).__next__, num_cycles=20)


@needs_pygame
def test_pettingzoos_wrappers_take_a_copy(make, loop_over):
    copy, loop = BaseParallelWrapper(make([stones] * 2).copies[1]), loop_over(stones, 1)
    (first,) = loop.reset(0).result()
    assert equal(copy.reset(seed=0), (first["obs"], first["infos"]))
    (second,) = loop.step({"player_0": [0], "player_1": [2]}).result()
    obs, rewards, *_ = copy.step({"player_0": 0, "player_1": 2})
    assert equal(obs, second["obs"])
    assert rewards == second["rewards"]


# Agents --------------------------------------------------------------------------------------------------


def test_masks_of_agents_that_come_late_and_leave_early(make):
    envs = make()
    assert not any(mask.any() for mask in envs.masks.values())
    envs.reset(seed=[1, 1])
    assert {name: mask.tolist() for name, mask in envs.masks.items()} == {name: [name != "moth"] * 2 for name in AGENTS}
    before = envs.masks
    batches, alive = actions_of(envs, 12), []
    for actions in batches:
        envs.step(actions)
        alive.append([name for name in AGENTS if envs.masks[name][0]])
    assert alive[1][-1] == "moth"
    assert [] in alive
    assert sorted(set(map(len, alive)))[:3] == [0, 1, 2]
    assert not before["moth"].any()  # what was returned does not change
    before["ant"][:] = False
    assert envs.masks["ant"] is not before["ant"]


def test_spaces(make):
    envs = make()
    assert (envs.num_envs, envs.agents, envs.num_agents) == (2, AGENTS, 4)
    plain = Party()
    for name in AGENTS:
        assert envs.single_observation_space(name) == plain.observation_space(name)
        assert envs.single_action_space(name) == plain.action_space(name)
        assert envs.observation_space(name) is envs.observation_space(name)
        assert envs.action_space(name) == batch_space(plain.action_space(name), 2)
        assert envs.copies[1].action_space(name) is not envs.copies[0].action_space(name)
    obs, _ = envs.reset()
    assert all(obs[name] in envs.observation_space(name) for name in AGENTS)
    assert envs.metadata == plain.metadata


def test_actions_per_copy_or_per_agent(make):
    ours, theirs = make(["pzenvs:Party"] * 2), make()
    ours.reset(seed=2)
    theirs.reset(seed=2)
    for actions in actions_of(ours, 10):
        each = [
            {name: list(iterate(ours.action_space(name), actions[name]))[i] for name in copy.agents}
            for i, copy in enumerate(ours.copies)
        ]
        assert equal(ours.step(each), theirs.step(actions))


def test_actions_that_do_not_fit_are_rejected_and_nothing_is_sent(make):
    envs = make()
    envs.reset(seed=0)
    good = actions_of(envs, 1)[0]
    without = {name: batch for name, batch in good.items() if name != "moth"}  # it has not come yet
    bad = {
        r"actions lack the agents \['ant'\]": {**without, "ant": None},
        r"unknown agents \['wasp'\]": {**good, "wasp": [0, 0]},
        r"3 actions\['ant'\] for 2 envs": {**good, "ant": [0, 0, 0]},
        r"actions\[7\] has dtype": {**good, 7: np.zeros((2, 2), complex)},
        r"1 actions for 2 copies": [{}],
        r"actions of <class 'int'>": 5,
        r"actions\[0\] is 3": [3, 3],
        r"actions of copy 0 lack the agents \['ant', 'bee', 7\]": [{}, {}],
    }
    del bad[r"actions lack the agents \['ant'\]"]["ant"]
    for message, actions in bad.items():
        with pytest.raises(ea.SpaceMismatchError, match=message):
            envs.step(actions)
    assert envs.get_attr("count") == [0, 0]
    envs.step(without)
    assert envs.get_attr("count") == [1, 1]


def test_copies_of_other_agents_or_spaces_are_rejected():
    class Fewer(Party):
        possible_agents = AGENTS[:2]

    class Renamed(Party):
        possible_agents = ["ANT", *AGENTS[1:]]  # noqa: RUF012

        def observation_space(self, agent):
            return self.observation_spaces["ant" if agent == "ANT" else agent]

        def action_space(self, agent):
            return self.action_spaces["ant" if agent == "ANT" else agent]

    with pytest.raises(ea.SpaceMismatchError, match="spec of env 1"):
        ActorParallelEnv([Party, Fewer])
    with pytest.raises(ea.SpaceMismatchError, match="names of copy 1 are"):
        ActorParallelEnv([Party, Renamed])


def test_an_env_that_is_not_a_parallel_env_is_rejected():
    from pettingzoo.utils.conversions import parallel_to_aec

    class Unnamed(Party):
        possible_agents = None

    for factory, message in (
        (lambda: parallel_to_aec(Party()), "is an AECEnv: expected a ParallelEnv"),
        (Unnamed, "possible_agents=None: expected a PettingZoo ParallelEnv"),
        (lambda: 5, "expected a PettingZoo ParallelEnv"),
    ):
        with pytest.raises(ea.ActorStartError, match=message):
            ActorParallelEnv([factory], restart=ea.RestartPolicy(max_restarts=1, backoff=0.0))


def test_agents_that_were_not_announced_are_an_error(make):
    class Unannounced(Party):
        possible_agents = AGENTS[:3]

    envs = make([Unannounced])
    envs.reset(seed=0)
    actions = {"ant": [0], "bee": [0], 7: np.zeros((1, 2))}
    envs.step(actions)
    with pytest.raises(ea.VectorStepError, match=r"agents \['moth'\] are alive but missing in"):
        envs.step(actions)


def test_observations_of_no_fixed_size(make):
    envs = make([Words] * 2)
    obs, _ = envs.reset()
    assert obs == {"ant": ["hello"] * 2, "bee": ["you"] * 2}
    assert envs.step({"ant": [0, 0], "bee": [1, 1]})[0] == {"ant": ["bye"] * 2, "bee": ["still"] * 2}
    assert envs.step({"bee": [1, 1]})[0]["bee"] == ["still"] * 2
    assert envs.copies[0].step({"bee": 1})[0]["ant"] == "bye"


@needs_knights
def test_observations_of_no_fixed_size_of_a_real_env(make, loop_over):
    envs = make([functools.partial(knights, "vector-sequence")] * 2)
    obs, _ = envs.reset(seed=4)
    (plain,) = loop_over(functools.partial(knights, "vector-sequence"), 1).reset(5).result()
    assert equal(obs["knight_0"][1], plain["obs"]["knight_0"])
    envs.step(actions_of(envs, 1)[0])


def test_layouts_share_arrays_among_leaves_of_one_shape_and_dtype():
    plain = Party()
    layout = AgentLayout([spec_of_space(plain.observation_space(name)) for name in AGENTS])
    assert [spec.shape for spec in layout.arrays] == [(2, 3), (1, 3), (1, 2, 2), (1,)]
    obs, _ = plain.reset(seed=0)
    arrays, many = layout.make_empty(), layout.make_empty(2)
    for number, name in enumerate(AGENTS[:3]):
        layout.put(arrays, number, obs[name])
        layout.put_batch(many, number, [obs[name]] * 2)
        assert equal(layout.get(arrays, number), obs[name])
        for ours, theirs in zip(
            flatten(layout.specs[number], layout.get_batches(many)[number]),
            flatten(layout.specs[number], obs[name]),
            strict=True,
        ):
            assert np.array_equal(ours, np.stack([theirs] * 2))
    layout.clear(arrays, 1)
    assert not any(leaf.any() for leaf in flatten(layout.specs[1], layout.get(arrays, 1)))
    assert np.array_equal(layout.get(arrays, 0), obs["ant"])
    assert AgentLayout([ArraySpec((), np.dtype(np.int64))] * 5).arrays == (ArraySpec((5,), np.dtype(np.int64)),)


def test_a_layout_writes_values_that_fit_and_refuses_the_others():
    number, grid = ArraySpec((), np.dtype(np.int64)), ArraySpec((2,), np.dtype(np.float32))
    layout = AgentLayout([grid, {"a": grid, "b": (number,)}])
    arrays = layout.make_empty()
    write_array, write_dict = layout.writer(arrays, 0), layout.writer(arrays, 1)
    fit = np.array([1, 2], np.float32)
    assert write_array(fit)
    assert write_dict({"a": fit, "b": (np.int64(3),)})
    assert equal(layout.get(arrays, 0), fit)
    assert equal(layout.get(arrays, 1), {"a": fit, "b": (np.int64(3),)})
    for unfit in ([1.0, 2.0], fit.astype(np.float64), fit[:1], None):
        assert not write_array(unfit)
    for unfit in ({"a": fit}, {"a": fit, "c": 3}, {"a": fit, "b": (3,)}, {"a": fit, "b": [np.int64(3)]}, fit):
        assert not write_dict(unfit)


# Resets --------------------------------------------------------------------------------------------------


def test_disabled_autoreset_and_resets_of_some(make):
    envs, plain = make(autoreset="disabled"), Party()
    envs.reset(seed=0)
    batches = iter(actions_of(envs, 20))
    while any(mask[0] for mask in envs.masks.values()):
        if not any(mask[1] for mask in envs.masks.values()):
            envs.reset(seed=[1], env_ids=[1])
        envs.step(next(batches))
    with pytest.raises(ea.VectorInputError, match="reset"):
        envs.step(next(batches))
    obs, infos = envs.reset(seed=[9], options={"a": 1}, env_ids=[0])
    assert equal(
        {name: obs[name][0] for name in ("ant", 7)},
        {name: value for name, value in plain.reset(seed=9)[0].items() if name != "bee"},
    )
    assert len(infos) == 1
    assert envs.get_attr("options")[0] == {"a": 1}
    assert envs.masks["ant"][0]


def test_steps_of_some_in_any_order(make):
    envs, loop = make([Party] * 3), Loop(Party, 3)
    envs.reset(seed=0)
    loop.reset(0)
    rewards = envs.step([{"ant": i, "bee": 1, 7: np.zeros(2)} for i in (2, 0)], env_ids=[2, 0])[1]
    plain = [env.step({"ant": i, "bee": 1, 7: np.zeros(2)})[1] if i != 1 else None for i, env in enumerate(loop.envs)]
    assert rewards["ant"].tolist() == [plain[2]["ant"], plain[0]["ant"]]
    assert envs.get_attr("count") == [1, 0, 1]
    for i in (0, 2):
        assert envs.copies[i].agents == loop.envs[i].agents


def test_no_more_copies_run_at_once_than_allowed(make, tmp_path):
    envs = make([clocked(Party, tmp_path / "log")] * 5, max_running=2)
    run(envs, actions_of(envs, 6))
    assert most_at_once(tmp_path / "log") == 2


def test_step_async_and_wait(make):
    ours, theirs = make(), make()
    ours.reset(seed=1)
    theirs.reset(seed=1)
    for actions in actions_of(ours, 9):
        ours.step_async(actions)
        with pytest.raises(ea.AlreadyPendingError):
            ours.step_async(actions)
        assert equal(ours.step_wait(), theirs.step(actions))
    with pytest.raises(ea.NothingPendingError):
        ours.step_wait()


def test_a_reset_discards_the_results_of_a_step_that_was_interrupted(make):
    envs, plain = make(), Party()
    envs.reset(seed=0)
    envs.step_async(actions_of(envs, 1)[0])  # the waiting was interrupted
    obs, _ = envs.reset(seed=4)
    assert np.array_equal(obs["ant"][0], plain.reset(seed=4)[0]["ant"])
    envs.step(actions_of(envs, 1)[0])


def test_seeds_of_episodes(make):
    envs = make(seed_episodes=True)
    _, infos = envs.reset(seed=6)
    seeds = [[info["episode_seed"]] for info in infos]
    for actions in actions_of(envs, 20):
        for told, known in zip(envs.step(actions)[-1], seeds, strict=True):
            known.extend(told[key] for key in ("episode_seed",) if key in told)
    for i, known in enumerate(seeds):
        assert len(known) > 2
        assert known == [episode_seed(6 + i, number) for number in range(len(known))]


# Single copies -------------------------------------------------------------------------------------------


def test_a_copy_and_the_vector_see_the_same(make):
    envs, plain = make(), Party()
    envs.reset(seed=0)
    copy = envs.copies[1]
    assert equal(copy.reset(seed=8), plain.reset(seed=8))
    while plain.agents:
        actions = {name: plain.action_space(name).sample() for name in plain.agents}
        results = copy.step(actions)
        assert equal(results, plain.step(actions))
        assert copy.agents == plain.agents
        assert copy.state().tolist() == plain.state().tolist()
    assert [mask[1] for mask in envs.masks.values()] == [False] * 4
    with pytest.raises(ea.VectorInputError, match="none of its agents is alive"):
        copy.step({})
    envs.step({name: batch for name, batch in actions_of(envs, 1)[0].items() if name != "moth"})
    assert copy.agents == ["ant", "bee", 7]
    assert copy.count == 0  # read from the env
    assert copy.possible_agents == AGENTS
    assert (copy.num_agents, copy.max_num_agents, str(copy)) == (3, 4, "party_v0")
    assert copy.unwrapped is copy
    copy.close()
    assert copy.state().tolist() == [0, 3]
    with pytest.raises(AttributeError):
        copy.no_such_name  # noqa: B018
    with pytest.raises(AttributeError):
        copy._secret  # noqa: B018


def test_methods_of_a_copy_run_in_the_worker(make):
    """They used to run in the caller, on an env that was unpickled there."""
    envs = make()
    copy = envs.copies[1]
    assert copy.climb(levels=2) == envs.actors[1].pid
    assert envs.get_attr("level") == [0, 2]
    with pytest.raises(TypeError, match=r"climb is a method of the env: use call\('climb'\)"):
        envs.get_attr("climb")


def test_a_copy_does_not_step_alone_if_it_is_reset_within_its_last_step(make):
    envs = make(autoreset="same_step")
    envs.copies[0].reset(seed=0)
    with pytest.raises(ea.VectorInputError, match="Use autoreset='next_step' or 'disabled'"):
        envs.copies[0].step({"ant": 0, "bee": 0, 7: np.zeros(2)})


def test_attributes_and_methods(make):
    envs = make([functools.partial(Party, render_mode="rgb_array")] * 2)
    envs.reset(seed=0)
    envs.set_attr("level", [3, 4])
    assert envs.get_attr("level") == [3, 4]
    assert envs.call("state")[1].tolist() == [0, 3]
    assert envs.state().shape == (2, 2)
    assert [frame.shape for frame in envs.render()] == [(2, 2, 3)] * 2
    assert envs.copies[0].render().shape == (2, 2, 3)
    assert (envs.render_mode, envs.copies[0].render_mode) == ("rgb_array", "rgb_array")
    assert repr(envs) == "<ActorParallelEnv of 2 copies and 4 possible agents>"
    with envs:
        pass
    with pytest.raises(ea.ActorClosedError):
        envs.reset()


def test_views_of_shared_memory_on_request(make):
    copies, views = make(), make(copy=False)
    for envs in (copies, views):
        envs.reset(seed=0)
    batches = actions_of(copies, 3)
    kept, seen = copies.step(batches[0])[0]["ant"], views.step(batches[0])[0]["ant"]
    before, masks = kept.copy(), views.masks["ant"]
    assert np.array_equal(kept, seen)
    for actions in batches[1:]:  # two rows in turns
        copies.step(actions)
        views.step(actions)
    assert np.array_equal(kept, before)
    assert not np.array_equal(seen, before)
    assert masks.all()


# Failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [Party, pytest.param(knights, marks=needs_knights)])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_replayed_kills_change_nothing(make, tmp_path, env, autoreset):
    fuse = tmp_path / "fuse"
    options = {"autoreset": autoreset, "restart": ea.RestartPolicy(max_restarts=10, backoff=0.0)}
    ours = make([lambda: Fused(env(), fuse)] * 2, on_failure="replay", standbys=1, **options)
    batches = actions_of(ours, 100 if env is knights else 30)
    kills = {len(batches) // 3: ours.actors[0], len(batches) // 2: ours.actors[1]}

    def kill(number):
        if number in kills:  # between two steps
            os.kill(kills[number].pid, signal.SIGKILL)
        if number in (2, len(batches) - 5):  # in the middle of a step
            fuse.touch()

    results = run(ours, batches, before=kill)
    assert sum(actor.stats().restarts for actor in ours.actors) >= 4
    for mine, theirs in zip(results, run(make([env] * 2, **options), batches), strict=True):
        assert equal(mine[0], theirs[0])
        assert equal(mine[1:], theirs[1:])


@pytest.mark.parametrize("way", ["kill", "exception", "deadline"])
def test_a_copy_that_is_lost_truncates_the_agents_that_were_alive(make, way):
    options = {"deadlines": ea.Deadlines(step=0.5)} if way == "deadline" else {}
    envs = make([Sleepy] * 2, on_failure="renew", **options)
    envs.reset(seed=[1, 1])
    batches = actions_of(envs, 20)
    numbers = iter(batches)
    while envs.masks["ant"].sum() + envs.masks["bee"].sum() + envs.masks[7].sum() == 6:
        last = envs.step(next(numbers))
    alive = [name for name in AGENTS if envs.masks[name][0]]
    assert 0 < len(alive) < 4
    if way == "kill":
        os.kill(envs.actors[0].pid, signal.SIGKILL)
    else:
        envs.vector.set_attr("wants", "raise" if way == "exception" else "sleep", env_ids=[0])
    obs, rewards, terminations, truncations, infos = envs.step(next(numbers))
    kinds = {"kill": ea.ActorDiedError, "exception": Complaint, "deadline": ea.ActorTimeoutError}
    assert isinstance(infos[0]["failure"], kinds[way])
    assert "failure" not in infos[1]
    for name in AGENTS:
        assert not terminations[name][0]
        assert rewards[name][0] == 0.0
        assert truncations[name][0] == (name in alive)
        assert not envs.masks[name][0]
        assert (infos[0].get(name, {}).get("failure") is infos[0]["failure"]) == (name in alive)
        for ours, theirs in zip(
            flatten(spec_of_space(envs.single_observation_space(name)), obs[name]),
            flatten(spec_of_space(envs.single_observation_space(name)), last[0][name]),
            strict=True,
        ):
            assert np.array_equal(ours[0], theirs[0])
    obs, rewards, _, truncations, infos = envs.step(next(numbers))
    assert [name for name in AGENTS if envs.masks[name][0]] == ["ant", "bee", 7]
    assert "failure" not in infos[0]
    assert not any(flags[0] for flags in truncations.values())
    envs.step(next(numbers))


class Sleepy(Party):
    def step(self, actions):
        if self.wants == "sleep":
            signal.pause()
        return super().step(actions)


def test_a_copy_that_is_lost_under_same_step(make):
    envs = make(on_failure="renew", autoreset="same_step")
    first, _ = envs.reset(seed=0)
    os.kill(envs.actors[1].pid, signal.SIGKILL)
    obs, rewards, terminations, truncations, infos = envs.step(actions_of(envs, 1)[0])
    assert [truncations[name][1] for name in AGENTS] == [True, True, True, False]
    assert not any(flags[1] for flags in terminations.values())
    assert rewards["ant"][1] == 0.0
    assert rewards["ant"][0] != 0.0
    for name in ("ant", 7):
        assert np.array_equal(infos[1][name]["final_obs"], first[name][1])
        assert isinstance(infos[1][name]["failure"], ea.ActorDiedError)
        assert not np.array_equal(obs[name][1], first[name][1])
    assert [envs.masks[name][1] for name in AGENTS] == [True, True, True, False]
    assert "moth" not in infos[1]
    assert all("final_obs" not in info for info in infos[0].values())


def test_a_copy_that_crashes_between_two_episodes_is_reported(make):
    envs = make(on_failure="renew")
    envs.reset(seed=0)
    numbers = iter(actions_of(envs, 20))
    while any(mask[0] for mask in envs.masks.values()):
        envs.step(next(numbers))
    os.kill(envs.actors[0].pid, signal.SIGKILL)
    _, _, terminations, truncations, infos = envs.step(next(numbers))
    assert isinstance(infos[0]["failure"], ea.ActorDiedError)
    assert not any(flags[0] for flags in (*terminations.values(), *truncations.values()))
    envs.step(next(numbers))
    assert envs.masks["ant"][0]


def test_failures_that_raise_have_the_other_copies_results(make):
    envs, plain = make(), Party()
    envs.reset(seed=0)
    plain.reset(seed=1)
    envs.vector.set_attr("wants", "raise", env_ids=[0])
    actions = actions_of(envs, 1)[0]
    with pytest.raises(ea.VectorStepError) as caught:
        envs.step(actions)
    batch = caught.value.batch
    assert isinstance(caught.value.failures[0], Complaint)
    assert batch.env_ids.tolist() == [1]
    theirs = plain.step({name: actions[name][1] for name in plain.agents})
    assert batch.observations["ant"][0].tolist() == theirs[0]["ant"].tolist()
    assert batch.rewards["ant"].tolist() == [theirs[1]["ant"]]
    assert batch.infos[0]["ant"] == {"count": 1}
    envs.vector.set_attr("wants", None)
    envs.step(actions)  # an exception loses nothing
    os.kill(envs.actors[0].pid, signal.SIGKILL)
    with pytest.raises(ea.VectorStepError):
        envs.step(actions)
    with pytest.raises(ea.VectorInputError, match="reset"):
        envs.step(actions)
    envs.reset(seed=2, env_ids=[0])
    envs.step(actions)


def test_a_copy_raises_its_envs_exception_unchanged(make):
    envs = make()
    copy = envs.copies[1]
    copy.reset(seed=0)
    envs.vector.set_attr("wants", "raise")
    with pytest.raises(Complaint, match="as asked"):
        copy.step({"ant": 0, "bee": 0, 7: np.zeros(2)})
    os.kill(envs.actors[1].pid, signal.SIGKILL)
    with pytest.raises(ea.ActorDiedError):
        copy.step({"ant": 0, "bee": 0, 7: np.zeros(2)})
    assert copy.reset(seed=0)[0]["ant"].shape == (3,)


def test_a_reset_that_fails_is_retried_and_reported(make, tmp_path):
    fuse = tmp_path / "fuse"

    class Fragile(Party):
        def reset(self, seed=None, options=None):
            die_once(fuse)
            return super().reset(seed, options)

    envs, plain = make([Fragile] * 2, on_failure="renew"), Party()
    fuse.touch()
    obs, infos = envs.reset(seed=[5, 5])
    assert obs["ant"][0].tolist() == obs["ant"][1].tolist() == plain.reset(seed=5)[0]["ant"].tolist()
    (failed,) = (info for info in infos if "failure" in info)
    assert [name for name in failed if name != "failure" and "failure" in failed[name]] == ["ant", "bee", 7]
    assert envs.masks["ant"].all()


def test_on_other_nodes(make):
    envs = make(backend=ea.RemoteBackend(LocalNodes(2)))
    envs.reset(seed=4)
    loop = Loop(Party, 2)
    loop.reset(4)
    for actions in actions_of(envs, 6):
        check_equal(envs, loop.step(actions), envs.step(actions))
    assert sorted(actor.node for actor in envs.actors) == ["local-0", "local-1"]
