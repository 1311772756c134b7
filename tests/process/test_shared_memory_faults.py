"""Faults during steps through shared memory: no torn or stale results, and no endless waits."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import zlib

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import FORK_SERVER, SOON, ExplodesOnArrival, wait_always, wait_for_path, wait_until

import envactors as ea
from envactors.integrations.access import VectorAccess
from envactors.mailbox.control_page import FINISHED, ControlPage
from envactors.testing import EchoEnv, FaultyEnv
from envactors.vector import env_recovery
from envactors.vector.row_jobs import RowsJob

SLEEP, BOTH_SPIN = "sleep", "spin"

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)


class Torn(gymnasium.Env):
    """Large observations of one number each, with a checksum; killed by its own alarm clock while they are written."""

    action_space = spaces.Box(-1, 1, (), np.float64)

    def __init__(self):
        # Not of the class: all processes that import this module would have its 16 MB.
        self.observation_space = spaces.Dict(
            {"numbers": spaces.Box(0, 2**31, (2_000_000,), np.uint32), "sum": spaces.Box(0, 2**32, (), np.int64)}
        )

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
    kill_writers(12, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 4))
def test_thousands_of_writers_that_are_killed_leave_nothing_torn(seed):
    kill_writers(1000, seed)


def test_faults_while_nobody_waits_are_reported_with_the_result():
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


def test_an_env_that_is_lost_between_the_halves_of_a_step_is_reported_by_the_second():
    factories = [functools.partial(FaultyEnv, EchoEnv(i)) for i in range(2)]
    with ea.VectorEnv(factories, restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs[1].arm("crash").result()
        pid = envs[1].pid
        access = VectorAccess(envs)
        access.start_step([1, 2])
        wait_until(lambda: envs[1].pid != pid)
        with pytest.raises(ea.VectorStepError) as caught:
            access.finish_step()
        assert caught.value.batch.env_ids.tolist() == [0]
        assert isinstance(caught.value.failures[1], ea.ActorDiedError)


@pytest.mark.parametrize("env_ids", [None, [0, 1]], ids=["step", "step of some"])
@pytest.mark.parametrize("moment", ["as actions are converted", "as it is posted"])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_crash_just_before_a_step_begins_leaves_the_step_before_it_alone(on_failure, moment, env_ids):
    """The result of the step before is still in the slab, already delivered, when the crash is noticed."""
    with ea.VectorEnv([lambda i=i: EchoEnv(i) for i in range(2)], on_failure=on_failure, restart=ALWAYS) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        actor = envs.actors[1]
        owner, name = envs._engine, "_convert_actions" if moment == "as actions are converted" else "_post_or_queue"
        usual = getattr(owner, name)

        def dies_first(*args, **kwargs):
            setattr(owner, name, usual)
            os.kill(actor.pid, signal.SIGKILL)
            wait_until(lambda: actor.incarnation == 1 and actor.state is ea.ActorState.IDLE)
            return usual(*args, **kwargs)

        setattr(owner, name, dies_first)
        if on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as caught:
                envs.step([2, 2], env_ids=env_ids)
            assert list(caught.value.failures) == [1]
            obs = envs.reset(env_ids=[1])[0]
        elif on_failure == "replay":
            assert envs.step([2, 2], env_ids=env_ids)[0][1, :3].tolist() == [1, 2, 2]
            obs = envs.reset()[0]
        else:
            obs, *_, infos = envs.step([2, 2], env_ids=env_ids)
            assert "failure" in infos[1]
            assert obs[1, :3].tolist() == [1, 1, 1], "the last complete observation"
            obs = envs.step([3, 3])[0]
        assert obs[-1, :3].tolist() == [1, 0, -1]
        for turn in range(1, 4):
            assert envs.step([turn] * 2)[0][1, :3].tolist() == [1, turn, turn]


class Late(EchoEnv):
    """An env whose step with action 7 waits for a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def step(self, action):
        if action == 7:
            wait_for_path(self.path)
        return super().step(action)


class Refusing(EchoEnv):
    def step(self, action):
        raise RuntimeError("refused")


def test_a_result_that_comes_while_anothers_failure_is_handled_is_delivered(tmp_path):
    """The step may be over once that is done, and nothing rings any more."""
    path = tmp_path / "late"
    with ea.VectorEnv([Refusing, lambda: Late(path)], envs_per_actor=2, on_failure="renew", restart=ALWAYS) as envs:
        envs.reset(seed=0)
        state = envs._engine.table.rows
        fail = env_recovery.decide

        def fail_late(*args, **kwargs):
            env_recovery.decide = fail
            path.touch()
            wait_until(lambda: state.slab.written_ids[1] == state.posted_ids[1])
            return fail(*args, **kwargs)

        env_recovery.decide = fail_late
        envs.send([1, 7])
        infos, observations = {}, {}
        while len(infos) < 2:
            batch = envs.recv(min_envs=1, timeout=SOON)
            assert len(batch.env_ids), "lost"
            infos.update(zip(batch.env_ids.tolist(), batch.infos, strict=True))
            observations.update(zip(batch.env_ids.tolist(), batch.obs.tolist(), strict=True))
        assert "failure" in infos[0]
        assert "failure" not in infos[1]
        assert observations[1][1:3] == [1, 7]


@pytest.mark.parametrize("moment", ["as the deadline is looked at", "before the kill"])
@pytest.mark.parametrize("call", ["step", "send"])
@pytest.mark.parametrize("on_failure", ["raise", "renew"])
def test_a_result_after_its_deadline_does_not_count(on_failure, call, moment, tmp_path, monkeypatch):
    """Also not one that comes while the worker may still write its stacks."""
    with ea.VectorEnv(
        [lambda: Late(tmp_path / "late")] * 2, on_failure=on_failure, deadlines=ea.Deadlines(step=1.0), restart=ALWAYS
    ) as envs:
        envs.reset(seed=0)
        core, state = envs.actors[0]._actor, envs._engine.table.rows
        set_timer, activity = core.timers.set_earliest, RowsJob.activity

        def end_step():
            (tmp_path / "late").touch()
            wait_until(lambda: state.slab.written_ids[0] == state.posted_ids[0])

        def ends_before_the_kill(timer, when, callback):
            if timer == "kill":
                core.timers.set_earliest = set_timer
                end_step()
            set_timer(timer, when, callback)

        def ends_as_it_is_looked_at(*args):
            late = activity(*args)
            if late is not None and time.monotonic() >= late.started_at + 1.0:
                monkeypatch.setattr(RowsJob, "activity", activity)
                end_step()
            return late

        if moment == "before the kill":
            core.timers.set_earliest = ends_before_the_kill
        else:
            monkeypatch.setattr(RowsJob, "activity", ends_as_it_is_looked_at)
        failures = {}
        if call == "send":
            envs.send([7, 1])
            while len(failures) < 2:
                try:
                    batch = envs.recv(min_envs=1)
                except ea.VectorStepError as error:
                    failures |= error.failures
                    batch = error.batch
                results = zip(batch.env_ids.tolist(), batch.infos, strict=True)
                failures |= {env_id: info.get("failure") for env_id, info in results}
            with pytest.raises(ea.NothingPendingError):
                envs.recv()
        elif on_failure == "raise":
            with pytest.raises(ea.VectorStepError) as caught:
                envs.step([7, 1])
            failures = {**caught.value.failures, 1: caught.value.batch.infos[0].get("failure")}
        else:
            failures = {i: info.get("failure") for i, info in enumerate(envs.step([7, 1])[4])}
        assert isinstance(failures.pop(0), ea.ActorTimeoutError)
        assert failures == {1: None}
        assert (tmp_path / "late").exists(), "the result has come"
        if on_failure == "raise":
            envs.reset(env_ids=[0])
        envs.step([2, 2])
        assert envs.step([3, 3])[0][:, 2].tolist() == [3, 3]


class Mute(EchoEnv):
    """After a step with action 7 its worker writes that the step has ended, and never gets to ring."""

    def __init__(self, stops=False):
        super().__init__()
        self.stops = stops

    def step(self, action):
        if action == 7:
            ControlPage.finish_step = lambda page, call_id: self.finish_and_end(page, call_id)  # noqa: PLW0108 # a method
        return super().step(action)

    def finish_and_end(self, page, call_id):
        page.counters[FINISHED] = call_id
        if self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)


@pytest.mark.parametrize("strategy", [SLEEP, BOTH_SPIN], ids=["asleep", "spinning"])
@pytest.mark.parametrize("end", ["is stopped", "is killed from outside", "is killed", "is closed"])
@pytest.mark.parametrize("looks", [ea.VectorEnv.stats, lambda envs: None], ids=["after a look", "at once"])
def test_a_step_counts_whose_worker_ends_between_its_last_number_and_its_ring(end, looks, strategy):
    deadlines = ea.Deadlines(step=1.0 if end == "is stopped" else None)
    with ea.VectorEnv(
        [lambda: Mute(end == "is stopped")] * 2, on_failure="renew", restart=ALWAYS, deadlines=deadlines
    ) as envs:
        envs.reset(seed=0)
        envs.step([1, 1])
        wait_always(envs, strategy)
        pages = [actor._actor.process.worker.page for actor in envs.actors]
        pids = [actor.pid for actor in envs.actors]
        before = [page.counters[FINISHED] for page in pages]
        errors = []

        def interfere():
            try:
                wait_until(lambda: all(page.counters[FINISHED] > n for page, n in zip(pages, before, strict=True)))
                looks(envs)
                for actor, pid in zip(envs.actors, pids, strict=True):
                    if end == "is killed from outside":
                        os.kill(pid, signal.SIGKILL)
                    elif end == "is killed":
                        actor.kill()
                if end == "is closed":
                    envs.close(0)
            except BaseException as error:
                errors.append(error)
                raise

        thread = threading.Thread(target=interfere)
        thread.start()
        begun = time.monotonic()
        obs, *_, infos = envs.step([7, 7])
        assert time.monotonic() - begun < 1.0 + SOON
        assert (obs[:, 2].tolist(), infos) == ([7, 7], [{}, {}])
        thread.join(SOON)
        assert not errors
        if end in ("is stopped", "is killed from outside"):
            assert ["failure" in info for info in envs.step([1, 1])[4]] == [True, True]


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


def _raise_unless(home):
    if os.getpid() != home:
        raise RuntimeError("boom on arrival")


def test_a_result_that_cannot_be_unpickled_fails_only_its_env():
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


class ExplodingInfo(EchoEnv):
    """An env whose infos cannot be unpickled."""

    def step(self, action):
        return (*super().step(action)[:4], {"what": ExplodesOnArrival()})


def test_an_info_that_cannot_be_decoded_fails_its_env_alone():
    with ea.VectorEnv([ExplodingInfo, EchoEnv]) as envs:
        envs.reset(seed=0)
        with pytest.raises(ea.VectorStepError) as raised:
            envs.step([1, 1], timeout=SOON)
        assert list(raised.value.failures) == [0]
        assert raised.value.batch.env_ids.tolist() == [1]
        failure = raised.value.failures[0]
        assert "Traceback" in str(failure), "it says where it cannot be decoded"
        assert failure.__cause__.__traceback__ is None, "its frames would keep the memory of the vector"
        assert not isinstance(failure.__cause__.__cause__, ea.RemoteTraceback), "the worker has raised nothing"


def test_a_failure_is_received_after_what_was_complete_before_it(tmp_path):
    class Env(EchoEnv):
        def step(self, action):
            if action == 9:
                while not (tmp_path / "first").exists():
                    time.sleep(0.001)
                os._exit(3)
            return super().step(action)

    with ea.VectorEnv([Env] * 2, on_failure="renew") as envs:
        envs.reset(seed=0)
        envs.send([5, 9])
        wait_until(lambda: envs._engine.table.slab.written_ids[0] == envs._engine.table.rows.posted_ids[0])
        (tmp_path / "first").touch()
        wait_until(lambda: envs[1].incarnation == 1)
        batch = envs.recv()
        assert batch.env_ids.tolist() == [0, 1]
        assert "failure" in batch.infos[1]
