"""Steps through shared memory: the same results as through channels, and never a torn or a stale one."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
import types
import zlib

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from helpers import FORK_SERVER, SOON, run_script, wait_for_path, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.actor.supervisor import Supervisor
from envactors.actor.turn import Turn
from envactors.actor.waiting import ALL_LOOK, ALL_LOOK_APART, APART, SLEEP
from envactors.arrays.slab import NOTE_ROOM, Layout, Slab
from envactors.arrays.specs import flatten, leaves, spec_of_space, unflatten
from envactors.system import Doorbell, cores
from envactors.testing import EchoEnv, FaultyEnv
from envactors.vector.plane import Plane
from envactors.wire import board

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)

SPACES = {
    "array": spaces.Box(-1, 1, (3, 2), np.float32),
    "scalar": spaces.Discrete(7, start=3),
    "image": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "bits": spaces.MultiBinary(5),
    "empty": spaces.Box(-1, 1, (0,), np.float32),
    "nested": spaces.Dict(
        {
            "b": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64))),
            "a": spaces.MultiDiscrete([2, 9]),
        }
    ),
    "partly text": spaces.Dict({"words": spaces.Text(8), "numbers": spaces.Box(-1, 1, (2,), np.float32)}),
    "text": spaces.Text(8),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
}


class Sampling(gymnasium.Env):
    """Any spaces; its values follow from its seed."""

    def __init__(self, observation_space, action_space, length=7):
        self.observation_space = observation_space
        self.action_space = action_space
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {"reset": True} if seed is not None else {}

    def step(self, action):
        assert action in self.action_space, action
        self.steps += 1
        info = {"action": action} if self.steps % 2 else {}
        return self.observation_space.sample(), self.steps / 4, self.steps >= self.length, self.steps == 3, info


def frozen(value):
    """Something that compares by value and type."""
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *(frozen(inner) for inner in value)]
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), value.shape, value.tolist()
    return value


def record(observation_space, action_space, autoreset, envs_per_actor, shared_memory):
    factories = [functools.partial(Sampling, observation_space, action_space)] * 3
    seen = []
    with ea.VectorEnv(
        factories, envs_per_actor=envs_per_actor, autoreset=autoreset, shared_memory=shared_memory, backend=FORK_SERVER
    ) as envs:
        assert (envs._plane is not None) is (
            shared_memory and not isinstance(observation_space, (spaces.Text, spaces.Sequence))
        )
        action_space.seed(5)
        seen.append(frozen(envs.reset(seed=3)))
        for turn in range(12):
            batch = [action_space.sample() for _ in range(3)]
            if turn % 4 == 3:
                envs.send(batch[:2], env_ids=[2, 0])
                results = sorted(zip(*envs.recv()[:-1], strict=True), key=lambda row: row[0])
                seen.append(frozen([row[2:] for row in results]))
            elif turn % 4 == 2:
                seen.append(frozen(envs.step(batch[:1], env_ids=[1])))
            else:
                seen.append(frozen(envs.step(batch)))
        seen.append((envs.stats().steps, envs.stats().episodes))
    return seen


@pytest.mark.parametrize(
    ("kind", "autoreset"),
    [*((kind, "next_step") for kind in SPACES), *((kind, "same_step") for kind in ("array", "nested", "partly text"))],
)
def test_results_are_the_same_as_through_channels(kind, autoreset):
    action = SPACES["nested"] if kind in ("nested", "image") else SPACES["scalar"]
    expected = record(SPACES[kind], action, autoreset, 1, shared_memory=False)
    for envs_per_actor in (1, 3):
        assert record(SPACES[kind], action, autoreset, envs_per_actor, shared_memory=True) == expected


nested = st.recursive(
    st.builds(
        lambda shape, dtype: spaces.Box(0, 1, tuple(shape), dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([np.float32, np.float64, np.uint8, np.int64]),
    ),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts)))
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict)
    ),
    max_leaves=5,
)


@given(nested, nested, st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_the_arrays_of_a_slab_lie_apart(observation, action, count):
    layout = Layout(spec_of_space(observation), spec_of_space(action), ea.ArraySpec((), np.float64), count)
    memory = bytearray(layout.size)
    slab = Slab(layout, memory)
    arrays = [slab.asked, slab.done, slab.when, slab.what, slab.extras, slab.terminated, slab.truncated, slab.rewards]
    arrays += [*slab.actions, *slab.observations]
    for number, array in enumerate(arrays):
        array[...] = number % 2
    for number, array in enumerate(arrays):
        assert (array == number % 2).all()
        assert array.flags.aligned
    assert [array.shape[2:] for array in slab.observations] == [leaf.shape for leaf in leaves(layout.observation)]


@given(nested)
@settings(deadline=None, max_examples=60)
def test_flattening_keeps_a_value(space):
    spec, value = spec_of_space(space), space.sample()
    again = unflatten(spec, iter(flatten(spec, value)))
    assert frozen(again) == frozen({key: value[key] for key in spec} if isinstance(spec, dict) else value)


# What is handed out --------------------------------------------------------------------------------------


def test_what_was_returned_never_changes():
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(3)]) as envs:
        returned = [envs.reset(seed=0)[0], *(envs.step([turn] * 3) for turn in range(6))]
        copies = [frozen(one) for one in returned]
        for turn in range(6):
            envs.step([100 + turn] * 3)
        assert [frozen(one) for one in returned] == copies


def test_views_hold_until_the_next_step():
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(4)], copy=False, envs_per_actor=2) as envs:
        envs.reset(seed=0)
        views = []
        for turn in range(4):
            obs = envs.step([turn] * 4)[0]
            assert obs[:, :3].tolist() == [[i, turn + 1, turn] for i in range(4)]
            assert np.shares_memory(obs, envs._plane.slab.observations[0]), "a contiguous batch costs no copy"
            views.append(obs)
        assert np.shares_memory(views[0], views[2])
        assert views[2][:, 1].tolist() == [3] * 4, "still the last but one"
        # Out of step with the others, rows lie apart.
        envs.step([9], env_ids=[2])
        assert envs.step([10] * 4)[0][:, 1].tolist() == [5, 5, 6, 5]
    assert views[3][:, 0].tolist() == [0, 1, 2, 3], "readable after the end"


def test_rewards_of_several_numbers():
    class Several(EchoEnv):
        reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, np.array([reward, -reward]), *rest

    for shared_memory in (True, False):
        with ea.VectorEnv([lambda i=i: Several(i, 2) for i in range(2)], shared_memory=shared_memory) as envs:
            envs.reset(seed=0)
            rewards = [envs.step([turn, 7])[1] for turn in range(4)]
            assert [one.tolist() for one in rewards[:3]] == [[[0, 0], [7, -7]], [[1, -1], [7, -7]], [[0, 0], [0, 0]]]
            assert {one.dtype for one in rewards} == {np.dtype(np.float64)}


# Order ---------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_completion():
    class Sleeps(EchoEnv):
        def step(self, action):
            time.sleep(action / 1000)
            return super().step(action)

    with ea.VectorEnv([lambda i=i: Sleeps(i) for i in range(4)]) as envs:
        envs.reset(seed=0)
        envs.send([400, 10, 700, 200])
        assert envs.recv(min_envs=1).env_ids.tolist() == [1]
        time.sleep(1.0)
        assert envs.recv(max_envs=2, min_envs=0).env_ids.tolist() == [3, 0]
        assert envs.recv().env_ids.tolist() == [2]


def test_envs_of_one_actor_are_handed_out_one_by_one(tmp_path):
    class Waits(EchoEnv):
        def step(self, action):
            while self.env_id == 1 and not os.path.exists(tmp_path / "go"):  # noqa: PTH110
                time.sleep(0.005)
            return super().step(action)

    with ea.VectorEnv([lambda i=i: Waits(i) for i in range(2)], envs_per_actor=2) as envs:
        envs.reset(seed=0)
        envs.send([1, 2])
        assert envs.recv(min_envs=1, timeout=SOON).env_ids.tolist() == [0]
        envs.send([3], env_ids=[0])  # waits behind the other one
        (tmp_path / "go").touch()
        batch = envs.recv()
        assert sorted(zip(batch.env_ids.tolist(), batch.obs[:, 1].tolist(), strict=True)) == [(0, 2), (1, 1)]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_calls_wait_for_the_step_before_them(tmp_path, envs_per_actor):
    class Waits(EchoEnv):
        def step(self, action):
            open(tmp_path / f"in step {self.env_id}", "w").close()  # noqa: PTH123
            while not os.path.exists(tmp_path / "go"):  # noqa: PTH110
                time.sleep(0.005)
            return super().step(action)

        def steps_made(self):
            return self.steps

    with ea.VectorEnv([lambda i=i: Waits(i) for i in range(2)], envs_per_actor=envs_per_actor) as envs:
        envs.reset(seed=0)
        envs.send([1, 2])
        wait_for_path(tmp_path / "in step 0")
        assert envs.actors[0].state is ea.ActorState.BUSY
        future = envs[0].call("steps_made")
        assert not ea.wait([future], 0.2).done
        (tmp_path / "go").touch()
        assert future.result(SOON) == 1, "it ran after the step, though nobody has asked for the step's result"
        wait_until(lambda: envs.actors[0].state is ea.ActorState.IDLE)
        assert envs.recv().obs[:, 1].tolist() == [1, 1]


def test_a_vector_that_nobody_holds_ends_after_its_steps():
    envs = ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)])
    envs.reset(seed=0)
    envs.send([1, 2])
    pids = [actor.pid for actor in envs.actors]
    del envs
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_other_threads_may_wait_for_calls_meanwhile(tmp_path):
    with ea.spawn(Sleeper) as other, ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        future = other.wait_for(str(tmp_path / "go"))
        waiting = threading.Thread(target=future.result)  # reads all replies as long as it waits
        waiting.start()
        try:
            for turn in range(200):
                assert envs.step([turn] * 2)[0][:, 2].tolist() == [turn] * 2
        finally:
            (tmp_path / "go").touch()
            waiting.join(SOON)


class Sleeper:
    def wait_for(self, path):
        while not os.path.exists(path):  # noqa: PTH110
            time.sleep(0.005)


# What does not fit into the slab ------------------------------------------------------------------------


def test_infos_larger_than_any_buffer_hold_nothing_up():
    class Talks(EchoEnv):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"frames": np.full(3_000_000, action, np.uint8)}

    with ea.VectorEnv([lambda i=i: Talks(i) for i in range(4)], envs_per_actor=2) as envs:
        envs.reset(seed=0)
        for turn in range(3):
            envs.send([turn] * 4)
            batch = envs.recv(timeout=60)
            assert [int(info["frames"].sum()) for info in batch.infos] == [3_000_000 * turn] * 4
            assert [int(info["frames"][-1]) for info in envs.step([turn + 7] * 4)[4]] == [turn + 7] * 4


@pytest.mark.parametrize("call", ["step", "send"])
def test_infos_of_every_size_arrive_whole_and_with_their_own_step(call):
    class Talks(EchoEnv):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            info = {"text": chr(97 + ea.current_actor().index) * action, "number": np.float32(action)} if action else {}
            return obs, reward, terminated, truncated, info

    sizes = [1, 0, NOTE_ROOM // 2, NOTE_ROOM - 150, NOTE_ROOM, 3, 20 * NOTE_ROOM, 0, 2]
    with ea.VectorEnv([lambda i=i: Talks(i) for i in range(4)], envs_per_actor=2) as envs:
        envs.reset(seed=0)
        for first in range(len(sizes)):
            actions = [sizes[(first + env) % len(sizes)] for env in range(4)]
            if call == "step":
                infos = envs.step(actions)[4]
            else:
                envs.send(actions)
                batch = envs.recv(timeout=60)
                infos = [batch.infos[list(batch.env_ids).index(env)] for env in range(4)]
            for env, (action, info) in enumerate(zip(actions, infos, strict=True)):
                assert info == ({"text": chr(97 + env) * action, "number": action} if action else {})
                assert not info or type(info["number"]) is np.float32


@pytest.mark.parametrize("call", ["step", "send"])
def test_infos_of_numbers_and_small_arrays_arrive_with_their_types(call):
    class Measures(EchoEnv):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            info = {"speed": np.float32(action / 3), "place": np.full(action % 3, action), "steps": int(action)}
            return obs, reward, terminated, truncated, info if action % 4 else info | {"last": np.bool_(True)}

    with ea.VectorEnv([lambda i=i: Measures(i) for i in range(4)], envs_per_actor=2) as envs:
        envs.reset(seed=0)
        for action in [1, 2, 3, 4, 4, 5, 1, 8]:
            if call == "step":
                infos = envs.step([action, 7, action, action])[4]
            else:
                envs.send([action, 7, action, action])
                batch = envs.recv(timeout=60)
                infos = [batch.infos[list(batch.env_ids).index(env)] for env in range(4)]
            for number, info in zip([action, 7, action, action], infos, strict=True):
                assert list(info) == ["speed", "place", "steps", *(["last"] if number % 4 == 0 else [])]
                assert info["speed"] == np.float32(number / 3)
                assert [type(value) for value in info.values()][:3] == [np.float32, np.ndarray, int]
                assert info["place"].tolist() == [number] * (number % 3)
                assert info["place"].dtype == np.int64
                assert info["place"].flags.writeable
                assert info["steps"] == number


def test_a_forked_child_that_comes_back_answers_nothing():
    class Forks(EchoEnv):
        def step(self, action):
            result = super().step(action)
            if action == 1 and os.fork() == 0:
                return np.zeros(4, np.int64), -1.0, True, True, {}
            return result

    with ea.VectorEnv([lambda: Forks(0)]) as envs:
        envs.reset(seed=0)
        for turn in (0, 1, 2, 1, 4):
            obs, rewards, terminated, *_ = envs.step([turn])
            assert (obs[0, 2], rewards[0], terminated[0]) == (turn, turn, False)


def test_what_cannot_be_unpickled_fails_its_own_env():
    class Odd(EchoEnv):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"odd": Explosive()} if action == 5 else {}

    class Explosive:
        def __reduce__(self):
            return _raise_unless, (os.getpid(),)

    with ea.VectorEnv([lambda i=i: Odd(i) for i in range(3)]) as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1, 5, 3])
        assert caught.value.failures.keys() == {1}
        assert isinstance(caught.value.failures[1], ea.SerializationError)
        assert caught.value.batch.obs[:, 2].tolist() == [1, 3]
        assert envs.step([2] * 3)[0][:, 2].tolist() == [2] * 3


def _raise_unless(home):
    if os.getpid() != home:
        raise RuntimeError("boom on arrival")


def test_too_little_memory_is_an_error_at_construction():
    done = run_script(
        """
        import resource
        import numpy as np
        import envactors as ea
        from envactors.testing import Space

        class Large:
            observation_space, action_space = Space((1000, 1000), np.float64), Space((), np.int64)

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, 1 << 22))
        try:
            ea.VectorEnv([Large] * 2)
        except ea.VectorEnvError as error:
            print(error)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "bytes of shared memory for 2 envs could not be had" in done.stdout
    assert "shared_memory=False" in done.stdout


@pytest.mark.parametrize(("option", "value"), [("shared_memory", None), ("copy", "yes")])
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value!r}: expected True or False"):
        ea.VectorEnv([EchoEnv], **{option: value})


def test_spin_is_checked():
    with pytest.raises(TypeError, match="spin is 3"):
        ea.ProcessBackend(spin=3)


# Torn, stale ---------------------------------------------------------------------------------------------


class Torn(gymnasium.Env):
    """Large observations of one number each, with a checksum; killed by its own alarm clock while they are written."""

    observation_space = spaces.Dict(
        {"numbers": spaces.Box(0, 2**31, (2_000_000,), np.uint32), "sum": spaces.Box(0, 2**32, (), np.int64)}
    )
    action_space = spaces.Box(-1, 1, (), np.float64)

    def reset(self, *, seed=None, options=None):
        self.number = 0
        return self._obs(), {}

    def step(self, action):
        self.number += 1
        obs = self._obs()
        if action > 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whose action is to end the process
            signal.setitimer(signal.ITIMER_REAL, action)
        return obs, float(self.number), False, False, {}

    def _obs(self):
        numbers = np.full(2_000_000, self.number + os.getpid() % 1000 * 1000, np.uint32)
        return {"numbers": numbers, "sum": np.int64(zlib.crc32(numbers))}


def kill_writers(kills, seed):
    dice = np.random.default_rng(seed)
    killed = while_writing = 0
    with ea.VectorEnv(
        [Torn] * 2, on_failure="renew", restart=ALWAYS, backend=FORK_SERVER, deadlines=ea.Deadlines(step=SOON)
    ) as envs:
        envs.reset(seed=0)
        expected = [0, 0]
        while killed < kills:
            # The copying of an observation takes one or two milliseconds.
            clocks = dice.choice([0.0, 1.0], 2) * dice.uniform(1e-6, 2e-3, 2)
            obs, rewards, *_, infos = envs.step(clocks)
            for i in range(2):
                numbers, failure = obs["numbers"][i], infos[i].get("failure")
                assert zlib.crc32(np.ascontiguousarray(numbers)) == obs["sum"][i], "torn"
                assert numbers[0] == numbers[-1]
                if failure is not None:
                    assert isinstance(failure, (ea.ActorDiedError, ea.ActorTimeoutError))
                    assert numbers[0] % 1000 == expected[i], "stale, or never handed out"
                    killed += 1
                    while_writing += failure.method == "step"
                    expected[i] = -1  # the next step resets
                else:
                    expected[i] += 1
                    assert numbers[0] % 1000 == expected[i]
                    assert rewards[i] == expected[i]
                if expected[i] > 900:
                    envs.reset(env_ids=[i])
                    expected[i] = 0
    assert while_writing > kills // 10, "hardly any was killed while it was at it"


@pytest.mark.timeout(120)
def test_a_writer_that_is_killed_leaves_nothing_torn():
    kill_writers(25, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 4))
def test_thousands_of_writers_that_are_killed_leave_nothing_torn(seed):
    kill_writers(1000, seed)


# Waiting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spin", [True, False])
def test_nothing_is_burnt_while_idle(spin):
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)], backend=ea.ProcessBackend(spin=spin)) as envs:
        envs.reset(seed=0)
        for turn in range(500):
            envs.step([turn] * 2)
        processes = [psutil.Process(), *(psutil.Process(actor.pid) for actor in envs.actors)]
        time.sleep(0.5)  # whatever was begun has ended
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(1.0)
        used = [sum(process.cpu_times()[:2]) - one for process, one in zip(processes, before, strict=True)]
        assert max(used) < 0.1, used


class Cores(gymnasium.Env):
    """Its observation says on how many cores it may run."""

    observation_space = spaces.Box(0, 2**16, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.count(), {}

    def step(self, action):
        return self.count(), 0.0, False, False, {}

    def count(self):
        return np.array([len(os.sched_getaffinity(0))], np.int64)


@pytest.mark.skipif(cores() < 2, reason="takes two cores")
@pytest.mark.parametrize("way", [APART, ALL_LOOK_APART])
def test_workers_that_wait_apart_wake_on_cores_of_their_own_and_run_on_all(way):
    with ea.VectorEnv([Cores] * 2) as envs:
        envs.reset(seed=0)
        plane = envs._plane
        assert ALL_LOOK_APART in plane._waiting._short
        assert ALL_LOOK_APART in plane._waiting._long
        plane._waiting = types.SimpleNamespace(way=way, note=lambda seconds, now: None)
        mine = os.sched_getaffinity(0)
        pids = [actor.pid for actor in envs.actors]
        for _ in range(50):
            obs = envs.step([0, 0])[0]
            assert obs.ravel().tolist() == [len(mine)] * 2
        wait_until(lambda: all(len(os.sched_getaffinity(pid)) == 1 for pid in pids))
        assert len(set().union(*map(os.sched_getaffinity, pids))) == 2
        plane._waiting = types.SimpleNamespace(way=SLEEP, note=lambda seconds, now: None)
        envs.step([0, 0])
        envs.step([0, 0])
        assert [os.sched_getaffinity(pid) for pid in pids] == [mine] * 2


@pytest.mark.skipif(cores() < 2, reason="takes two cores")
def test_a_worker_that_somebody_moves_while_it_sleeps_stays_there():
    with ea.VectorEnv([Cores] * 2) as envs:
        envs.reset(seed=0)
        envs._plane._waiting = types.SimpleNamespace(way=APART, note=lambda seconds, now: None)
        envs.step([0, 0])
        envs.step([0, 0])
        pid = envs.actors[0].pid
        wait_until(lambda: len(os.sched_getaffinity(pid)) == 1)
        (slept_on,) = os.sched_getaffinity(pid)
        elsewhere = min(os.sched_getaffinity(0) - {slept_on})
        os.sched_setaffinity(pid, {elsewhere})
        assert envs.step([0, 0])[0].ravel().tolist() == [1, cores()]
        assert os.sched_getaffinity(pid) == {elsewhere}


def test_faults_while_nobody_waits_are_told_with_the_result():
    with ea.VectorEnv(
        [lambda i=i: FaultyEnv(EchoEnv(i)) for i in range(3)], on_failure="renew", restart=ALWAYS
    ) as envs:
        envs.reset(seed=0)
        envs.step([1] * 3)
        envs[1].arm("crash").result(SOON)
        envs.send([2] * 3)
        wait_until(lambda: envs[1].stats().restarts == 1)
        batch = envs.recv()
        rows = zip(batch.env_ids.tolist(), batch.obs[:, 1].tolist(), batch.truncated.tolist(), strict=True)
        assert sorted(rows) == [(0, 2, False), (1, 1, True), (2, 2, False)]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_million_steps_leave_memory_flat():
    with ea.VectorEnv([lambda i=i: EchoEnv(i, 50) for i in range(8)], envs_per_actor=4) as envs:
        envs.reset(seed=0)
        processes = [psutil.Process(), *(psutil.Process(actor.pid) for actor in envs.actors)]

        def steps(count):
            for turn in range(count // 8):
                envs.step([turn] * 8)

        steps(200_000)
        before = [process.memory_info().rss for process in processes]
        steps(1_000_000)
        grown = [process.memory_info().rss - one for process, one in zip(processes, before, strict=True)]
        assert max(grown) < 2_000_000, grown


# What a review has found ---------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_a_result_after_its_deadline_does_not_count(on_failure):
    """It comes while the worker may still tell its stacks."""

    class Slow(EchoEnv):
        def step(self, action):
            time.sleep(action / 1000)
            return super().step(action)

    with ea.VectorEnv(
        [lambda i=i: Slow(i) for i in range(2)], deadlines=ea.Deadlines(step=0.5), on_failure=on_failure
    ) as envs:
        envs.reset(seed=0)
        envs.send([650, 0])
        failures = {}
        while len(failures) < 2:
            try:
                batch = envs.recv(min_envs=1)
            except ea.VectorStepError as error:
                failures |= error.failures
                batch = error.batch
            failures |= {i: info.get("failure") for i, info in zip(batch.env_ids.tolist(), batch.infos, strict=True)}
        assert isinstance(failures[0], ea.ActorTimeoutError)
        assert failures[1] is None
        with pytest.raises(ea.NothingPendingError):
            envs.recv()


def test_no_env_is_stepped_for_what_was_asked_while_another_was_at_it():
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(4)], envs_per_actor=2) as envs:
        envs.reset(seed=0)
        made = np.zeros(4, int)
        for turn in range(600):
            ids = [0, 1] if turn % 3 else [0]
            for one in ids:
                envs.send([turn], env_ids=[one])
            if turn % 2:
                envs.send([turn, turn], env_ids=[2, 3])
                ids = [*ids, 2, 3]
            made[ids] += 1
            while ids:
                batch = envs.recv(min_envs=1)
                assert batch.obs[:, 1].tolist() == made[batch.env_ids].tolist()
                ids = [one for one in ids if one not in batch.env_ids]
            if turn % 5 == 0:
                made += 1
                assert envs.step([turn] * 4)[0][:, 1].tolist() == made.tolist()


@pytest.mark.usefixtures("both_planes")
def test_flags_without_a_truth_fail_the_step_alone():
    class Agents(EchoEnv):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, np.array([True, False]) if action else False, False, {}

    with ea.VectorEnv([lambda i=i: Agents(i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([0, 1])
        assert caught.value.failures.keys() == {1}
        assert isinstance(caught.value.failures[1], ValueError)
        assert envs.step([0, 0])[0][:, 1].tolist() == [2, 2]
        assert envs[1].incarnation == 0


@pytest.mark.parametrize("call", ["step", "send"])
def test_a_forked_child_does_not_step_its_parents_envs(call):
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        pid = os.fork()
        if pid == 0:
            try:
                getattr(envs, call)([77, 77])
            except ea.ActorClosedError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert envs.step([2, 2])[0][:, 2].tolist() == [2, 2]


def test_what_a_user_writes_into_an_info_is_nobody_elses():
    with ea.VectorEnv(
        [lambda i=i: FaultyEnv(EchoEnv(i)) for i in range(2)], on_failure="renew", autoreset="same_step", restart=ALWAYS
    ) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        for env_id in range(2):
            envs[env_id].arm("crash").result(SOON)
        infos = envs.step([2, 2])[4]
        infos[0]["final_info"]["mine"] = 1
        assert "mine" not in infos[1]["final_info"]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_step_in_two_halves_is_owed_in_between(shared_memory):
    factories = [functools.partial(EchoEnv, i) for i in range(3)]
    with ea.VectorEnv(factories, shared_memory=shared_memory) as envs:
        envs.reset(seed=0)
        expected = envs.step([5, 6, 7])[0]
        envs.reset(seed=0)
        envs._begin_all([5, 6, 7])
        assert np.array_equal(envs._finish_all(None, None)[0], expected)
        for ask in (lambda: envs.step([0] * 3), lambda: envs.send([0], env_ids=[2]), lambda: envs.reset(env_ids=[1])):
            envs.reset(seed=0)
            envs._begin_all([5, 6, 7])
            with pytest.raises(ea.AlreadyPendingError):
                ask()
            assert np.array_equal(envs._finish_all(None, None)[0], expected)
        envs.reset(seed=0)
        envs._begin_all([5, 6, 7])
        batch = envs.recv()
        assert np.array_equal(batch.obs[np.argsort(batch.env_ids)], expected)


def test_an_env_that_is_lost_between_the_halves_of_a_step_is_reported_by_the_second():
    factories = [functools.partial(FaultyEnv, EchoEnv(i)) for i in range(2)]
    with ea.VectorEnv(factories, restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs[1].arm("crash").result()
        pid = envs[1].pid
        envs._begin_all([1, 2])
        wait_until(lambda: envs[1].pid != pid)
        with pytest.raises(ea.VectorStepError) as caught:
            envs._finish_all(None, None)
        assert caught.value.batch.env_ids.tolist() == [0]
        assert isinstance(caught.value.failures[1], ea.ActorDiedError)


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_death_just_before_a_step_begins_leaves_the_step_before_it_alone(on_failure):
    """That one's result stands in the slab, and was handed out, when its process is found dead."""
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)], on_failure=on_failure, restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        supervisor = envs.actors[1]._supervisor
        take_turn = supervisor.take_turn

        def dies_first(*args):
            supervisor.take_turn = take_turn
            os.kill(supervisor.pid, signal.SIGKILL)
            wait_until(lambda: supervisor.incarnation == 1)
            return take_turn(*args)

        supervisor.take_turn = dies_first
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as caught:
                envs.step([2, 2])
            assert list(caught.value.failures) == [1]
            obs = envs.reset(env_ids=[1])[0]
        elif on_failure == "replay":
            assert envs.step([2, 2])[0][1, :3].tolist() == [1, 2, 2]
            obs = envs.reset()[0]
        else:
            obs, *_, infos = envs.step([2, 2])
            assert "failure" in infos[1]
            assert obs[1, :3].tolist() == [1, 1, 1], "the last complete observation"
            obs = envs.step([3, 3])[0]
        assert obs[-1, :3].tolist() == [1, 0, -1]
        for turn in range(1, 4):
            assert envs.step([turn] * 2)[0][1, :3].tolist() == [1, turn, turn]


class Late(EchoEnv):
    """Told 7, its step waits for a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def step(self, action):
        if action == 7:
            wait_for_path(self.path)
        return super().step(action)


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_a_result_after_its_deadline_does_not_count_where_it_ends_the_step(on_failure, tmp_path):
    """It was handed out, and failed once its process was found dead."""

    with ea.VectorEnv(
        [lambda: Late(tmp_path / "late")] * 2, on_failure=on_failure, deadlines=ea.Deadlines(step=1.0), restart=ALWAYS
    ) as envs:
        envs.reset(seed=0)
        supervisor = envs.actors[0]._supervisor
        set_timer = supervisor._set_timer

        def ends_late(name, when):
            if name == "kill":
                supervisor._set_timer = set_timer
                turn = supervisor._table.running
                (tmp_path / "late").touch()
                wait_until(lambda: turn.finished)
            set_timer(name, when)

        supervisor._set_timer = ends_late
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as caught:
                envs.step([7, 1])
            failure = caught.value.failures[0]
            envs.reset(env_ids=[0])
        else:
            failure = envs.step([7, 1])[4][0]["failure"]
        assert isinstance(failure, ea.ActorTimeoutError)
        envs.step([2, 2])
        assert envs.step([3, 3])[0][:, 2].tolist() == [3, 3]


def test_a_result_that_was_handed_out_as_its_deadline_was_looked_at_counts(tmp_path, monkeypatch):
    with ea.VectorEnv([lambda: Late(tmp_path / "late")] * 2, deadlines=ea.Deadlines(step=1.0), restart=ALWAYS) as envs:
        envs.reset(seed=0)
        later, of, gather, gathered = Turn.later, ea.Deadlines.of, envs._plane.gather, threading.Event()

        def gathers():
            result = gather()
            gathered.set()
            return result

        def of_what_ends_now(deadlines, method):
            monkeypatch.setattr(ea.Deadlines, "of", of)
            (tmp_path / "late").touch()
            assert gathered.wait(SOON)
            return of(deadlines, method)

        def looks_late(turn, deadlines, now):
            monkeypatch.setattr(Turn, "later", later)
            monkeypatch.setattr(ea.Deadlines, "of", of_what_ends_now)
            return later(turn, deadlines, now + 60)

        envs._plane.gather = gathers
        monkeypatch.setattr(Turn, "later", looks_late)
        assert envs.step([7, 1])[0][:, 2].tolist() == [7, 1]
        for turn in range(3):
            assert envs.step([turn] * 2)[0][:, 2].tolist() == [turn] * 2
            time.sleep(0.1)
        assert envs.stats().actors[0].restarts == 0


def test_no_process_steps_an_env_whose_episode_another_one_held(monkeypatch):
    """One that took its place while the turn was made was stepped without a reset."""
    with ea.VectorEnv([EchoEnv] * 2, restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.step([1], env_ids=[0])
        supervisor = envs.actors[0]._supervisor
        board = Supervisor.board

        def replaced_first(self):
            if self is supervisor and self.incarnation == 0:
                os.kill(self.pid, signal.SIGKILL)
                wait_until(lambda: self.incarnation == 1 and self.state is ea.ActorState.IDLE)
            return board.fget(self)

        monkeypatch.setattr(Supervisor, "board", property(replaced_first))
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([2, 2])
        assert list(caught.value.failures) == [0]
        assert supervisor.incarnation == 1


def test_an_interrupt_in_the_middle_of_a_short_step_loses_no_result():
    caller = os.getpid()

    class Interrupts(EchoEnv):
        def step(self, action):
            if action == 7:
                os.kill(caller, signal.SIGINT)
            return super().step(action)

    with ea.VectorEnv([Interrupts] * 2) as envs:
        envs.reset(seed=0)
        for turn in range(20):
            envs._plane._waiting.way = ALL_LOOK
            with pytest.raises(KeyboardInterrupt):
                envs.step([7, 0])
            assert envs.recv().obs[:, 1].tolist() == [turn + 1] * 2


@pytest.mark.parametrize("closes", [False, True])
def test_a_signal_handler_may_use_the_vector_in_the_middle_of_a_step(closes):
    """After a call the results were given twice; after an end the step waited for ever."""

    class Waits(EchoEnv):
        def step(self, action):
            if action == 7:
                os.kill(caller, signal.SIGALRM)
                time.sleep(60 if closes else 0.5)
            return super().step(action)

    def handle(_signum, _frame):
        if closes:
            envs.close(0)
        else:
            seen.extend(envs.get_attr("steps"))

    caller, seen = os.getpid(), []
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with ea.VectorEnv([Waits] * 2) as envs:
            envs.reset(seed=0)
            envs.step([1, 1])
            envs._plane._waiting.way = SLEEP
            if closes:
                with pytest.raises((ea.VectorStepError, ea.ActorClosedError)):
                    envs.step([1, 7])
                return
            for turn in range(2, 5):
                assert envs.step([turn, 7])[0][:, 1].tolist() == [turn] * 2
            assert len(seen) == 6
            with pytest.raises(ea.NothingPendingError):
                envs.recv()
    finally:
        signal.signal(signal.SIGALRM, before)


def fall_asleep(envs):
    envs._plane._waiting.way = ALL_LOOK
    workers = [psutil.Process(actor.pid) for actor in envs.actors]
    wait_until(lambda: all(worker.status() == psutil.STATUS_SLEEPING for worker in workers))


@pytest.fixture
def dozing(monkeypatch):
    """A vector whose caller expects its workers to look for the next step, while they are asleep."""
    monkeypatch.setattr("envactors.vector.plane.SHORT_PAUSE", 1e9)
    with ea.VectorEnv([EchoEnv] * 4, envs_per_actor=2) as envs:
        envs.reset(seed=0)
        yield envs, functools.partial(fall_asleep, envs)


def test_workers_that_look_no_more_are_woken(dozing):
    envs, fall_asleep = dozing
    for turn in range(20):
        fall_asleep()
        assert envs.step([turn] * 4)[0][:, 2].tolist() == [turn] * 4


def test_workers_that_look_no_more_are_woken_before_anybody_waits_for_them(dozing):
    envs, fall_asleep = dozing
    for turn in range(20):
        fall_asleep()
        envs._begin_all(np.full(4, turn))
        wait_until(envs._plane._finished)
        assert envs._finish_all(None, None)[0][:, 2].tolist() == [turn] * 4


@pytest.mark.parametrize("then", ["recv", "call"])
def test_a_step_that_broke_off_before_it_woke_the_workers_is_made(dozing, then, monkeypatch):
    envs, fall_asleep = dozing
    for turn in range(5):
        fall_asleep()
        with monkeypatch.context() as patch:
            patch.setattr(Plane, "finish", BrokenOffError.raised)
            with pytest.raises(BrokenOffError):
                envs.step([turn] * 4)
        if then == "call":
            assert [envs[env].get("steps").result(SOON) for env in (0, 2)] == [turn + 1] * 2
        assert envs.recv(timeout=SOON).obs[:, 2].tolist() == [turn] * 4


def test_a_worker_that_is_stopped_just_before_it_rings_is_not_waited_for():
    class Mute(EchoEnv):
        def step(self, action):
            if action == 7:
                time.sleep(0.1)  # the last to end: nobody else's ring tells of it
                Doorbell.ring_open = lambda bell: os.kill(os.getpid(), signal.SIGSTOP)
            return super().step(action)

    with ea.VectorEnv([Mute] * 2, deadlines=ea.Deadlines(step=0.5), on_failure="renew", restart=ALWAYS) as envs:
        for way in (SLEEP, ALL_LOOK):
            envs.reset(seed=0)
            envs._plane._waiting.way = way
            begun = time.monotonic()
            assert envs.step([7, 1])[0][:, 2].tolist() == [7, 1]
            assert time.monotonic() - begun < 0.5 + SOON
            assert "failure" in envs.step([1, 1])[4][0]


class Dawdling(EchoEnv):
    """Its worker gives its core away for long after a step with action 7, before it rings."""

    def step(self, action):
        if action == 7:
            board.give_way = lambda: time.sleep(0.3)
            time.sleep(0.05)  # until the caller is asleep
        return super().step(action)


@pytest.mark.parametrize("looks", [ea.VectorEnv.stats, lambda envs: None], ids=["after a look", "at once"])
@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_worker_that_ends_between_its_last_number_and_its_ring_is_not_waited_for(looks, end, monkeypatch):
    monkeypatch.setattr("envactors.vector.plane.SHORT_PAUSE", 1e9)
    with ea.VectorEnv([Dawdling] * 2, on_failure="renew", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        plane = envs._plane
        plane._waiting.way = ALL_LOOK

        def interfere():
            wait_until(lambda: not plane._finished())
            wait_until(plane._finished)
            looks(envs)
            if end == "kill":
                for actor in envs.actors:
                    actor.kill()
            else:
                envs.close(0)

        thread = threading.Thread(target=interfere)
        thread.start()
        with contextlib.suppress(ea.ActorClosedError, ea.VectorStepError):
            result = envs.step([7, 7])
            assert result[0][:, 2].tolist() == [7, 7] or any("failure" in info for info in result[4])
        thread.join()


def test_a_caller_that_is_held_up_before_it_rings_loses_no_env(monkeypatch):
    monkeypatch.setattr("envactors.vector.plane.SHORT_PAUSE", 1e9)
    with ea.VectorEnv([EchoEnv] * 2, deadlines=ea.Deadlines(step=1.0)) as envs:
        envs.reset(seed=0)
        fall_asleep(envs)
        monkeypatch.setattr("envactors.vector.plane.give_way", lambda: time.sleep(2.0))
        assert envs.step([3, 4])[0][:, 2].tolist() == [3, 4]


@pytest.mark.parametrize("ask", ["step", "recv"])
def test_a_signal_handler_may_take_the_results_that_are_waited_for(ask):
    class Signals(EchoEnv):
        def step(self, action):
            if action == 7:
                os.kill(caller, signal.SIGALRM)
                time.sleep(0.1)
            return super().step(action)

    def handle(_signum, _frame):
        with contextlib.suppress(ea.NothingPendingError):  # the second env's signal
            seen.append(envs.recv().obs[:, 2].tolist())

    caller, seen = os.getpid(), []
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with ea.VectorEnv([Signals] * 2) as envs:
            envs.reset(seed=0)
            for way in (SLEEP, ALL_LOOK):
                envs._plane._waiting.way = way
                with pytest.raises(ea.NothingPendingError):
                    if ask == "step":
                        envs.step([7, 7])
                    else:
                        envs.send([7, 7])
                        envs.recv()
                assert envs.step([1, 2])[0][:, 2].tolist() == [1, 2]
            assert seen == [[7, 7]] * 2
    finally:
        signal.signal(signal.SIGALRM, before)


class BrokenOffError(Exception):
    @staticmethod
    def raised(*_):
        raise BrokenOffError


def test_a_worker_that_may_not_choose_its_cores_waits_all_the_same():
    class Confined(EchoEnv):
        def reset(self, **kwargs):
            os.sched_setaffinity = self.refuse
            return super().reset(**kwargs)

        def refuse(self, _pid, _cores):
            raise PermissionError(1, "as a sandbox does")

    with ea.VectorEnv([Confined] * 2) as envs:
        envs.reset(seed=0)
        for turn in range(5):
            envs._plane._waiting.way = (APART, ALL_LOOK_APART)[turn % 2]
            assert envs.step([turn] * 2)[0][:, 2].tolist() == [turn] * 2
