"""`max_running`: never more envs step or reset at once than that, in the order of the requests, and no turn is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections import deque
from concurrent.futures import CancelledError, as_completed
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from helpers import FORK_SERVER, SOON, promised, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.actor.actor import Actor
from envactors.actor.permits import Permits
from envactors.mailbox.specs import ArraySpec
from envactors.remote import LocalNodes

PLENTY = ea.RestartPolicy(max_restarts=1000, backoff=0.0)
WORKS, DIES, WAITS = 0, 1, 2  # what an action asks for


class Clocked:
    """Writes down when it steps and resets, and takes a moment for it."""

    def __init__(self, path, index, pace=0.003, length=4, shares=True):
        self.path, self.index, self.pace, self.length = path, index, pace, length
        self.action_space = ArraySpec((), np.int64)
        if shares:
            self.observation_space = ArraySpec((3,), np.float64)
        self.log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.count = self.resets = self.total = 0

    def write(self, what):
        os.write(self.log, f"{what} {self.index} {os.getpid()} {time.monotonic()!r}\n".encode())

    def reset(self, *, seed=None, options=None):
        self.write("begin")
        time.sleep(self.pace)
        self.wait_for_go(options == WAITS)
        self.count, self.resets = 0, self.resets + 1
        if seed is not None:
            self.total = seed
        result = self.observe(), {}
        self.write("end")
        return result

    def step(self, action):
        self.write("begin")
        time.sleep(self.pace)
        if action == DIES:
            # Once: the mark is there when the step is repeated.
            mark = Path(f"{self.path}.{self.index}.{self.total}")
            if not mark.exists():
                mark.touch()
                self.write("end")
                os.kill(os.getpid(), signal.SIGKILL)
        self.wait_for_go(action == WAITS)
        self.count += 1
        self.total += 1
        result = self.observe(), 1.0, self.count >= self.length, False, {}
        self.write("end")
        return result

    def wait_for_go(self, waits):
        while waits and not Path(f"{self.path}.go").exists():
            time.sleep(0.002)

    def observe(self):
        return np.array([self.index, self.count, self.total], np.float64)

    def render(self):
        return self.index

    def close(self):
        os.close(self.log)


class Log:
    """What the envs of a vector have written down."""

    def __init__(self, path):
        self.path = path

    def make(self, count, max_running=2, pace=0.003, length=4, shares=True, **options):
        factories = [lambda i=i: Clocked(str(self.path), i, pace, length, shares) for i in range(count)]
        options = {"backend": FORK_SERVER, "restart": PLENTY} | options
        return ea.VectorEnv(factories, max_running=max_running, **options)

    def go(self):
        Path(f"{self.path}.go").touch()

    def events(self):
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return sorted((float(when), what, int(index), int(pid)) for what, index, pid, when in lines)

    def begun(self):
        """The envs in the order in which they began."""
        return [index for _, what, index, _ in self.events() if what == "begin"]

    def most(self, kills=None):
        """How many ran at once at most; ``kills`` has for each pid that was killed a time at which it still ran."""
        begun, changes = {}, []
        for when, what, *env in self.events():
            if what == "begin":
                begun[tuple(env)] = when
            else:
                changes += [(begun.pop(tuple(env)), 1), (when, -1)]
        for (_, pid), when in begun.items():
            changes += [(when, 1), (max(when, (kills or {}).get(pid, when)), -1)]
        return max(itertools.accumulate(change for _, change in sorted(changes)))


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log")


def kill(envs, env_id, kills):
    """Kills the process of an env, if it has one."""
    pid = envs[env_id].pid
    if pid is not None:
        kills.setdefault(pid, time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def receive_all(envs, count):
    """Receives this many results; returns the ids in their order."""
    found = []
    while len(found) < count:
        batch = envs.recv(1, timeout=SOON)
        assert len(batch.env_ids), "waited in vain"
        found += batch.env_ids.tolist()
    return found


# The limit ----------------------------------------------------------------------------------------------

WAYS = {
    "shared": {"backend": FORK_SERVER},
    "objects": {"backend": FORK_SERVER, "shares": False},
    "packed": {"backend": FORK_SERVER, "envs_per_actor": 2},
    "threads": {"backend": "thread"},
    "packed threads": {"backend": "thread", "envs_per_actor": 2},
    "in-process": {"backend": "inline"},
    "replay": {"backend": FORK_SERVER, "on_failure": "replay"},
    "seeded": {"backend": FORK_SERVER, "seed_episodes": True},
}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("way", WAYS)
def test_no_more_envs_run_than_allowed_with_any_method(log, way, autoreset):
    actions = [WORKS] * 8
    with log.make(8, autoreset=autoreset, **WAYS[way]) as envs:
        envs.reset(seed=0, timeout=SOON)
        for _ in range(5):
            envs.step(actions, timeout=SOON)
        envs.step(actions[:3], env_ids=[6, 1, 4], timeout=SOON)
        envs.send(actions)
        for _ in range(8):
            ids = envs.recv(1, timeout=SOON).env_ids
            envs.send([WORKS] * len(ids), env_ids=ids)
        envs.recv(timeout=SOON)
        futures = envs.submit(actions)
        assert sorted(future.result().env_id for future in as_completed(futures, timeout=SOON)) == list(range(8))
        envs.reset(timeout=SOON)
        obs = envs.step(actions, timeout=SOON)[0]
        assert obs[:, :2].tolist() == [[i, 1] for i in range(8)]
    assert log.most() == (1 if way == "in-process" else 2)


def make_policy():
    return lambda obs, context: np.full(len(obs), WORKS)


@pytest.mark.parametrize("kills_one", [False, True])
def test_rollouts_are_limited_too(log, kills_one):
    kills = {}
    with log.make(4, max_running=1, on_failure="replay") as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.set_policy(make_policy)
        future = envs.rollout_async(6)
        if kills_one:
            wait_until(lambda: log.begun().count(2) > 2)
            kill(envs, 2, kills)
        assert future.result(SOON).obs[-1, :, 1].tolist() == [0] * 4
        envs.step([WORKS] * 4, timeout=SOON)
    assert log.most(kills) == 1


def test_calls_of_single_envs_count_and_those_of_other_methods_do_not(log):
    with log.make(4, max_running=1, pace=0.02) as envs:
        envs.reset(seed=0, timeout=SOON)
        calls = [envs[i].step(WORKS) for i in range(4)] + [envs[i].reset(seed=1) for i in range(4)]
        ea.wait(calls, timeout=SOON)
        assert [call.result()[0][0] for call in calls] == [0, 1, 2, 3] * 2
        envs.send([WAITS], env_ids=[0])
        assert [envs[i].render().result(SOON) for i in (1, 2, 3)] == [1, 2, 3]  # although nothing else may step
        log.go()
        envs.recv(timeout=SOON)
    assert log.most() == 1


@pytest.mark.parametrize("packed", [1, 2])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_no_more_envs_run_than_allowed_while_processes_crash(log, on_failure, autoreset, packed):
    """Env 5 crashes by itself, env 2 is killed from outside in the middle of its step."""
    kills, rewards = {}, 0.0
    with log.make(6, autoreset=autoreset, on_failure=on_failure, envs_per_actor=packed, length=6) as envs:
        envs.reset(seed=0, timeout=SOON)
        for turn in range(10):
            actions = [WORKS] * 6
            if turn % 4 == 1:
                actions[5] = DIES
            begun = log.begun().count(2)
            envs.send(actions)
            if turn % 4 == 2:
                wait_until(lambda: log.begun().count(2) > begun)  # noqa: B023
                kill(envs, 2, kills)
            got = 0
            while got < 6:
                try:
                    batch = envs.recv(1, timeout=SOON)
                    assert len(batch.env_ids), "waited in vain"
                except ea.VectorStepError as error:
                    assert on_failure == "raise"
                    got += len(error.failures)
                    batch = error.batch
                    failed = list(error.failures)
                    envs.reset(seed=[turn] * len(failed), env_ids=failed, timeout=SOON)
                got += len(batch.env_ids)
                rewards += batch.rewards.sum()
        assert sum(actor.stats().restarts for actor in envs.actors) >= 4
        if on_failure == "replay":
            resets = 6 if autoreset == "next_step" else 0
            assert rewards == 60 - resets  # nothing was lost
    assert log.most(kills) == 2


def test_a_process_that_crashes_while_its_step_waits(log):
    with log.make(4, max_running=1, on_failure="renew") as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([WAITS, WORKS, WORKS, WORKS])
        pid = envs[2].pid
        os.kill(pid, signal.SIGKILL)
        assert envs.recv(1, timeout=SOON).env_ids.tolist() == [2]
        log.go()
        assert receive_all(envs, 3) == [0, 1, 3]
        assert envs.step([WORKS] * 4, timeout=SOON)[0][:, 1].tolist() == [2, 2, 0, 2]
    assert log.most() == 1


def test_standbys_take_over_within_the_limit(log):
    make = Clocked, (str(log.path), 7)
    factory = lambda: make[0](*make[1])  # noqa: E731
    options = {"standbys": 1, "on_failure": "replay", "restart": PLENTY, "backend": FORK_SERVER}
    with ea.VectorEnv([factory] * 4, max_running=1, **options) as envs:
        envs.reset(seed=[100, 200, 300, 400], timeout=SOON)
        obs = envs.step([DIES, WORKS, WORKS, DIES], timeout=SOON)[0]
        assert obs[:, 2].tolist() == [101, 201, 301, 401]
    assert log.most() == 1


def test_workers_on_other_nodes(log):
    with log.make(4, backend=ea.RemoteBackend(LocalNodes(2))) as envs:
        envs.reset(seed=0, timeout=3 * SOON)
        for _ in range(3):
            envs.step([WORKS] * 4, timeout=SOON)
        envs.send([WORKS] * 4)
        assert sorted(receive_all(envs, 4)) == [0, 1, 2, 3]
    assert log.most() == 2


# Order ------------------------------------------------------------------------------------------------


def test_requests_start_in_the_order_in_which_they_were_made(log):
    with log.make(6, max_running=1) as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([WAITS], env_ids=[5])
        order = [3, 0, 4]
        for env_id in order:
            envs.send([WORKS], env_ids=[env_id])
        [future] = envs.submit([WORKS], env_ids=[2])
        call = envs[1].step(WORKS)
        log.go()
        assert receive_all(envs, 4) == [5, *order]
        future.result(SOON)
        call.result(SOON)
        assert log.begun()[-6:] == [5, *order, 2, 1]


@pytest.mark.parametrize("order", [[0, 2, 1], [2, 0, 1], [0, 1, 2]])
def test_requests_of_one_actor_do_not_overtake_those_of_others(log, order):
    with log.make(4, max_running=1, envs_per_actor=2) as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([WAITS], env_ids=[3])
        for env_id in order:
            envs.send([WORKS], env_ids=[env_id])
        log.go()
        assert receive_all(envs, 4) == [3, *order]


def test_a_step_that_waits_for_a_replay_keeps_its_place(log):
    with log.make(3, max_running=1, on_failure="replay") as envs:
        envs.reset(seed=0, timeout=SOON)
        for env_id, action in ((1, WAITS), (2, WORKS), (0, WORKS)):
            envs.send([action], env_ids=[env_id])
        os.kill(envs[0].pid, signal.SIGKILL)
        wait_until(lambda: envs[0].incarnation == 1 and envs[0].state is ea.ActorState.IDLE)
        log.go()
        assert receive_all(envs, 3) == [1, 2, 0]
        assert log.begun()[-4:] == [1, 0, 2, 0]  # the replay goes first


def test_a_call_whose_process_is_replaced_keeps_its_place(log):
    with log.make(3, max_running=1) as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([WAITS], env_ids=[1])
        first = envs[0].step(WORKS)
        envs.send([WORKS], env_ids=[2])
        envs[0].kill(restart=True)
        wait_until(lambda: envs[0].incarnation == 1 and envs[0].state is ea.ActorState.IDLE)
        log.go()
        assert first.result(SOON)[0][0] == 0
        envs.recv(timeout=SOON)
        assert log.begun()[-3:] == [1, 0, 2]


OPERATIONS = st.lists(st.tuples(st.sampled_from(["add", "front", "end", "drop"]), st.integers(0, 4)))


class Holding:
    """Replaces an actor that needs permits: runs the first job of its queue, one at a time."""

    def __init__(self, permits, soon):
        self.permits, self.soon = permits, soon
        self.queue, self.running, self.begun = deque(), None, []

    def proceed_soon(self):
        self.soon.append(self)

    def dispatch(self):
        if self.running is None and self.queue:
            if not self.permits.try_take(self, self.queue[0]):
                return
            self.running = self.queue.popleft()
            self.begun.append(self.running)
        if self.running is None:
            self.permits.release(self)


@given(count=st.integers(1, 3), operations=OPERATIONS)
@settings(max_examples=examples(200))
def test_permits_are_held_by_few_go_to_the_oldest_and_are_never_idle(count, operations):
    permits, soon, ages = Permits(count), deque(), itertools.count(1)
    actors = [Holding(permits, soon) for _ in range(5)]
    for operation, index in operations:
        actor = actors[index]
        if operation == "front":
            actor.queue.appendleft(0)
        elif operation == "add":
            actor.queue.append(next(ages))
        elif operation == "drop" and actor.queue:
            actor.queue.popleft()
        elif operation == "end":
            actor.running = None
        actor.dispatch()
        while soon:
            before = [age for one in actors if one.queue and one.running is None for age in [one.queue[0]]]
            woken = soon.popleft()
            begun = len(woken.begun)
            woken.dispatch()
            if len(woken.begun) > begun:
                free = count - sum(one.running is not None for one in actors) + 1
                assert woken.running in sorted(before)[:free]
        running = [one for one in actors if one.running is not None]
        ready = [one for one in actors if one.queue and one.running is None]
        assert len(running) <= count
        assert len(running) == count or not ready


# No turn is lost -----------------------------------------------------------------------------------------


def test_a_process_that_waits_for_its_restart_occupies_no_permit(log):
    restart = ea.RestartPolicy(max_restarts=3, backoff=100.0, backoff_max=100.0)
    with log.make(4, max_running=1, on_failure="renew", restart=restart) as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([DIES, WORKS, WORKS, WORKS])
        # The next one may have its turn before the first one's end is told.
        assert sorted(receive_all(envs, 4)) == [0, 1, 2, 3]
        envs.send([WORKS] * 4)  # a reset for env 0, in a process that comes much later
        assert receive_all(envs, 3) == [1, 2, 3]
        envs.close(0)


def test_waiting_envs_start_while_nobody_receives(log):
    with log.make(8, max_running=2) as envs:
        envs.reset(seed=0, timeout=SOON)
        before = len(log.begun())
        envs.send([WORKS] * 8)
        wait_until(lambda: len(log.begun()) == before + 8)
        envs.recv(timeout=SOON)


def test_a_timeout_of_step_does_not_end_the_step(log):
    with log.make(4, max_running=1) as envs:
        envs.reset(seed=0, timeout=SOON)
        with pytest.raises(ea.VectorTimeoutError):
            envs.step([WAITS, WORKS, WORKS, WORKS], timeout=0.05)
        with pytest.raises(ea.AlreadyPendingError):
            envs.step([WORKS], env_ids=[3])
        log.go()
        assert receive_all(envs, 4) == [0, 1, 2, 3]
        assert envs.step([WORKS] * 4, timeout=SOON)[0][:, 1].tolist() == [2] * 4


def test_deadlines_count_from_the_start(log):
    """Steps that wait for their turn for longer than their deadline are in time; then one takes too long."""
    limit = 1.0
    with log.make(3, max_running=1, deadlines=ea.Deadlines(step=limit)) as envs:
        envs.reset(seed=0, timeout=SOON)
        with pytest.raises(ea.VectorTimeoutError):
            envs.reset(options=WAITS, env_ids=[0], timeout=0.0)
        envs.send([WORKS, WORKS], env_ids=[1, 2])
        time.sleep(1.2 * limit)
        log.go()
        assert receive_all(envs, 3) == [0, 1, 2]
        Path(f"{log.path}.go").unlink()
        with pytest.raises(ea.VectorStepError) as raised:
            envs.step([WORKS, WAITS, WORKS], timeout=SOON)
        [(env_id, error)] = raised.value.failures.items()
        assert env_id == 1
        assert isinstance(error, ea.ActorTimeoutError)
        assert error.elapsed >= limit
    begun, _, _, pid = max(event for event in log.events() if event[1:3] == ("begin", 1))
    assert log.most({pid: begun + limit}) == 1


def test_a_future_that_waits_can_be_cancelled(log):
    with log.make(4, max_running=1) as envs:
        envs.reset(seed=0, timeout=SOON)
        futures = envs.submit([WAITS, WORKS, WORKS, WORKS])
        wait_until(lambda: log.begun()[-1] == 0 and len(log.begun()) == 5)
        assert not futures[0].cancel()
        assert futures[1].cancel()
        assert futures[3].cancel()
        log.go()
        assert futures[2].result(SOON).obs.tolist() == [2, 1, 3]
        assert futures[0].result(SOON).obs.tolist() == [0, 1, 1]
        with pytest.raises(CancelledError):
            futures[1].result()
        assert log.begun()[4:] == [0, 2]
        # What was cancelled owes nothing.
        assert envs.step([WORKS] * 4, timeout=SOON)[0][:, 1].tolist() == [2, 1, 2, 1]


def test_an_actor_that_is_ended_while_it_waits_leaves_its_place_to_the_next(log):
    with log.make(4, max_running=1) as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([WAITS, WORKS, WORKS, WORKS])
        envs[1].kill()
        envs[2].kill(restart=True)
        log.go()
        found, failed = [], []
        while len(found) + len(failed) < 4:
            try:
                found += envs.recv(1, timeout=SOON).env_ids.tolist()
            except ea.VectorStepError as error:
                failed += error.failures
                found += error.batch.env_ids.tolist()
        assert set(failed) == {1, 2}
        assert found == [0, 3]


def test_waiting_calls_run_before_the_vector_closes(log):
    with log.make(6, max_running=1) as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([WORKS] * 6)
    assert log.begun()[6:] == [0, 1, 2, 3, 4, 5]
    assert log.most() == 1


def test_closing_does_not_wait_for_queued_requests_beyond_its_timeout(log):
    envs = log.make(4, max_running=1)
    envs.reset(seed=0, timeout=SOON)
    futures = envs.submit([WAITS, WORKS, WORKS, WORKS])
    begin = time.monotonic()
    envs.close(0.2)
    assert time.monotonic() - begin < promised(3.0)
    for future in futures:
        assert isinstance(future.exception(SOON), ea.ActorError)
    assert len(log.begun()) == 5


def test_nothing_begins_when_the_timeout_of_closing_has_passed(log, monkeypatch):
    begin_close = Actor.begin_close

    def begin_close_slowly(supervisor, *args):
        begin_close(supervisor, *args)
        time.sleep(0.05)

    monkeypatch.setattr(Actor, "begin_close", begin_close_slowly)
    envs = log.make(4, max_running=1)
    envs.reset(seed=0, timeout=SOON)
    futures = envs.submit([WAITS, WORKS, WORKS, WORKS])
    envs.close(0.5)
    for future in futures:
        assert isinstance(future.exception(SOON), ea.ActorError)
    assert len(log.begun()) == 5


def test_a_renewal_needs_no_permit(log):
    with log.make(3, max_running=1, on_failure="renew") as envs:
        envs.reset(seed=0, timeout=SOON)
        envs.send([WAITS], env_ids=[0])
        assert envs[1].renew().result(SOON) == 1
        envs.send([WORKS] * 2, env_ids=[1, 2])
        log.go()
        assert sorted(receive_all(envs, 3)) == [0, 1, 2]


# Without a limit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "2"])
def test_an_invalid_max_running_raises(log, wrong):
    with pytest.raises(ea.VectorEnvError, match=r"max_running is .*: expected an int >= 1"):
        log.make(2, max_running=wrong)


@pytest.mark.parametrize(
    ("options", "limited"),
    [
        ({"max_running": None}, False),
        ({"max_running": 4}, False),
        ({"max_running": 9}, False),
        ({"max_running": 3}, True),
        ({"max_running": 2, "envs_per_actor": 2}, False),
        ({"max_running": 1, "envs_per_actor": 2}, True),
        ({"max_running": 1, "backend": "inline"}, False),
    ],
)
def test_max_running_limits_actors_only_if_it_is_below_their_number(log, options, limited):
    with log.make(4, **options) as envs:
        permits = [actor._actor.jobs.permits for actor in envs.actors if hasattr(actor._actor, "jobs")]
        assert [one is not None for one in permits] == [limited] * len(permits)


# Long runs ------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", [1, 3])
@pytest.mark.parametrize("on_failure", ["raise", "renew", "replay"])
def test_a_long_run_with_random_kills(log, on_failure, packed):
    chance = random.Random(packed)
    kills = {}
    with log.make(12, max_running=3, pace=0.002, on_failure=on_failure, envs_per_actor=packed, length=9) as envs:
        envs.reset(seed=0, timeout=SOON)
        end = time.monotonic() + 30.0
        while time.monotonic() < end:
            some = chance.sample(range(12), chance.randrange(1, 13))
            envs.send([chance.choice([WORKS] * 9 + [DIES]) for _ in some], env_ids=some)
            if chance.random() < 0.3:
                kill(envs, chance.randrange(12), kills)
            while envs._engine.busy():
                try:
                    batch = envs.recv(1, timeout=SOON)
                    assert len(batch.env_ids), "waited in vain"
                except ea.VectorStepError as error:
                    failed = list(error.failures)
                    envs.reset(env_ids=failed, timeout=SOON)
    assert log.most(kills) == 3


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("pace", [0.005, 0.01])
def test_two_of_sixteen_are_as_fast_as_two(log, pace):
    """In turns with two envs of their own, which nothing limits."""

    def speed(envs, steps):
        envs.send([WORKS] * envs.num_envs)
        done, begin = 0, time.perf_counter()
        while done < steps:
            ids = envs.recv(1).env_ids
            envs.send([WORKS] * len(ids), env_ids=ids)
            done += len(ids)
        speed = done / (time.perf_counter() - begin)
        envs.recv()
        return speed

    options = {"pace": pace, "length": 10**9}
    with log.make(16, max_running=2, **options) as many, log.make(2, max_running=None, **options) as two:
        many.reset()
        two.reset()
        ratios = [speed(many, 200) / speed(two, 200) for _ in range(15)]
    assert statistics.median(ratios) >= 0.95, ratios
