"""Episodes with seeds of their own: the formula, each episode alone, and replays that reach back to its start."""

from __future__ import annotations

import functools
import os
import random
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from budget import examples
from gymnasium import spaces
from helpers import episode_seed, journals, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from storms import checksum_of_run

import envactors as ea
from envactors.remote import LocalNodes

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)
Seeding = functools.partial(ea.VectorEnv, seed_episodes=True, restart=ALWAYS)
MODES = pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])


class Drift(gymnasium.Env):
    """Everything follows from the seed, the actions, attributes and calls; `made` counts the steps of this process."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, length=4, orders=None):
        self.length = length
        self.orders = orders
        self.scale = 1.0
        self.made = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obey("reset")
        self.pushes = 0
        self.at = self.np_random.normal(size=3) + (options or {}).get("offset", 0)
        self.left = int(self.np_random.integers(1, self.length, endpoint=True))
        return self.at.copy(), {"given": seed}

    def step(self, action):
        self.obey("step")
        self.made += 1
        self.at += self.np_random.normal(size=3) * self.scale + action + self.pushes
        self.left -= 1
        return self.at.copy(), float(self.at.sum()), self.left <= 0, False, {}

    def push(self, n):
        self.pushes += n
        return self.pushes

    def obey(self, where):
        """Fail once, in the step or reset that a file is there for."""
        path = None if self.orders is None else Path(f"{self.orders}.{where}")
        if path is not None and path.exists():
            order = path.read_text()
            path.unlink()
            if order == "raise":
                raise ValueError("as ordered")
            os._exit(9)


def kill(actor):
    """Kill an actor's process between two requests; return once another has taken its place."""
    incarnation = actor.incarnation
    os.kill(actor.pid, signal.SIGKILL)
    wait_until(lambda: actor.incarnation > incarnation)


class Track:
    """What a vector has returned, and the seeds that its infos have said, by env."""

    def __init__(self, envs):
        self.envs = envs
        self.seen = []
        self.seeds = [[] for _ in range(envs.num_envs)]
        self.failures = []

    def note(self, obs, infos, env_ids=None, *rest):
        self.seen.append((obs.tolist(), *(array.tolist() for array in rest)))
        ids = range(self.envs.num_envs) if env_ids is None else env_ids
        for env_id, info in zip(ids, infos, strict=True):
            self.failures += [info["failure"]] if "failure" in info else []
            if "episode_seed" in info:
                self.seeds[env_id].append(info["episode_seed"])
                assert info["given"] == info["episode_seed"]

    def reset(self, env_ids=None, **kwargs):
        self.note(*self.envs.reset(env_ids=env_ids, **kwargs), env_ids)

    def step(self, actions):
        """One step of every env, and a reset of those that need one by hand."""
        obs, rewards, terminated, truncated, infos = self.envs.step(actions)
        self.note(obs, infos, None, rewards, terminated, truncated)
        self.reset_ended(terminated | truncated)

    def stream(self, actions):
        """The same by send and recv."""
        self.envs.send(actions)
        batch = self.envs.recv()
        order = np.argsort(batch.env_ids)
        infos = [batch.infos[row] for row in order]
        self.note(batch.obs[order], infos, None, *(array[order] for array in batch[2:5]))
        self.reset_ended((batch.terminated | batch.truncated)[order])

    def reset_ended(self, ended):
        if ended.any() and self.envs._engine.episodes.autoreset.needs_reset_after_end:
            self.reset(np.flatnonzero(ended).tolist())


def run(autoreset, steps=30, **options):
    """The trajectory of three envs, of which each third step is streamed."""
    dice = random.Random(1)
    with Seeding([Drift] * 3, autoreset=autoreset, **options) as envs:
        track = Track(envs)
        track.reset(seed=10)
        for turn in range(steps):
            actions = [dice.randrange(5) for _ in range(3)]
            (track.stream if turn % 3 == 2 else track.step)(actions)
        assert not track.failures
    for env_id, seeds in enumerate(track.seeds):
        assert len(seeds) > 4
        assert seeds == [episode_seed(10 + env_id, number) for number in range(len(seeds))]
    return track.seen


@MODES
def test_all_ways_give_the_same_trajectories_and_the_seeds_of_the_formula(autoreset):
    expected = run(autoreset, backend="inline")
    assert run(autoreset) == expected
    assert run(autoreset, backend="thread") == expected
    assert run(autoreset, envs_per_actor=2) == expected
    assert run(autoreset, envs_per_actor=3, on_failure="renew") == expected
    assert run(autoreset, envs_per_actor=2, on_failure="replay") == expected


@pytest.mark.parametrize(
    "autoreset", ["same_step", *(pytest.param(one, marks=pytest.mark.soak) for one in ("next_step", "disabled"))]
)
def test_other_machines_give_the_same_trajectories(autoreset):
    nodes = ea.RemoteBackend(LocalNodes(2))
    assert run(autoreset, backend=nodes, on_failure="replay") == run(autoreset, backend="inline")


@MODES
def test_an_episode_alone_is_the_same_bit_for_bit(autoreset):
    with Seeding([Drift] * 2, autoreset=autoreset) as envs:
        obs, infos = envs.reset(seed=[5, 2**70])
        episodes = [[(infos[i]["episode_seed"], [], [obs[i]])] for i in range(2)]
        ended = [False, False]
        for turn in range(40):
            actions = [turn % 5, turn % 3]
            obs, _, terminated, _, infos = envs.step(actions)
            for i in range(2):
                seed, given, seen = episodes[i][-1]
                if not ended[i]:
                    given.append(actions[i])
                    seen.append(infos[i].get("final_obs", obs[i]))
                if "episode_seed" in infos[i]:
                    episodes[i].append((infos[i]["episode_seed"], [], [obs[i]]))
            ended = terminated.tolist() if autoreset == "next_step" else [False, False]
            if autoreset == "disabled" and terminated.any():
                ids = np.flatnonzero(terminated).tolist()
                for i, first, info in zip(ids, *envs.reset(env_ids=ids), strict=True):
                    episodes[i].append((info["episode_seed"], [], [first]))
    for seed, given, seen in [*episodes[0], *episodes[1]]:
        env = Drift()
        alone = [env.reset(seed=seed)[0], *[env.step(action)[0] for action in given]]
        assert np.array_equal(alone, seen)
    assert min(len(episodes[0]), len(episodes[1])) > 8


operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("stream"), st.none()),
        st.tuples(st.just("reset"), st.sampled_from([None, 3, 8])),
        st.tuples(st.just("reset some"), st.lists(st.integers(0, 2), unique=True, min_size=1)),
        st.tuples(st.just("seed some"), st.lists(st.integers(0, 2), unique=True, min_size=1)),
    ),
    max_size=25,
)


@MODES
@settings(max_examples=examples(40))
@given(operations)
def test_episodes_count_from_the_last_seed_for_manual_and_automatic_resets(autoreset, asked):
    with Seeding([Drift] * 3, autoreset=autoreset, backend="inline") as envs:
        track, expected = Track(envs), [[] for _ in range(3)]
        roots, numbers = [0, 0, 0], [0, 0, 0]
        for what, argument in [("reset", 20), *asked]:
            if what in ("step", "stream"):
                getattr(track, what)([1, 2, 3])
            elif what == "reset":
                track.reset(seed=argument)
            elif what == "reset some":
                track.reset(argument)
            else:
                track.reset(argument, seed=[50 + env_id for env_id in argument])
            seeded = {"reset": [0, 1, 2] if argument is not None else [], "seed some": argument}.get(what, [])
            for env_id, seeds in enumerate(track.seeds):
                if env_id in seeded:
                    roots[env_id], numbers[env_id] = (argument if what == "reset" else 50) + env_id, 0
                while len(expected[env_id]) < len(seeds):
                    expected[env_id].append(episode_seed(roots[env_id], numbers[env_id]))
                    numbers[env_id] += 1
        assert track.seeds == expected


def test_an_env_that_was_never_seeded_counts_from_a_random_seed():
    roots = set()
    for _ in range(2):
        with Seeding([Drift] * 2, autoreset="same_step", backend="inline") as envs:
            track = Track(envs)
            track.reset()
            for _ in range(10):
                track.step([1, 1])
            for seeds in track.seeds:
                roots.add(seeds[0])
                assert seeds == [episode_seed(seeds[0], number) for number in range(len(seeds))]
    assert len(roots) == 4


def test_without_seed_episodes_infos_contain_no_seed():
    with ea.VectorEnv([Drift]) as envs:
        assert envs.reset(seed=1)[1] == [{"given": 1}]
        infos = [envs.step([0])[4] for _ in range(10)]
        assert [{"given": None}] in infos
        assert not any("episode_seed" in info for (info,) in infos)


@pytest.mark.parametrize("option", [None, 1, "yes"])
def test_seed_episodes_rejects_values_that_are_not_bools(option):
    with pytest.raises(ValueError, match="seed_episodes"):
        ea.VectorEnv([Drift], seed_episodes=option)


# Replays ------------------------------------------------------------------------------------------------


def replayed(autoreset, envs_per_actor, kills, seed=7):
    """A long run: with kills while idle and in the middle of steps, and a journal that holds one episode alone."""
    dice, deaths = random.Random(1), random.Random(2)
    options = {"autoreset": autoreset, "envs_per_actor": envs_per_actor}
    with Seeding([Drift] * 4, on_failure="replay", max_journal=4, **options) as envs:
        track = Track(envs)
        envs.set_attr("scale", [0.5, 1.0, 2.0, 3.0])
        track.reset(seed=seed)
        for turn in range(120):
            actions = [dice.randrange(5) for _ in range(4)]
            victim = envs.actors[deaths.randrange(len(envs.actors))]
            if kills and turn % 12 == 3:
                kill(victim)
                position = envs.actors.index(victim) * envs_per_actor
                assert max(envs.get_attr("made", range(position, position + envs_per_actor))) <= 4
                assert envs.get_attr("scale") == [0.5, 1.0, 2.0, 3.0]
            if turn % 3:
                track.step(actions)
            else:
                envs.send(actions)
                if kills and turn % 12 == 9:
                    os.kill(victim.pid, signal.SIGKILL)
                batch = envs.recv()
                order = np.argsort(batch.env_ids)
                infos = [batch.infos[row] for row in order]
                track.note(batch.obs[order], infos, None, *(array[order] for array in batch[2:5]))
                track.reset_ended((batch.terminated | batch.truncated)[order])
            assert max(len(journal._entries) for actor in envs.actors for journal in journals(actor)) <= 5
        if kills:
            assert sum(actor.stats().restarts for actor in envs.actors) >= 10
    assert track.failures == []
    return track.seen


@MODES
@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_a_long_run_with_kills_is_the_undisturbed_one_and_no_replay_is_longer_than_an_episode(
    autoreset, envs_per_actor
):
    assert replayed(autoreset, envs_per_actor, kills=True) == replayed(autoreset, envs_per_actor, kills=False)


@MODES
def test_a_replay_makes_the_steps_of_the_present_episode_alone(autoreset):
    with Seeding([functools.partial(Drift, 6)], on_failure="replay", autoreset=autoreset) as envs:
        track, lengths = Track(envs), []
        track.reset(seed=3)
        of_episode = 0
        for turn in range(40):
            before = len(track.seeds[0])
            track.step([turn % 5])
            begun = len(track.seeds[0]) > before
            of_episode = 0 if begun else of_episode + 1
            kill(envs.actors[0])
            lengths.append(of_episode)
            assert envs.get_attr("made") == [of_episode]
        assert track.failures == []
        assert max(lengths) >= 4


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("fault", ["exit", "raise"])
@MODES
def test_one_fault_does_not_change_seeded_episodes(tmp_path, autoreset, fault, where):
    def perform(with_fault):
        factory = functools.partial(Drift, 3, str(tmp_path / "0"))
        with Seeding([factory], on_failure="replay", autoreset=autoreset) as envs:
            track = Track(envs)
            track.reset()  # never seeded, and restored all the same
            track.reset(seed=4)
            track.seen.clear()
            for turn in range(12):
                if with_fault and turn == 5:
                    (tmp_path / f"0.{where}").write_text(fault)
                track.step([turn % 5])
            assert not (tmp_path / f"0.{where}").exists()
            assert envs[0].incarnation == int(with_fault)
            assert track.failures == []
            return track.seen, track.seeds[0][1:]

    assert perform(True) == perform(False)


def test_calls_of_earlier_episodes_are_not_made_again_and_attributes_are_set_again():
    with Seeding([functools.partial(Drift, 3)], on_failure="replay", autoreset="same_step") as envs:
        track = Track(envs)
        track.reset(seed=1)
        envs.call("push", 5)
        envs.set_attr("scale", 2.0)
        while len(track.seeds[0]) < 3:
            track.step([0])
        assert len(journals(envs.actors[0])[0]._entries) == 1
        assert envs.call("push", 2) == [2]
        kill(envs.actors[0])
        assert envs.call("push", 0) == [2]
        assert envs.get_attr("scale") == [2.0]


def test_a_journal_that_was_given_up_begins_again_with_the_next_episode():
    with Seeding([functools.partial(Drift, 12)], on_failure="replay", max_journal=3, autoreset="same_step") as envs:
        track, tried = Track(envs), 0
        track.reset(seed=1)
        while tried < 3:
            if journals(envs.actors[0])[0].can_replay:
                track.step([1])
                continue
            while not journals(envs.actors[0])[0].can_replay:
                track.step([1])
            kill(envs.actors[0])
            track.step([1])
            tried += 1
        assert track.failures == []


# Renewals -----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_a_renewed_env_continues_with_the_seed_of_the_next_episode(autoreset, envs_per_actor):
    options = {"autoreset": autoreset, "envs_per_actor": envs_per_actor}
    with Seeding([functools.partial(Drift, 6)] * 2, on_failure="renew", **options) as envs:
        track = Track(envs)
        track.reset(seed=10)
        for turn in range(60):
            if turn % 15 == 7:
                kill(envs.actors[-1])
            track.step([1, turn % 5])
        assert len(track.failures) == 4 * envs_per_actor
        for env_id, seeds in enumerate(track.seeds):
            assert len(seeds) > 10
            assert seeds == [episode_seed(10 + env_id, number) for number in range(len(seeds))]


@pytest.mark.parametrize("fault", ["exit", "raise"])
@pytest.mark.parametrize("on_failure", ["raise", "renew"])
@MODES
def test_an_episode_that_could_not_begin_is_not_begun_again(tmp_path, autoreset, on_failure, fault):
    """The seed may be the cause; a reset that the user has asked for is repeated once under "renew", as usual."""
    options = {"autoreset": autoreset, "on_failure": on_failure}
    with Seeding([functools.partial(Drift, 3, str(tmp_path / "0"))], **options) as envs:
        track = Track(envs)
        track.reset(seed=10)
        (tmp_path / "0.reset").write_text(fault)
        while (tmp_path / "0.reset").exists():
            try:
                track.step([1])
            except ea.VectorStepError:
                track.reset()
        for _ in range(8):
            track.step([1])
        numbers = [number for number in range(len(track.seeds[0]) + 1) if number != 1]
        if autoreset == "disabled" and on_failure == "renew":  # it is repeated
            numbers = range(len(track.seeds[0]))
        assert track.seeds[0] == [episode_seed(10, number) for number in numbers[: len(track.seeds[0])]]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("standbys", [0, 1])
def test_recycled_envs_and_standbys_continue_with_the_seed_of_the_next_episode(autoreset, standbys):
    def perform(**options):
        with Seeding([Drift] * 2, autoreset=autoreset, **options) as envs:
            track = Track(envs)
            track.reset(seed=10)
            for _ in range(30):
                track.step([1, 2])
            return track.seen, track.seeds, envs.actors[0].incarnation

    *recycled, incarnation = perform(recycle=ea.RecyclePolicy(max_steps=5), standbys=standbys)
    assert incarnation >= 3
    assert recycled == [*perform()[:2]]


# A long run -----------------------------------------------------------------------------------------------


def checksum_of_cartpole(steps, **kills):
    make, actions = functools.partial(gymnasium.make, "CartPole-v1"), np.random.default_rng(2).integers(0, 2, (997, 8))
    return checksum_of_run(make, actions, steps, **kills, seed_episodes=True, max_journal=500)


@pytest.mark.parametrize(
    ("steps", "kills"),
    [
        (4_000, {"every": 100}),
        pytest.param(16_000, {"seconds": 0.2}, marks=pytest.mark.slow),
        pytest.param(1_000_000, {"seconds": 0.5}, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_many_steps_with_kills_give_the_observations_of_an_undisturbed_run(steps, kills):
    undisturbed, _, restarts = checksum_of_cartpole(steps)
    assert restarts == 0
    disturbed, longest, restarts = checksum_of_cartpole(steps, **kills)
    assert disturbed == undisturbed
    assert restarts >= 2
    assert longest <= 500
