"""Steps of an in-process vector, whose envs run in one loop: calls and replacements in the middle of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from interleaving import Lines, StoppingThread

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.mailbox.messages import episode_seed
from envactors.testing import EchoEnv

SOON = 30
ALWAYS = ea.RestartPolicy(max_restarts=100, backoff=0)


class Calling(EchoEnv):
    """Runs a function in its step.

    Args:
        during: The function.
    """

    def __init__(self, during):
        super().__init__()
        self.during = during

    def step(self, action):
        self.during()
        return super().step(action)

    def count(self):
        return self.steps


class Shared:
    """What an env runs in its step, which the test sets once the vector is made. Factories are pickled by reference."""

    during = staticmethod(lambda: None)


def run_shared():
    Shared.during()


def make_calling():
    return Calling(run_shared)


@pytest.fixture
def envs():
    Shared.during = staticmethod(lambda: None)
    with ea.VectorEnv([EchoEnv, make_calling, make_calling, EchoEnv], backend="inline") as envs:
        envs.reset(seed=0)
        yield envs
        Shared.during = staticmethod(lambda: None)


def steps_of(envs):
    return [envs[1].call("count").result(SOON), envs[2].call("count").result(SOON)]


def test_all_envs_step_once_and_in_order(envs):
    names = []
    Shared.during = staticmethod(lambda: names.append(ea.current_actor().name))
    obs = envs.step([1, 2, 3, 4])[0]
    assert obs[:, 2].tolist() == [1, 2, 3, 4]
    assert names == ["env-1", "env-2"]
    assert ea.current_actor() is None


@pytest.mark.parametrize("other", [0, 3])
def test_an_env_may_call_another_one_in_its_step(envs, other):
    """Whether that one has stepped before or steps later: it steps once, and the call comes after its step."""
    results = []

    def call():
        Shared.during = staticmethod(lambda: None)
        results.append(envs[other].get("observation_space").result(SOON).shape)

    Shared.during = staticmethod(call)
    obs = envs.step([1, 2, 3, 4])[0]
    assert obs[:, 2].tolist() == [1, 2, 3, 4]
    assert len(results) == 1
    assert steps_of(envs) == [1, 1]
    assert envs.step([5, 6, 7, 8])[0][:, 2].tolist() == [5, 6, 7, 8]


def test_a_call_of_another_thread_runs_after_the_step(envs):
    counts = []

    def call():
        Shared.during = staticmethod(lambda: None)
        thread = threading.Thread(target=lambda: counts.append(envs[2].call("count").result(SOON)))
        thread.start()
        threads.append(thread)

    threads = []
    Shared.during = staticmethod(call)
    assert envs.step([1, 2, 3, 4])[0][:, 2].tolist() == [1, 2, 3, 4]
    threads[0].join(SOON)
    assert counts == [1]
    assert steps_of(envs) == [1, 1]


def test_an_env_that_raises_fails_alone(envs):
    def fail():
        Shared.during = staticmethod(lambda: None)
        raise ZeroDivisionError("the first of the two")

    Shared.during = staticmethod(fail)
    with pytest.raises(ea.VectorStepError) as failed:
        envs.step([1, 2, 3, 4])
    assert list(failed.value.failures) == [1]
    assert failed.value.batch.env_ids.tolist() == [0, 2, 3]
    assert failed.value.batch.obs[:, 2].tolist() == [1, 3, 4]
    assert envs.step([5, 6, 7, 8])[0][:, 2].tolist() == [5, 6, 7, 8]
    assert steps_of(envs) == [1, 2]


def test_an_interrupt_in_an_env_reaches_the_caller_and_reset_is_all_that_it_takes(envs):
    def interrupt():
        Shared.during = staticmethod(lambda: None)
        raise KeyboardInterrupt

    Shared.during = staticmethod(interrupt)
    with pytest.raises(KeyboardInterrupt):
        envs.step([1, 2, 3, 4])
    with pytest.raises(ea.AlreadyPendingError, match="reset after an interrupt"):
        envs.step([1, 2, 3, 4])
    assert envs[1].state is ea.ActorState.IDLE
    envs.reset(seed=0)
    assert envs.step([5, 6, 7, 8])[0][:, 2].tolist() == [5, 6, 7, 8]


def test_an_actor_that_is_renewed_in_the_middle_of_a_step_loses_the_episode_of_its_env(envs):
    renewals = []

    def renew():
        Shared.during = staticmethod(lambda: None)
        renewals.append(envs[3].renew())

    Shared.during = staticmethod(renew)
    with pytest.raises(ea.VectorStepError) as failed:
        envs.step([1, 2, 3, 4])
    assert failed.value.batch.obs[:, 2].tolist() == [1, 2, 3]
    assert list(failed.value.failures) == [3]
    assert isinstance(failed.value.failures[3], ea.ActorDiedError)
    assert renewals[0].result(SOON) == 1
    envs.reset(seed=1, env_ids=[3])
    assert envs.step([5, 6, 7, 8])[0][:, 2].tolist() == [5, 6, 7, 8]
    assert envs.stats().actors[3].incarnation == 1


def test_another_thread_sees_which_env_runs(envs):
    seen = {}

    def look():
        Shared.during = staticmethod(lambda: None)

        def read():
            seen["running"] = envs[1].stacks()
            seen["waiting"] = envs[3].stacks()
            seen["states"] = [envs[1].state, envs[3].state]

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(SOON)

    Shared.during = staticmethod(look)
    envs.step([1, 2, 3, 4])
    assert "in step" in seen["running"]
    assert seen["states"] == [ea.ActorState.BUSY, ea.ActorState.IDLE]
    assert seen["waiting"] == "no env code is running\n"
    assert envs[1].state is ea.ActorState.IDLE


def test_looking_at_another_actor_in_a_step_runs_nothing_twice(envs):
    def look():
        Shared.during = staticmethod(lambda: None)
        envs.actors[2].stats()
        names.append(ea.current_actor().name)

    names = []
    Shared.during = staticmethod(look)
    assert envs.step([1, 2, 3, 4])[0][:, 1].tolist() == [1] * 4
    assert steps_of(envs) == [1, 1]
    assert names == ["env-1"]


def test_an_env_whose_actor_was_closed_in_the_middle_of_a_step_does_not_step(envs):
    ran = []

    def close():
        ran.append(ea.current_actor().name)
        if len(ran) == 1:
            envs.actors[2].close()

    Shared.during = staticmethod(close)
    with contextlib.suppress(ea.VectorEnvError):
        envs.step([1, 2, 3, 4])
    assert ran.count("env-2") <= 1
    Shared.during = staticmethod(lambda: ran.append("late"))
    with pytest.raises(ea.EnvActorsError):
        envs.step([1, 2, 3, 4])


def test_the_actor_that_runs_is_known_while_another_thread_calls_one_that_has_stepped(envs):
    names = []

    def call():
        Shared.during = staticmethod(lambda: None)
        threads.append(threading.Thread(target=lambda: envs[0].get("steps").result(SOON)))
        threads[0].start()
        names.append(ea.current_actor().name)

    threads = []
    Shared.during = staticmethod(call)
    envs.step([1, 2, 3, 4])
    threads[0].join(SOON)
    assert names == ["env-1"]


def test_the_second_half_of_a_step_returns_rows_that_another_thread_has_run(envs):
    access, ran_in = VectorAccess(envs), set()
    Shared.during = staticmethod(lambda: ran_in.add(threading.current_thread()))
    thread = threading.Thread(target=lambda: access.start_step([1, 2, 3, 4]))
    thread.start()
    thread.join(SOON)
    assert access.finish_step(timeout=SOON)[0][:, 2].tolist() == [1, 2, 3, 4]
    assert ran_in == {thread}


def test_a_handle_that_is_kept_keeps_no_env_of_a_closed_vector():
    with ea.VectorEnv([EchoEnv] * 2, backend="inline") as envs:
        envs.reset(seed=0)
        envs.step([1, 2])
        actor = envs.actors[0]
        made = [weakref.ref(hosted.env) for hosted in actor._actor.hosted_envs]
    del envs
    gc.collect()
    assert [env() for env in made] == [None]
    assert actor.state is ea.ActorState.CLOSED


@pytest.mark.parametrize("per_actor", [1, 3])
def test_steps_equal_those_of_threads(per_actor):
    """With episodes that end, infos, and envs that step alone in between."""
    with (
        ea.make_vec("CartPole-v1", 6, backend="inline", envs_per_actor=per_actor) as ours,
        ea.make_vec("CartPole-v1", 6, backend="thread", envs_per_actor=per_actor) as theirs,
    ):
        before = [[actor.completed for actor in envs.stats().actors] for envs in (ours, theirs)]
        for envs in (ours, theirs):
            envs.reset(seed=3)
        rng = np.random.default_rng(0)
        for step in range(300):
            ids = None if step % 7 else [4, 1]
            actions = rng.integers(2, size=6 if ids is None else 2)
            results = [envs.step(actions, env_ids=ids) for envs in (ours, theirs)]
            for mine, other in zip(*results, strict=True):
                np.testing.assert_array_equal(mine, other)
        mine, other = ours.stats(), theirs.stats()
        assert list(mine.steps) == list(other.steps)
        assert list(mine.episodes) == list(other.episodes)
        after = [[actor.completed for actor in stats.actors] for stats in (mine, other)]
        assert np.equal(*np.subtract(after, before)).all()


def test_a_wait_for_no_step_steps_no_env(envs):
    envs.step([0] * 4)
    with pytest.raises(ea.NothingPendingError):
        VectorAccess(envs).finish_step()
    assert envs.call("count", env_ids=[1, 2]) == [1, 1]


def test_a_thread_that_waits_while_another_steps_steps_no_env(envs):
    """Which of the two gets the results depends on how busy the machine is."""
    results, errors = [], []

    def take(ask):
        try:
            results.append(ask()[0][:, 1].tolist())
        except ea.NothingPendingError:
            errors.append(True)

    thread = StoppingThread(lambda: take(VectorAccess(envs).finish_step))

    def start_once():
        if thread.ident is None:
            thread.start()
            thread.wait_asleep()

    Shared.during = staticmethod(start_once)
    take(lambda: envs.step([5] * 4))
    assert thread.ends_within(SOON)
    assert (results, errors) == ([[1] * 4], [True])
    assert steps_of(envs) == [1, 1]


def test_a_wait_from_within_an_env_ends_in_time(envs):
    """As from a signal handler that runs there: nothing is there yet that it could wait for."""
    errors = []

    def wait():
        try:
            VectorAccess(envs).finish_step(timeout=0.05)
        except ea.NothingPendingError:
            errors.append(True)

    Shared.during = staticmethod(wait)
    obs, *_ = envs.step([5] * 4)
    assert len(errors) == 2
    assert obs[:, 1].tolist() == [1] * 4


class Raising(EchoEnv):
    """Raises in its second step; notes the threads that its code runs in."""

    threads: ClassVar[list[str]] = []

    def __init__(self):
        super().__init__()
        self.threads.append(threading.current_thread().name)

    def reset(self, **kwargs):
        self.threads.append(threading.current_thread().name)
        return super().reset(**kwargs)

    def step(self, action):
        self.threads.append(threading.current_thread().name)
        if self.steps == 1:
            raise ValueError
        return super().step(action)


class Closing(Raising):
    """Counts how often its instances are closed."""

    closed = 0

    def close(self):
        type(self).closed += 1


@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_an_env_that_raised_is_closed_when_another_takes_its_place(on_failure):
    Closing.closed = 0
    with ea.VectorEnv([Closing], backend="inline", on_failure=on_failure, autoreset="disabled", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.step([0])
        with contextlib.suppress(ea.VectorStepError, ValueError):
            envs.step([0])
        assert Closing.closed == envs[0].incarnation
        assert (Closing.closed > 0) == (on_failure != "raise")


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
def test_no_code_of_an_env_runs_in_the_thread_that_restarts_it(on_failure):
    """That thread serves all actors, and an env may block."""
    Raising.threads = []
    restart = ea.RestartPolicy(max_restarts=100, backoff=0.01)
    with ea.VectorEnv([Raising], backend="inline", on_failure=on_failure, restart=restart) as envs:
        envs.reset(seed=0)
        for _ in range(6):
            assert envs.submit([0])[0].result(SOON)
        assert set(Raising.threads) == {threading.current_thread().name}


class Reusing:
    """Returns the same mutable values again and again, all instances the same observation; raises at action 9."""

    observation_space = gymnasium.spaces.Box(-9, 99, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(10)
    reward_space = gymnasium.spaces.Box(-9, 99, (2,), np.float32)
    obs = np.zeros(1)

    def __init__(self):
        self.info, self.reward, self.ends = {}, np.zeros(2, np.float32), np.zeros((), np.bool_)

    def reset(self, *, seed=None, options=None):
        self.poke(0)
        self.info.clear()
        return self.obs, self.info

    def step(self, action):
        returned = self.obs, self.reward, self.ends, False, self.info
        if action == 9:
            self.info["value"] = action
            raise ValueError("nine")
        self.obs[:] = action
        self.reward[:] = action
        self.ends[()] = action == 8
        if action > 1:
            self.info["value"] = int(action)
        return returned

    def poke(self, value):
        """Change everything that the env has returned."""
        self.obs[:] = self.reward[:] = value
        self.ends[()] = value
        self.info["value"] = value


def as_lists(batch):
    return [np.asarray(column).tolist() for column in batch[:-1]] + [list(batch[-1])]


REUSING = pytest.mark.parametrize("options", [{}, {"on_failure": "renew", "restart": ALWAYS}], ids=["raise", "renew"])


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_rewards_are_float64_whatever_the_reward_space(backend):
    with ea.VectorEnv([Reusing], backend=backend) as envs:
        assert envs.reward_spec == ea.ArraySpec((2,), np.float64)
        envs.reset()
        assert envs.step([1])[1].dtype == np.float64
        assert envs.submit([1])[0].result(SOON).reward.dtype == np.float64


@REUSING
def test_a_result_does_not_change_after_the_step(options):
    with ea.VectorEnv([Reusing] * 2, backend="inline", **options) as envs:
        envs.reset()
        first, second = envs.step([1, 2]), envs.step([3, 4])
        assert as_lists(first) == [[[1], [2]], [[1, 1], [2, 2]], [False] * 2, [False] * 2, [{}, {"value": 2}]]
        assert as_lists(second) == [
            [[3], [4]],
            [[3, 3], [4, 4]],
            [False] * 2,
            [False] * 2,
            [{"value": 3}, {"value": 4}],
        ]


@REUSING
@pytest.mark.parametrize("is_submitted", [False, True])
def test_a_result_does_not_change_before_it_is_received(options, is_submitted):
    with ea.VectorEnv([Reusing] * 2, backend="inline", **options) as envs:
        envs.reset()
        futures = envs.submit([5, 6]) if is_submitted else envs.send([5, 6])
        envs.call("poke", 77)
        rows = [future.result() for future in futures] if is_submitted else zip(*envs.recv(), strict=True)
        assert [as_lists(row[1:6]) for row in rows] == [
            [[value], [value, value], False, False, [*{"value": value}]] for value in (5, 6)
        ]


def test_the_incarnation_of_a_result_does_not_change_before_it_is_received():
    with ea.VectorEnv([EchoEnv], backend="inline") as envs:
        envs.reset()
        envs.send([1])
        envs.actors[0].renew().result(SOON)
        assert envs.recv().incarnations.tolist() == [0]


@REUSING
@pytest.mark.parametrize("changed_by", ["env", "user"])
def test_a_snapshot_has_the_last_result_as_the_env_has_returned_it(options, changed_by):
    states = ea.SnapshotPolicy(get=lambda env: 0, set=lambda env, state: None)
    with ea.VectorEnv([Reusing], backend="inline", snapshot=states, **options) as envs:
        envs.reset()
        (step,) = [future.result() for future in envs.submit([5])]
        if changed_by == "env":
            envs.call("poke", 77)
        else:
            step.obs[:] = step.reward[:] = 77
            step.info["value"] = 77
        last = envs.snapshot()[0].last
        info = {"value": 5} if options else {}  # they are not kept under "raise"
        assert (last.obs.tolist(), last.reward.tolist(), last.info) == ([5], [5, 5], info)


@pytest.mark.parametrize("changed_by", ["env", "user"])
def test_the_last_info_of_a_failed_episode_is_as_the_env_has_returned_it(changed_by):
    options = {"on_failure": "renew", "autoreset": "same_step", "restart": ALWAYS}
    with ea.VectorEnv([Reusing], backend="inline", **options) as envs:
        envs.reset()
        *_, infos = envs.step([5])
        if changed_by == "user":
            infos[0]["value"] = 77
        *_, infos = envs.step([9])
        assert infos[0]["final_obs"].tolist() == [5]
        assert infos[0]["final_info"] == {"value": 5}


def test_the_result_of_an_ending_step_does_not_change_in_its_reset():
    with ea.VectorEnv([Reusing], backend="inline", autoreset="same_step") as envs:
        envs.reset()
        obs, rewards, terminated, _, infos = envs.step([8])
        assert (obs.tolist(), rewards.tolist(), terminated.tolist()) == ([[0]], [[8, 8]], [True])
        assert infos[0]["final_info"] == {"value": 8}


class Refusing(EchoEnv):
    """Refuses to reset with some seeds, and changes its options."""

    seeds: ClassVar[list[int | None]] = []
    options: ClassVar[list[dict]] = []
    refused: ClassVar[set[int | None]] = set()

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.options.append(dict(options or {}))
        (options or {}).clear()
        if seed in self.refused:
            raise ValueError(f"no level for seed {seed}")
        return super().reset(seed=seed)


@pytest.fixture
def refused():
    Refusing.refused, Refusing.seeds, Refusing.options = {3}, [], []
    return Refusing.refused


@pytest.mark.parametrize("on_failure", ["renew", "replay"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_a_reset_that_fails_is_repeated_once_and_then_with_derived_seeds(refused, on_failure, autoreset):
    derived = [int(np.random.SeedSequence(3, spawn_key=(k,)).generate_state(1)[0]) for k in (2, 3)]
    refused.add(derived[0])
    options = {"on_failure": on_failure, "autoreset": autoreset, "restart": ALWAYS}
    with ea.VectorEnv([Refusing, EchoEnv], backend="inline", **options) as envs:
        _, infos = envs.reset(seed=3, options={"level": 1})
        assert Refusing.seeds == [3, 3, *derived]
        assert Refusing.options == [{"level": 1}] * 4
        assert infos[0]["seed"] == derived[1]
        assert str(infos[0]["failure"]) == f"no level for seed {derived[0]}"
        assert envs.actors[0].incarnation == 3
        assert envs.step([1, 2])[3].tolist() == [False, False]


def test_a_reset_that_fails_is_repeated_as_often_as_processes_restart(refused):
    refused.add(None)
    options = {"on_failure": "renew", "restart": ea.RestartPolicy(max_restarts=2, backoff=0)}
    with ea.VectorEnv([Refusing], backend="inline", **options) as envs:
        with pytest.raises(ea.VectorStepError, match="no level for seed None"):
            envs.reset()
        assert Refusing.seeds == [None] * 3
        refused.clear()
        envs.reset()


@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_a_reset_after_one_that_failed_gets_the_seed_of_the_next_episode(refused, on_failure):
    options = {"on_failure": on_failure, "seed_episodes": True, "restart": ea.RestartPolicy(max_restarts=1)}
    with ea.VectorEnv([Refusing], backend="inline", **options) as envs:
        with contextlib.suppress(ea.VectorStepError):
            envs.reset(seed=3)
        envs.reset()
        assert Refusing.seeds.count(3) == (1 if on_failure == "raise" else 2)


class Locked(Refusing):
    """Returns an info that cannot travel, with the seeds that it would refuse."""

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        obs, info = EchoEnv.reset(self, seed=seed)
        return obs, {"lock": threading.Lock()} if seed in self.refused else info


@pytest.mark.parametrize("env", [Refusing, Locked])
@pytest.mark.parametrize("on_failure", ["raise", "renew"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_autoreset_that_fails_uses_up_its_seed(refused, backend, autoreset, on_failure, env):
    seeds = [3, *[episode_seed(3, number) for number in (1, 2)]]
    refused.symmetric_difference_update({3, seeds[1]})
    options = {"backend": backend, "autoreset": autoreset, "on_failure": on_failure, "restart": ALWAYS}
    with ea.VectorEnv([functools.partial(env, episode_length=1)], seed_episodes=True, **options) as envs:
        envs.reset(seed=3)
        for _ in range(2 if autoreset == "next_step" else 1):
            with contextlib.suppress(ea.VectorStepError):
                envs.step([0])
        if on_failure == "raise":
            envs.reset()
        elif autoreset == "next_step":
            envs.step([0])
        assert Refusing.seeds == seeds


class Meeting(list):
    """Actions that threads convert at the same time."""

    def __init__(self, actions, barrier):
        super().__init__(actions)
        self.barrier = barrier

    def __iter__(self):
        self.barrier.wait(SOON)
        return super().__iter__()


def test_one_of_two_threads_that_step_the_same_envs_at_once_is_told_so(envs):
    barrier, errors = threading.Barrier(2), []

    def send():
        try:
            envs.send(Meeting([0] * 4, barrier))
        except ea.AlreadyPendingError as error:
            errors.append(error)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(errors) == 1
    assert steps_of(envs) == [1, 1]
    assert envs.recv().env_ids.tolist() == [0, 1, 2, 3]


def test_recv_in_another_thread_takes_no_result_of_a_future():
    with ea.VectorEnv([EchoEnv], backend="inline") as envs:
        envs.reset(seed=0)
        lines = Lines()
        for count in lines:
            submitting = StoppingThread(lambda: envs.submit([3])[0].result(SOON), count, ("vector/inline.py",)).start()
            lines.has_stopped = submitting.stops()
            receiving = StoppingThread(envs.recv).start()
            receiving.wait_asleep()
            submitting.go_on()
            assert submitting.ends_within(SOON)
            assert receiving.ends_within(SOON)
            assert submitting.error is None
            assert submitting.result.obs[2] == 3
            assert isinstance(receiving.error, ea.NothingPendingError)
    assert lines.count > 10


def test_recv_that_began_before_another_thread_submits_takes_no_result_of_a_future(envs):
    """It stops at each of its lines until the second env steps, or waits for it to go on."""
    lines, may_step = Lines(), threading.Event()
    Shared.during = staticmethod(lambda: may_step.wait(SOON))
    for count in lines:
        may_step.clear()
        receiving = StoppingThread(envs.recv, count, ("vector/inline.py",)).start()
        lines.has_stopped = receiving.stops()
        submitting = StoppingThread(lambda: [future.result(SOON).obs[2] for future in envs.submit([3] * 4)]).start()
        submitting.wait_asleep()
        receiving.go_on()
        receiving.wait_asleep()
        may_step.set()
        assert submitting.ends_within(SOON)
        assert receiving.ends_within(SOON)
        assert (submitting.error, submitting.result) == (None, [3] * 4)
        assert isinstance(receiving.error, ea.NothingPendingError)
    assert lines.count > 1


@pytest.mark.parametrize("other", ["recv", "recv and send"])
def test_results_that_one_thread_receives_are_received_by_no_other_one(envs, other):
    """One thread stops at each line of `recv`; another one receives meanwhile, and perhaps steps the envs."""

    def receive():
        with contextlib.suppress(ea.NothingPendingError):
            received.append(envs.recv().obs[0, 2])
            if other == "recv and send":
                envs.send([2] * 4)

    received: list[float] = []
    lines = Lines()
    for count in lines:
        received.clear()
        envs.send([1] * 4)
        first = StoppingThread(lambda: received.append(envs.recv().obs[0, 2]), count, ("vector/inline.py",)).start()
        lines.has_stopped = first.stops()
        second = StoppingThread(receive).start()
        second.wait_asleep()
        first.go_on()
        assert first.ends_within(SOON)
        assert second.ends_within(SOON)
        with contextlib.suppress(ea.NothingPendingError):
            received.append(envs.recv().obs[0, 2])
        assert received in ([1], [1, 2])
        envs.reset(seed=0)
    assert lines.count > 10
