"""A vector env over real processes against a plain model: every result belongs to the action that caused it."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from budget import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import envactors as ea

NUM_ENVS = 3
PATIENCE = 30.0  # far above what anything here takes


def length_of(env_id):
    """The length of an env's episodes, in steps."""
    return 2 + env_id


def echo_factory(env_id):
    """An env that says in each observation which env, step and action it belongs to, and logs what it was asked."""
    length = length_of(env_id)

    class Echo:  # a local class travels by value: workers do not import this module
        observation_space = SimpleNamespace(shape=(3,), dtype=np.dtype(np.int64))
        action_space = SimpleNamespace(shape=(), dtype=np.dtype(np.int64))

        def __init__(self):
            self.count, self.last, self.log = 0, -1, []

        def observe(self):
            return np.array([env_id, self.count, self.last])

        def reset(self, seed=None, options=None):
            self.count, self.last = 0, -1
            self.log.append(("reset", seed, options))
            return self.observe(), {"seed": seed}

        def step(self, action):
            self.count, self.last = self.count + 1, int(action)
            self.log.append(("step", self.last))
            over = self.count >= length
            ends = (over and env_id % 2 == 0, over and env_id % 2 == 1)
            return self.observe(), 1000.0 * env_id + self.last, *ends, {"count": self.count}

        def take_log(self):
            log, self.log = self.log, []
            return log

    return Echo


class Outcome(NamedTuple):
    """What a reset or step must result in."""

    obs: list[int]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Model:
    """One env and its autoreset, without processes."""

    def __init__(self, env_id, autoreset):
        self.env_id, self.autoreset = env_id, autoreset
        self.count, self.last, self.log = 0, -1, []
        self.ended = self.needs_reset = False
        self.steps = self.episodes = 0

    def reset(self, seed=None, options=None):
        self.count, self.last = 0, -1
        self.ended = self.needs_reset = False
        self.log.append(("reset", seed, options))
        return Outcome([self.env_id, 0, -1], 0.0, False, False, {"seed": seed})

    def step(self, action):
        if self.ended:
            return self.reset()
        self.count, self.last = self.count + 1, action
        self.log.append(("step", action))
        self.steps += 1
        obs, info = [self.env_id, self.count, action], {"count": self.count}
        reward = 1000.0 * self.env_id + action
        if self.count < length_of(self.env_id):
            return Outcome(obs, reward, False, False, info)
        self.episodes += 1
        if self.autoreset == "same_step":
            first = self.reset()
            obs, info = first.obs, {**first.info, "final_obs": obs, "final_info": info}
        else:
            self.ended, self.needs_reset = self.autoreset == "next_step", self.autoreset == "disabled"
        return Outcome(obs, reward, self.env_id % 2 == 0, self.env_id % 2 == 1, info)


some_ids = st.none() | st.lists(st.sampled_from(range(NUM_ENVS)), unique=True, min_size=1)
some_seeds = st.none() | st.integers(0, 1000) | st.just("each")
patience = st.sampled_from([PATIENCE, PATIENCE, 0.0])
counts = st.none() | st.integers(0, NUM_ENVS + 1)

ALWAYS_WRONG = [
    lambda envs: envs.step([1, 1], env_ids=[0, 0]),
    lambda envs: envs.send([1], env_ids=[NUM_ENVS]),
    lambda envs: envs.submit([1], env_ids=[-1]),
    lambda envs: envs.send([1], env_ids=[True]),
    lambda envs: envs.reset(env_ids=[1, 1]),
    lambda envs: envs.reset(seed=[1]),
    lambda envs: envs.reset(seed="1"),
    lambda envs: envs.step([1] * NUM_ENVS, timeout=-1.0),
    lambda envs: envs.recv(min_envs=-1),
    lambda envs: envs.recv(min_envs=2, max_envs=1),
    lambda envs: envs.recv(max_envs=True),
    lambda envs: envs.set_attr("log", [1]),
]
WRONG_ACTIONS = [
    [1] * (NUM_ENVS + 1),
    [1] * (NUM_ENVS - 1),
    [0.5] * NUM_ENVS,
    [[1]] * NUM_ENVS,
    np.ones((NUM_ENVS, 1), np.int64),
    ["1"] * NUM_ENVS,
    7,
]


class Facade(RuleBasedStateMachine):
    """What is drawn never depends on what came when, so that each example can be repeated."""

    def __init__(self, envs, autoreset):
        super().__init__()
        self.envs = envs
        # Whatever an example that failed has left behind.
        with contextlib.suppress(ea.NothingPendingError):
            while True:
                envs.recv(timeout=PATIENCE)
        envs.call("take_log")
        envs.reset()
        envs.call("take_log")
        self.before = envs.stats()
        self.models = [Model(i, autoreset) for i in range(NUM_ENVS)]
        self.collected: dict[int, Outcome] = {}
        self.submitted: dict[int, tuple[ea.Future, Outcome]] = {}
        self.handed_out: list[tuple[Any, Any]] = []
        self.actions = 0

    # Requests --------------------------------------------------------------------------------------------

    @rule(env_ids=some_ids, seed=some_seeds, timeout=patience)
    def reset(self, env_ids, seed, timeout):
        ids = ids_of(env_ids)
        seed = [100 + k for k in range(len(ids))] if seed == "each" else seed
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in ids]

        def expect():
            return {i: self.models[i].reset(one, {"k": 1}) for i, one in zip(ids, seeds, strict=True)}

        is_owing = any(i in self.collected or i in self.submitted for i in ids)
        for i in ids:
            self.collected.pop(i, None)  # a reset waits for what the envs run, and drops results that nobody took

        def ask():
            patient = PATIENCE if is_owing else timeout
            return self.envs.reset(seed=seed, options={"k": 1}, env_ids=env_ids, timeout=patient)

        result = self.request(ids, ask, expect, stepping=False)
        if result is not None:
            obs, infos = result
            none = np.zeros(len(ids), bool)
            self.check_rows(ids, obs, np.zeros(len(ids)), none, none, infos)

    @rule(env_ids=some_ids, timeout=patience)
    def step(self, env_ids, timeout):
        ids, actions = ids_of(env_ids), self.next_actions(env_ids)
        result = self.request(
            ids,
            lambda: self.envs.step(actions, env_ids=env_ids, timeout=timeout),
            lambda: self.step_models(ids, actions),
        )
        if result is not None:
            self.check_rows(ids, *result)

    @rule(env_ids=some_ids, as_array=st.booleans())
    def send(self, env_ids, as_array):
        ids, actions = ids_of(env_ids), self.next_actions(env_ids)
        given = np.array(actions) if as_array else actions
        self.request(ids, lambda: self.envs.send(given, env_ids=env_ids), lambda: self.step_models(ids, actions))

    @rule(env_ids=some_ids)
    def submit(self, env_ids):
        ids, actions = ids_of(env_ids), self.next_actions(env_ids)
        futures = self.request(
            ids, lambda: self.envs.submit(actions, env_ids=env_ids), lambda: self.step_models(ids, actions)
        )
        if futures is not None:
            assert len(futures) == len(ids)
            for i, future in zip(ids, futures, strict=True):
                self.submitted[i] = (future, self.collected.pop(i))

    def request(self, ids, ask, expect, *, stepping=True):
        """Asks, and notes what the envs owe from then on; a refusal must have its reason, and changes nothing.

        Returns:
            What the request returned; None where it was refused or its waiting ended.
        """
        owing = [i for i in ids if i in self.collected]
        maybe_owing = [i for i in ids if i in self.submitted]
        needs_reset = stepping and any(self.models[i].needs_reset for i in ids)
        result = None
        try:
            result = ask()
        except ea.AlreadyPendingError:
            assert owing or maybe_owing
            return None
        except ea.VectorInputError:
            assert needs_reset
            assert not owing
            return None
        except ea.VectorTimeoutError:
            pass  # the results come with recv
        assert not owing
        assert not needs_reset
        for i in maybe_owing:
            assert self.submitted[i][0].done()
            self.take(i)
        self.collected |= expect()
        return result

    def step_models(self, ids, actions):
        return {i: self.models[i].step(action) for i, action in zip(ids, actions, strict=True)}

    def next_actions(self, env_ids):
        """Actions that no other request has."""
        first = self.actions
        self.actions += len(ids_of(env_ids))
        return list(range(first, self.actions))

    # Results ---------------------------------------------------------------------------------------------

    @rule(min_envs=counts, max_envs=counts, timeout=patience)
    def recv(self, min_envs, max_envs, timeout):
        owed = len(self.collected)
        limit = owed if max_envs is None else min(max_envs, owed)
        wanted = owed if min_envs is None else min(min_envs, owed)

        def ask():
            return self.envs.recv(min_envs=min_envs, max_envs=max_envs, timeout=timeout)

        if min_envs is not None and max_envs is not None and min_envs > max_envs:
            with pytest.raises(ea.VectorInputError):
                ask()
            return
        if owed == 0:
            with pytest.raises(ea.NothingPendingError):
                ask()
            return
        batch = ask()
        assert isinstance(batch, ea.Batch)
        least = min(wanted, limit) if timeout else 0
        assert least <= len(batch.env_ids) <= limit
        assert batch.env_ids.dtype == batch.incarnations.dtype == np.int64
        assert not batch.incarnations.any()
        assert len(batch.incarnations) == len(batch.env_ids)
        self.check_rows(batch.env_ids.tolist(), *batch[1:6])

    @rule(count=st.integers(1, NUM_ENVS))
    def take_futures(self, count):
        """Takes some of the futures' results, in the order of their completion."""
        of = {future: i for i, (future, _) in self.submitted.items()}
        for _, future in zip(range(count), ea.as_completed(of, timeout=PATIENCE), strict=False):
            self.take(of[future])

    def take(self, env_id):
        future, expected = self.submitted.pop(env_id)
        step = future.result(PATIENCE)
        assert isinstance(step, ea.EnvStep)
        assert (step.env_id, step.incarnation) == (env_id, 0)
        assert plain(*step[1:6]) == expected
        self.keep(step)

    def check_rows(self, ids, obs, rewards, terminated, truncated, infos):
        """Each row is what that env owed, and no env owes it any longer."""
        assert obs.shape == (len(ids), 3)
        assert (obs.dtype, rewards.dtype) == (np.int64, np.float64)
        assert terminated.dtype == truncated.dtype == np.bool_
        assert len({len(column) for column in (ids, obs, rewards, terminated, truncated, infos)}) == 1
        for k, i in enumerate(ids):
            assert plain(obs[k], rewards[k], terminated[k], truncated[k], infos[k]) == self.collected.pop(i)
        self.keep((obs, rewards, terminated, truncated, infos))

    def keep(self, result):
        self.handed_out.append((result, copy.deepcopy(result)))

    # Other methods -------------------------------------------------------------------------------------

    @rule(wrong=st.sampled_from(ALWAYS_WRONG))
    def wrong_input_is_refused(self, wrong):
        with pytest.raises(ValueError):
            wrong(self.envs)

    @rule(actions=st.sampled_from(WRONG_ACTIONS), way=st.sampled_from(["step", "send", "submit"]))
    def wrong_actions_are_refused(self, actions, way):
        may_owe = bool(self.collected or self.submitted)
        with pytest.raises((ea.VectorInputError, ea.AlreadyPendingError)) as caught:
            getattr(self.envs, way)(actions)
        assert may_owe or caught.type is not ea.AlreadyPendingError

    @rule(env_ids=some_ids)
    def a_call_comes_after_the_steps_before_it(self, env_ids):
        ids = ids_of(env_ids)
        seen = self.envs.call("observe", env_ids=env_ids)
        assert [obs.tolist() for obs in seen] == [[i, self.models[i].count, self.models[i].last] for i in ids]

    @rule(env_ids=some_ids)
    def attributes_are_those_of_each_env(self, env_ids):
        assert self.envs.get_attr("count", env_ids=env_ids) == [self.models[i].count for i in ids_of(env_ids)]

    def teardown(self):
        self.take_futures(NUM_ENVS)
        while self.collected:
            self.recv(1, None, PATIENCE)
        with pytest.raises(ea.NothingPendingError):
            self.envs.recv()
        assert self.envs.call("take_log") == [model.log for model in self.models]
        after = self.envs.stats()
        for model, steps, episodes in zip(self.models, self.before.steps, self.before.episodes, strict=True):
            assert after.steps[model.env_id] == steps + model.steps
            assert after.episodes[model.env_id] == episodes + model.episodes
        for result, as_it_was in self.handed_out:
            assert repr(result) == repr(as_it_was), "what was handed out never changes"


def ids_of(env_ids):
    return list(range(NUM_ENVS)) if env_ids is None else env_ids


def plain(obs, reward, terminated, truncated, info):
    """A result without arrays, to compare."""
    info = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in info.items()}
    return Outcome(obs.tolist(), float(reward), bool(terminated), bool(truncated), info)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_results_belong_to_their_actions(autoreset):
    few = settings(max_examples=examples(20), stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
    with ea.VectorEnv([echo_factory(i) for i in range(NUM_ENVS)], autoreset=autoreset) as envs:
        run_state_machine_as_test(lambda: Facade(envs, autoreset), settings=few)
