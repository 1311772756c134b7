"""Steps through shared memory: the same results as in-process, in order, and each for its own env."""

from __future__ import annotations

import functools
import os
import signal
import threading

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from helpers import FORK_SERVER, SOON, Counter, frozen, wait_for_path, wait_until

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.mailbox.slab import INLINE_INFO_ROOM
from envactors.testing import EchoEnv, FaultyEnv

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


def record(observation_space, action_space, autoreset, envs_per_actor, backend):
    factories = [functools.partial(Sampling, observation_space, action_space)] * 3
    seen = []
    with ea.VectorEnv(factories, envs_per_actor=envs_per_actor, autoreset=autoreset, backend=backend) as envs:
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
def test_results_are_the_same_as_in_one_process(kind, autoreset):
    action = SPACES["nested"] if kind in ("nested", "image") else SPACES["scalar"]
    expected = record(SPACES[kind], action, autoreset, 1, "inline")
    for envs_per_actor in (1, 3):
        assert record(SPACES[kind], action, autoreset, envs_per_actor, FORK_SERVER) == expected


def test_returned_arrays_never_change():
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
            assert np.shares_memory(obs, envs._engine.table.slab.observations[0]), "a contiguous batch costs no copy"
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

    with ea.VectorEnv([lambda i=i: Several(i, 2) for i in range(2)]) as envs:
        envs.reset(seed=0)
        rewards = [envs.step([turn, 7])[1] for turn in range(4)]
        assert [one.tolist() for one in rewards[:3]] == [[[0, 0], [7, -7]], [[1, -1], [7, -7]], [[0, 0], [0, 0]]]
        assert {one.dtype for one in rewards} == {np.dtype(np.float64)}


def test_rewards_of_other_types_are_converted_or_refused():
    each = [np.array([1, 2.0]), np.array([3, 4], np.float32), [5, 6.0], np.ones(1), np.float64(7)]

    class Odd(EchoEnv):
        reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, each[int(action)], *rest

    with ea.VectorEnv([lambda: Odd(0)]) as envs:
        envs.reset(seed=0)
        assert [envs.step([action])[1].tolist() for action in (0, 1, 2)] == [[[1, 2]], [[3, 4]], [[5, 6]]]
        for action in (3, 4):
            with pytest.raises(ea.VectorStepError, match="the reward of env 0 has shape"):
                envs.step([action])


def test_writing_to_an_info_does_not_change_other_infos():
    with ea.VectorEnv(
        [lambda i=i: FaultyEnv(EchoEnv(i)) for i in range(2)], on_failure="renew", autoreset="same_step"
    ) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        for env_id in range(2):
            envs[env_id].arm("crash").result(SOON)
        infos = envs.step([2, 2])[4]
        infos[0]["final_info"]["mine"] = 1
        assert "mine" not in infos[1]["final_info"]


def test_results_come_in_the_order_of_completion(tmp_path):
    class Waits(EchoEnv):
        def step(self, action):
            wait_for_path(tmp_path / str(self.env_id))
            return super().step(action)

    with ea.VectorEnv([lambda i=i: Waits(i) for i in range(4)]) as envs:
        envs.reset(seed=0)
        envs.send([5] * 4)
        rows = envs._engine.table.slab

        def let(env_id):
            (tmp_path / str(env_id)).touch()
            wait_until(lambda: rows.written_ids[env_id] == rows.posted_ids[env_id])

        let(1)
        assert envs.recv(min_envs=1).env_ids.tolist() == [1]
        let(3)
        let(0)
        assert envs.recv(max_envs=2, min_envs=0).env_ids.tolist() == [3, 0]
        let(2)
        assert envs.recv().env_ids.tolist() == [2]


def test_envs_of_one_actor_are_handed_out_one_by_one(tmp_path):
    class Waits(EchoEnv):
        def step(self, action):
            if self.env_id == 1:
                wait_for_path(tmp_path / "go")
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
            (tmp_path / f"in step {self.env_id}").touch()
            wait_for_path(tmp_path / "go")
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


@pytest.mark.parametrize("warm", [0, 1, 2], ids="{} steps before".format)
@pytest.mark.parametrize("then", ["goes on", "dies"])
def test_a_step_that_waits_behind_a_call_has_its_own_result(tmp_path, warm, then):
    """The env used to get the action of the step before, or none at all."""

    class Gated(EchoEnv):
        def wait(self):
            (tmp_path / "in call").touch()
            wait_for_path(tmp_path / "go")

    with ea.VectorEnv([lambda: Gated(0)], restart=ea.RestartPolicy(max_restarts=1, backoff=0.0)) as envs:
        envs.reset(seed=0)
        for turn in range(warm):
            envs.send([turn])
            envs.recv(timeout=SOON)
        call = envs[0].call("wait")
        wait_for_path(tmp_path / "in call")
        envs.send([7])
        assert len(envs.recv(timeout=0.1).env_ids) == 0
        if then == "dies":
            os.kill(envs[0].pid, signal.SIGKILL)
            with pytest.raises(ea.VectorStepError) as caught:
                envs.recv(timeout=SOON)
            assert isinstance(caught.value.failures[0], ea.ActorDiedError)
            assert isinstance(call.exception(SOON), ea.ActorDiedError)
            assert envs.reset(env_ids=[0])[0][0, :3].tolist() == [0, 0, -1]
        else:
            (tmp_path / "go").touch()
            assert envs.recv(timeout=SOON).obs[0, :3].tolist() == [0, warm + 1, 7]
            call.result(SOON)


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
@pytest.mark.parametrize("sets", [[[0], [1], [2]], [[0], [1, 2]]], ids=["alone", "with another"])
def test_an_env_steps_again_before_its_last_step_is_over(tmp_path, sets, on_failure):
    """The step before was replayed twice, or with the action of the next one; a lost one had an old result."""

    class Gated(EchoEnv):
        def step(self, action):
            if action >= 100:
                (tmp_path / f"{action} has begun").touch()
                wait_for_path(tmp_path / str(action))
            return super().step(action)

    def shown(batch):
        return {int(row[0]): row[1:3].tolist() for row in batch.obs}

    with ea.VectorEnv(
        [lambda i=i: Gated(i) for i in range(3)],
        envs_per_actor=3,
        on_failure=on_failure,
        restart=ea.RestartPolicy(max_restarts=1, backoff=0.0),
    ) as envs:
        envs.reset(seed=0)
        # While the worker is busy with env 0 the others are posted, and it runs them at one go: env 1 is done while
        # the last step that was posted continues.
        for env_ids in sets:
            envs.send([[100, 1, 102][env_id] for env_id in env_ids], env_ids)
        (tmp_path / "100").touch()
        seen = {}
        while seen.keys() != {0, 1}:
            seen |= shown(envs.recv(min_envs=1, timeout=SOON))
        assert seen == {0: [1, 100], 1: [1, 1]}
        wait_for_path(tmp_path / "102 has begun")
        envs.send([2], [1])
        assert len(envs.recv(min_envs=1, timeout=0.2).env_ids) == 0
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        (tmp_path / "102").touch()
        seen, failed = {}, set()
        while seen.keys() != {1, 2}:
            batch = envs.recv(min_envs=1, timeout=SOON)
            seen |= shown(batch)
            failed.update(env_id for env_id, info in zip(batch.env_ids.tolist(), batch.infos, strict=True) if info)
        if on_failure == "renew":
            assert failed == {1, 2}
        else:
            assert (seen, failed) == ({1: [2, 2], 2: [1, 102]}, set())
            assert envs.step([5, 6, 7])[0][:, 1:3].tolist() == [[2, 5], [3, 6], [2, 7]]


def test_requests_sent_during_a_step_do_not_step_other_envs():
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


def test_a_vector_that_nobody_holds_ends_after_its_steps():
    envs = ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)])
    envs.reset(seed=0)
    envs.send([1, 2])
    pids = [actor.pid for actor in envs.actors]
    del envs
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_other_threads_may_wait_for_calls_meanwhile(tmp_path):
    with ea.spawn(Counter) as other, ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        future = other.wait_for_file(str(tmp_path / "go"))
        waiting = threading.Thread(target=future.result)  # reads all replies as long as it waits
        waiting.start()
        try:
            for turn in range(200):
                assert envs.step([turn] * 2)[0][:, 2].tolist() == [turn] * 2
        finally:
            (tmp_path / "go").touch()
            waiting.join(SOON)


def test_a_step_in_two_halves_is_pending_in_between():
    factories = [functools.partial(EchoEnv, i) for i in range(3)]
    with ea.VectorEnv(factories) as envs:
        access = VectorAccess(envs)
        envs.reset(seed=0)
        expected = envs.step([5, 6, 7])[0]
        envs.reset(seed=0)
        access = VectorAccess(envs)
        access.start_step([5, 6, 7])
        assert np.array_equal(access.finish_step()[0], expected)
        for ask in (lambda: envs.step([0] * 3), lambda: envs.send([0], env_ids=[2])):
            envs.reset(seed=0)
            access.start_step([5, 6, 7])
            with pytest.raises(ea.AlreadyPendingError):
                ask()
            assert np.array_equal(access.finish_step()[0], expected)
        envs.reset(seed=0)
        access.start_step([5, 6, 7])
        assert np.array_equal(envs.reset(seed=0)[0].shape, expected.shape), "a reset drops results that nobody took"
        access.start_step([5, 6, 7])
        batch = envs.recv()
        assert np.array_equal(batch.obs[np.argsort(batch.env_ids)], expected)


class GatedReset(EchoEnv):
    """Its resets wait until a file is there."""

    def __init__(self, gate):
        super().__init__(0)
        self.gate = gate

    def reset(self, *, seed=None, options=None):
        wait_for_path(self.gate)
        return super().reset(seed=seed, options=options)


def test_an_env_is_pending_during_its_first_reset(tmp_path):
    gate = tmp_path / "gate"
    with ea.VectorEnv([functools.partial(GatedReset, gate)]) as envs:
        with pytest.raises(ea.VectorTimeoutError):
            envs.reset(timeout=0.0)
        for ask in (lambda: envs.step([0]), lambda: envs.send([0]), lambda: envs.submit([0])):
            with pytest.raises(ea.AlreadyPendingError):
                ask()
        gate.touch()
        envs.recv(timeout=SOON)
        envs.step([0])


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

    sizes = [1, 0, INLINE_INFO_ROOM // 2, INLINE_INFO_ROOM - 150, INLINE_INFO_ROOM, 3, 20 * INLINE_INFO_ROOM, 0, 2]
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
