"""The worker's half of steps and resets, driven without a parent, through the rows alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
from plainworker import ACTION, Scripted, fault_of

from envactors.mailbox import bundle
from envactors.mailbox.control_page import ASLEEP, OVERFLOWS
from envactors.mailbox.messages import Fault, Pickled
from envactors.mailbox.pickling import dumps, make_payload, pack_failure, unpack_failure
from envactors.mailbox.slab import HALF, NO_AUTORESET, RESET
from envactors.mailbox.specs import OBJECT
from envactors.worker.host import checksum


def unpickle_badly():
    raise RuntimeError("boom on arrival")


class ExplodesOnArrival:
    def __reduce__(self):
        return unpickle_badly, ()


@pytest.fixture(params=[True, False], ids=["pickled", "objects"])
def pickles(request):
    return request.param


@pytest.fixture(params=[ACTION, None], ids=["actions in rows", "actions as payload"])
def action(request):
    return request.param


def chain(*observations):
    check = 0
    for obs in observations:
        check = checksum(np.array(obs, np.float64), check)
    return check


# Results -------------------------------------------------------------------------------------------------


def test_each_env_returns_the_result_of_its_action(make_parent, pickles, action):
    parent = make_parent(pickles=pickles, action=action)
    parent.run(dict.fromkeys(range(3), 0), ops=dict.fromkeys(range(3), RESET), seeds={0: 10, 1: 11, 2: 12})
    results = parent.run({0: 1, 1: 2, 2: 7})
    assert [results[env][0] for env in range(3)] == [
        ([1, 1], 1.0, False, False, {}),
        ([1, 2], 2.0, True, False, {}),
        ([1, 7], 7.0, False, True, {}),
    ]
    assert [results[env][1] for env in range(3)] == [chain([10 + env] * 2, results[env][0][0]) for env in range(3)]
    assert parent.run({1: 1})[1][0] == ([2, 1], 1.0, False, False, {})
    assert [env.steps for env in parent.envs] == [1, 2, 1], "only what was posted"


def test_previous_observation_stays_in_the_other_half(make_parent):
    parent = make_parent()
    parent.run({0: 1})
    parent.run({0: 0})
    half = int(parent.slab.ops[0]) & HALF
    assert parent.slab.observations[0][half, 0].tolist() == [2, 0]
    assert parent.slab.observations[0][half ^ HALF, 0].tolist() == [1, 1]
    parent.run({0: 3})
    assert parent.slab.observations[0][half, 0].tolist() == [2, 0], "also after a failure"


def options_as_payload(seed, options, pickles):
    content = seed, options if options is None or not pickles else Pickled(bytes(dumps(options)))
    return bytes(dumps(content)) if pickles else content


@pytest.mark.parametrize(("small", "large"), [(None, None), (5, None), ((1 << 64) - 1, None), (None, 1 << 64)])
@pytest.mark.parametrize("options", [None, {"level": 2}])
def test_reset_gets_its_seed_and_options(make_parent, pickles, action, small, large, options):
    parent = make_parent(pickles=pickles, action=action)
    needs_payload = large is not None or options is not None
    payloads = {1: options_as_payload(large, options, pickles)} if needs_payload else {}
    seeds = {} if small is None else {1: small}
    obs, reward, terminated, truncated, info = parent.run({1: 0}, ops={1: RESET}, seeds=seeds, payloads=payloads)[1][0]
    seed = small if large is None else large
    assert parent.envs[1].seeds == [seed]
    assert obs == [100 if seed is None else seed % 1000] * 2
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == ({} if options is None else {"options": options})


@pytest.mark.parametrize("seed", [None, 8])
@pytest.mark.parametrize("ending", [2, 7])
def test_ended_episode_is_reset_within_the_step(make_parent, pickles, seed, ending):
    parent = make_parent(autoreset=True, pickles=pickles)
    parent.run({0: 0}, ops={0: RESET}, seeds={0: 5})
    seeds = {} if seed is None else {0: seed}
    (obs, reward, terminated, truncated, info), check = parent.run({0: ending}, seeds=seeds)[0]
    assert obs == [100 if seed is None else seed] * 2
    assert (reward, terminated, truncated) == (float(ending), ending == 2, ending == 7)
    assert info["final_obs"].tolist() == [1, ending]
    assert info["final_info"] == {}
    assert parent.envs[0].seeds == [5, seed]
    assert check == (chain([5, 5], [1, ending], obs) if seed is None else chain(obs))


def test_ended_episode_in_a_retiring_process_is_not_reset_within_the_step(make_parent):
    parent = make_parent(autoreset=True)
    assert parent.run({0: 2}, ops={0: NO_AUTORESET})[0][0] == ([1, 2], 2.0, True, False, {})
    assert parent.envs[0].seeds == []


def test_large_infos_overflow_and_are_counted(make_parent):
    parent = make_parent()
    for count in (1, 2, 3):
        assert parent.run({0: 5, 1: 1})[0][0][4] == {"large": "x" * 10_000}
        assert parent.page.counters[OVERFLOWS] == count


def test_only_streamed_results_have_a_time_of_completion(make_parent):
    parent = make_parent()
    before = time.monotonic()
    parent.run({0: 1, 1: 5, 2: 3}, stream=True)
    whens = parent.slab.when.tolist()
    assert before <= whens[0] <= whens[1] <= whens[2] <= time.monotonic()
    parent.run({0: 1})
    assert parent.slab.when.tolist() == whens


# Object leaves and rewards -------------------------------------------------------------------------------


class Wordy:
    """Has observations and rewards that are no arrays."""

    class Anything:
        @staticmethod
        def sample():
            return ""

    observation_space = reward_space = Anything()

    def __init__(self):
        self.words = []

    def reset(self, *, seed=None, options=None):
        self.words.append("reset")
        return self.words, {}

    def step(self, action):
        self.words.append(action)
        return self.words, {"worth": len(action)}, False, False, {}


def test_observations_actions_and_rewards_may_be_objects(make_parent, pickles):
    parent = make_parent(Wordy, pickles=pickles, action=None, observation=OBJECT, reward=None)
    results = [parent.run({0: None}, ops={0: RESET})[0][0]]
    results += [parent.run({0: word})[0][0] for word in ("go", "far")]
    assert results == [
        (["reset"], 0.0, False, False, {}),
        (["reset", "go"], {"worth": 2}, False, False, {}),
        (["reset", "go", "far"], {"worth": 3}, False, False, {}),
    ]


# Failures ------------------------------------------------------------------------------------------------


def test_other_envs_step_when_one_raises(make_parent, pickles, action):
    parent = make_parent(pickles=pickles, action=action)
    results = parent.run({0: 3, 1: 1, 2: 1})
    assert [fault_of(results[env]) for env in range(3)] == [Fault.RAISED, None, None]
    assert repr(unpack_failure(results[0])) == "ValueError('step 0')"
    assert parent.run({0: 1})[0][0] == ([1, 1], 1.0, False, False, {})


def test_result_that_does_not_pickle_fails_its_env_only(make_parent, pickles):
    parent = make_parent(pickles=pickles)
    results = parent.run({0: 1, 1: 4, 2: 1})
    assert [fault_of(results[env]) for env in range(3)] == [None, Fault.RESULT, None]
    assert "not me" in results[1].text


def test_value_of_a_wrong_shape_fails_as_raised_by_the_env(make_parent, pickles):
    parent = make_parent(pickles=pickles)
    parent.envs[0].obs = np.zeros(3)
    parent.envs[1].step = lambda action: (np.zeros(2), 0.0, np.zeros(2), False, {})
    parent.envs[2].step = lambda action: (np.zeros(2), 0.0, False)
    results = parent.run({0: 1, 1: 1, 2: 1})
    assert [fault_of(results[env]) for env in range(3)] == [Fault.RAISED] * 3


def test_info_of_another_type_than_dict_is_returned_unchanged(make_parent, pickles):
    parent = make_parent(pickles=pickles)
    parent.envs[0].step = lambda action: (np.zeros(2), 0.0, False, False, [])
    assert parent.run({0: 1})[0][0][4] == []


@pytest.mark.parametrize("resets", [False, True])
def test_payload_that_does_not_unpickle_fails_its_env_only(make_parent, resets):
    parent = make_parent(action=None)
    bad = dumps((None, Pickled(bytes(dumps(ExplodesOnArrival()))))) if resets else dumps(ExplodesOnArrival())
    results = parent.run({0: 1, 1: None, 2: 1}, ops={1: RESET if resets else 0}, payloads={1: bytes(bad)})
    assert [fault_of(results[env]) for env in range(3)] == [None, Fault.ARGUMENTS, None]
    assert "boom on arrival" in results[1].text
    assert [env.steps for env in parent.envs] == [1, 0, 1]
    assert parent.envs[1].seeds == []
    assert parent.run({1: 1})[1][0] == ([1, 1], 1.0, False, False, {})


def test_failure_sent_as_payload_fails_its_env(make_parent):
    parent = make_parent(action=None)
    failure = dumps(pack_failure(ValueError("too large"), Fault.TOO_LARGE))
    number = parent.write_rows({0: 1, 1: 1})
    (frame,) = parent.requests
    fine = dict(bundle.unpack(frame.payload))[0]
    parent.requests = [frame._replace(payload=bundle.pack([(0, fine), (1, failure)]))]
    parent.page.post_step(number, ASLEEP, False)
    parent.server.run_posted()
    overflow = parent.overflow()
    assert fault_of(parent.read(0, overflow)) is None
    result = parent.read(1, overflow)
    assert (result.fault, result.text) == (Fault.TOO_LARGE, "ValueError('too large')")


# Within one process --------------------------------------------------------------------------------------


def test_returned_values_and_the_env_share_nothing_mutable(make_parent):
    parent = make_parent(pickles=False)
    info = parent.run({0: 6})[0][0][4]
    assert info == {"same": [1]}
    info["same"].append("mine")
    assert parent.envs[0].info == {"same": [1]}
    assert parent.run({0: 6})[0][0][4] == {"same": [2]}
    assert info == {"same": [1, "mine"]}


def test_objects_that_do_not_pickle_are_copied_within_one_process(make_parent):
    parent = make_parent(pickles=False, action=None)
    seen = []

    def step(action):
        seen.append(action)
        return np.zeros(2), 0.0, False, False, {"f": action[0]}

    parent.envs[0].step = step
    action = [lambda: 5, np.zeros(1)]
    parent.post({0: action})
    action[1][0] = 7
    parent.server.run_posted()
    assert parent.read(0)[0][4]["f"]() == 5
    assert seen[0][1].tolist() == [0]


def test_an_action_that_an_env_has_changed_is_sent_again_as_it_was(make_parent, pickles):
    parent = make_parent(pickles=pickles, action=None)
    seen = []

    def step(action):
        seen.append(action.copy())
        action.clear()
        return np.zeros(2), 0.0, False, False, {}

    parent.envs[0].step = step
    payload = make_payload([1, 2], pickles=pickles)
    for _ in range(2):
        parent.post({0: None}, payloads={0: payload})
        parent.server.run_posted()
    assert seen == [[1, 2], [1, 2]]


def test_envs_may_change_the_actions_that_they_get(make_parent, pickles, action):
    parent = make_parent(pickles=pickles, action=action)
    real = Scripted.step

    def step(action):
        number = float(action)
        if isinstance(action, np.ndarray):
            action += 1
        return real(parent.envs[0], number)

    parent.envs[0].step = step
    assert [parent.run({0: np.array(1.0)})[0][0][1] for _ in range(2)] == [1.0, 1.0]
