"""Replay in a new process: faults do not change the trajectories."""

from __future__ import annotations

import functools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from budget import examples
from gymnasium import spaces
from helpers import SOON, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envactors as ea
from envactors.testing import FAULTS, EchoEnv, expected_checksum
from envactors.vector.engine import RowEngine
from envactors.vector.table import POSTED

ALWAYS = ea.RestartPolicy(max_restarts=10**6, backoff=0.0)
Replaying = functools.partial(ea.VectorEnv, on_failure="replay", restart=ALWAYS)


class Walk(gymnasium.Env):
    """An env that depends on seed, options, actions, attributes, and calls. It does what a file says, once."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, orders: str | None = None, length: int = 9) -> None:
        self.orders = orders
        self.length = length
        self.scale = 1.0
        self.pushes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obey("reset")
        if seed is not None:
            self.pushes = 0  # calls before the seed are not made again
        self.at = self.np_random.normal(size=3) + (options or {}).get("offset", 0)
        self.count = 0
        return self.at.copy(), {}

    def step(self, action):
        self.obey("step")
        self.at += self.np_random.normal(size=3) * self.scale + action + self.pushes
        self.count += 1
        info = {"count": self.count, **({"lock": threading.Lock()} if self.obey("pickle") else {})}
        return self.at.copy(), float(self.at.sum()), self.count >= self.length, False, info

    def push(self, n):
        self.pushes += n
        return self.pushes

    def obey(self, where):
        """An order is removed from the file before it is obeyed, so a repeated request finds none."""
        path = None if self.orders is None else Path(f"{self.orders}.{where}")
        if path is None or not path.exists():
            return False
        order = path.read_text()
        path.unlink()
        if order in FAULTS:
            FAULTS[order]()
        return True


def flat(result):
    """Something that compares by value."""
    obs, rewards, terminated, truncated, infos = result
    infos = [
        {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in i.items()} for i in infos
    ]
    return obs.tolist(), rewards.tolist(), terminated.tolist(), truncated.tolist(), infos


def by_env(batch):
    order = np.argsort(batch.env_ids)
    infos = [batch.infos[i] for i in order]
    return batch.obs[order], batch.rewards[order], batch.terminated[order], batch.truncated[order], infos


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def trajectory(autoreset, envs_per_actor, kills):
    """Steps of four envs, by step or send; with kills while idle, and in the middle of steps."""
    dice, deaths = random.Random(1), random.Random(2)
    seen = []
    with Replaying([Walk] * 4, autoreset=autoreset, envs_per_actor=envs_per_actor) as envs:
        envs.set_attr("scale", [0.5, 1.0, 2.0, 3.0])
        seen.append(envs.reset(seed=7, options={"offset": 3})[0].tolist())
        for turn in range(16):
            actions = [dice.randrange(5) for _ in range(4)]
            victim = envs.actors[deaths.randrange(len(envs.actors))]
            if kills and turn % 8 == 3:
                incarnation = victim.incarnation
                kill(victim.pid)
                wait_until(lambda: victim.incarnation > incarnation)  # noqa: B023 # waited for here
            if turn % 8 == 5:
                seen.append(envs.call("push", turn, env_ids=[turn % 4]))
                envs.set_attr("scale", turn / 10, env_ids=[(turn + 1) % 4])
            if turn % 2:
                envs.send(actions)
                if kills and turn % 8 == 7:
                    kill(victim.pid)
                result = by_env(envs.recv())
            else:
                result = envs.step(actions)
            seen.append(flat(result))
            over = [i for i in range(4) if result[2][i]]
            if autoreset == "disabled" and over:
                seen.append(envs.reset(env_ids=over)[0].tolist())
        if kills:
            assert sum(actor.stats().restarts for actor in envs.actors) >= 2  # those while idle were waited for
    return seen


@pytest.mark.parametrize("envs_per_actor", [1, 2])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_a_run_with_kills_gives_the_same_trajectories(autoreset, envs_per_actor):
    assert trajectory(autoreset, envs_per_actor, kills=True) == trajectory(autoreset, envs_per_actor, kills=False)


TRANSIENT = [
    *[(fault, "step") for fault in ("crash", "segfault", "exit", "raise", "hang_in_c", "sleep", "stop")],
    *[(fault, "reset") for fault in ("crash", "raise", "hang_in_c")],
    ("unpicklable", "pickle"),
]


@pytest.mark.parametrize(("fault", "where"), TRANSIENT)
def test_one_fault_of_any_kind_does_not_change_the_trajectories(tmp_path, fault, where):
    def run(with_fault):
        orders = [str(tmp_path / f"{env}") for env in range(2)]
        factories = [functools.partial(Walk, one, 4) for one in orders]
        # Only those that it ends need one, and the other env must not exceed it, on a busy machine either.
        deadlines = ea.Deadlines(call=2.0 if fault in ("hang_in_c", "sleep", "stop") else None)
        with Replaying(factories, deadlines=deadlines) as envs:
            seen = [envs.reset(seed=3)[0].tolist()]
            for turn in range(12):
                if with_fault and turn == 6:
                    Path(f"{orders[1]}.{where}").write_text(fault)
                seen.append(flat(envs.step([turn % 5, 1])))
            seen.append(envs.reset(seed=4)[0].tolist())
            if with_fault:
                assert not Path(f"{orders[1]}.{where}").exists()
                assert envs[1].incarnation == 1
            assert envs[0].incarnation == 0
        for _, _, _, truncated, infos in seen[1:-1]:
            assert not any(truncated)
            for info in infos:
                info.pop("lock", None)
        return seen

    assert run(True) == run(False)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_first_seeded_reset_is_repeated_after_a_crash(tmp_path, where):
    Path(f"{tmp_path}/0.reset").write_text("crash")
    with Replaying([functools.partial(Walk, str(tmp_path / "0"))]) as envs, Replaying([Walk]) as others:
        obs, infos = envs.reset(seed=11)
        assert infos == [{}]
        assert obs.tolist() == others.reset(seed=11)[0].tolist()
        if where == "step":
            assert flat(envs.step([2])) == flat(others.step([2]))


def test_calls_that_wait_behind_a_lost_step_find_the_env_where_it_was(tmp_path):
    def run(with_fault):
        with Replaying([functools.partial(Walk, str(tmp_path / "0"))]) as envs:
            envs.reset(seed=5)
            envs.step([1])
            if with_fault:
                (tmp_path / "0.step").write_text("crash")
            (step,) = envs.submit([2])
            push = envs[0].push(10)
            count = envs[0].get("count")
            values = step.result(SOON), push.result(SOON), count.result(SOON)
            return values[0].obs.tolist(), values[1:], flat(envs.step([3]))

    assert run(True) == run(False)


def test_a_replay_may_take_longer_than_a_step():
    class Slow(Walk):
        def step(self, action):
            time.sleep(0.01)
            return super().step(action)

    with Replaying([Slow], deadlines=ea.Deadlines(call=0.4)) as envs:
        envs.reset(seed=0)
        for turn in range(70):
            envs.step([turn % 5])
        kill(envs[0].pid)
        assert envs.step([0])[4] == [{"count": 1}]
        assert envs[0].incarnation == 1
        assert envs.stats().actors[0].restarts == 1


class Fused(EchoEnv):
    """Crashes in a step if its fuse is there; other steps take 0.5 s.

    Args:
        fuse: A file, which it removes before it crashes.
    """

    def __init__(self, fuse):
        super().__init__()
        self.fuse = Path(fuse)

    def step(self, action):
        if self.fuse.exists():
            self.fuse.unlink()
            kill(os.getpid())
        time.sleep(0.5)
        return super().step(action)


def test_a_step_ends_if_a_new_process_runs_it_before_the_caller_waits(tmp_path, monkeypatch):
    fuse, finish = tmp_path / "fuse", RowEngine.wait_for_results
    wanted = 0

    def finish_late(engine, *args):
        wait_until(lambda: envs.actors[0].incarnation == wanted and engine.table.status[0] == POSTED)
        return finish(engine, *args)

    monkeypatch.setattr(RowEngine, "wait_for_results", finish_late)
    factories = [functools.partial(Fused, path) for path in (fuse, tmp_path / "none")]
    with ea.VectorEnv(factories, on_failure="replay", deadlines=ea.Deadlines(slow=None)) as envs:
        monkeypatch.setattr(RowEngine, "wait_for_results", finish)
        envs.reset(seed=[0, 0])
        fuse.touch()
        monkeypatch.setattr(RowEngine, "wait_for_results", finish_late)
        wanted, begun = 1, time.monotonic()
        assert envs.step([3, 4], timeout=SOON)[0][:, 2].tolist() == [3, 4]
    assert time.monotonic() - begun < SOON / 2, "nothing rang, and the timeout ended the wait"


@pytest.mark.parametrize("where", ["step", "reset"])
def test_each_part_of_a_replay_has_its_own_deadline(tmp_path, where):
    hangs = tmp_path / "hangs"

    class Hanging(Walk):
        def note(self, *, hang=False):
            if hang and hangs.exists():
                hangs.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)

        def reset(self, **kwargs):
            self.note(hang=where == "reset")
            return super().reset(**kwargs)

        def step(self, action):
            self.note(hang=where == "step")
            return super().step(action)

    with Replaying([Hanging], deadlines=ea.Deadlines(step=0.3, reset=0.3)) as envs:
        envs.reset(seed=0)
        envs.call("note")  # a call has no deadline here, which must not become that of the steps
        envs.step([1])
        hangs.touch()
        kill(envs[0].pid)
        envs.send([1])
        assert envs.recv(timeout=SOON).truncated.tolist() == [False]
        assert envs[0].incarnation == 2


# Envs that cannot be replayed --------------------------------------------------------------------------------


class Clock(Walk):
    """An env with an observation that no replay can repeat."""

    def step(self, action):
        _, *rest = super().step(action)
        return np.full(3, time.monotonic()), *rest


def test_different_observations_in_a_replay_are_reported_like_renew():
    with Replaying([Clock] * 2) as envs:
        envs.reset(seed=0)
        last = envs.step([0, 0])[0]
        kill(envs[1].pid)
        obs, rewards, _, truncated, infos = envs.step([1, 1])
        assert (truncated.tolist(), rewards[1], obs[1].tolist()) == ([False, True], 0.0, last[1].tolist())
        assert isinstance(infos[1]["failure"], ea.ActorDiedError)
        # The next step resets, with the seed that follows from the env's own and the incarnation.
        obs, *_, infos = envs.step([1, 1])
        seed = int(np.random.SeedSequence(1, spawn_key=(1,)).generate_state(1)[0])
        assert obs[1].tolist() == Walk().reset(seed=seed)[0].tolist()
        assert "failure" not in infos[1]


class RaisingClock(Clock):
    """A `Clock` that raises in its second step."""

    def step(self, action):
        if self.count == 1:
            raise ValueError("at one")
        return super().step(action)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_an_exception_is_reported_itself_if_the_observations_in_the_replay_differ(autoreset):
    with Replaying([RaisingClock], autoreset=autoreset) as envs:
        envs.reset(seed=0)
        envs.step([0])
        *_, truncated, infos = envs.step([1], timeout=SOON)
        assert truncated[0]
        assert repr(infos[0]["failure"]) == "ValueError('at one')"
        assert isinstance(infos[0]["failure"].__cause__, ea.RemoteTraceback)


def test_a_step_after_a_renewal_right_after_a_seeded_reset_reports_it():
    with Replaying([EchoEnv]) as envs:
        first, _ = envs.reset(seed=7)
        envs.actors[0].renew().result(SOON)
        obs, _, _, truncated, infos = envs.step([1], timeout=SOON)
        assert obs.tolist() == first.tolist()
        assert truncated[0]
        assert isinstance(infos[0]["failure"], ea.ActorDiedError)
        obs, *_ = envs.step([2], timeout=SOON)
        assert obs[0, 1] == 0


class WithoutSpec(EchoEnv):
    """An env whose actions have no place in shared memory; one of them ends the process."""

    action_space = None

    def step(self, action):
        if action == -1:
            os._exit(3)
        return super().step(action)


def test_autoresets_are_replayed_also_if_actions_have_no_spec():
    with Replaying([lambda: WithoutSpec(episode_length=2)]) as envs:
        envs.reset(seed=7)
        for action in range(4):
            envs.step([action], timeout=SOON)
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        obs, *_, infos = envs.step([4], timeout=SOON)
        assert "failure" not in infos[0]
        assert obs.tolist() == [[0, 2, 4, expected_checksum(None, [3, 4])]]
        envs.step([5], timeout=SOON)
        *_, infos = envs.step([-1], timeout=SOON)
        inputs = infos[0]["failure"].inputs
        assert inputs[-2:] == [("reset", None, None), ("step", -1)]


class DiesInReset(EchoEnv):
    """An env that crashes whenever it is reset with a certain seed."""

    def reset(self, *, seed=None, options=None):
        if seed == 1 << 64:
            os._exit(3)
        return super().reset(seed=seed, options=options)


def test_inputs_of_a_reset_with_a_large_seed_are_reported():
    with Replaying([DiesInReset]) as envs:
        _, infos = envs.reset(seed=1 << 64, timeout=SOON)
        assert infos[0]["failure"].inputs == [("reset", 1 << 64, None)]


def get_state(env):
    return env.steps, env.last_action, env.checksum


def set_state(env, state):
    env.steps, env.last_action, env.checksum = state


def test_a_state_that_is_saved_after_a_renewal_does_not_hide_it():
    with Replaying([EchoEnv], snapshot=ea.SnapshotPolicy(get_state, set_state, every=1)) as envs:
        envs.reset(seed=7)
        envs.send([1])
        time.sleep(0.2)  # it is complete, and is looked at once the renewal is queued
        envs.actors[0].renew().result(SOON)
        envs.recv(timeout=SOON)
        envs[0].echo(0).result(SOON)
        *_, truncated, infos = envs.step([2], timeout=SOON)
        assert truncated[0]
        assert isinstance(infos[0]["failure"], ea.ActorDiedError)


class AnySeed(EchoEnv):
    """An env that takes seeds of any size."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else seed % 1000, options=options)


def test_an_autoreset_within_a_step_does_not_count_as_one_with_the_large_seed_of_a_reset_before():
    snapshot = ea.SnapshotPolicy(get_state, set_state)
    with Replaying([lambda: AnySeed(episode_length=2)], autoreset="same_step", snapshot=snapshot) as envs:
        envs.reset(seed=1 << 64)
        for action in range(3):
            envs.step([action], timeout=SOON)
        os.kill(envs.actors[0].pid, signal.SIGKILL)
        *_, infos = envs.step([3], timeout=SOON)
        assert "failure" not in infos[0]


def test_an_env_that_was_never_seeded_is_renewed():
    with Replaying([Walk]) as envs:
        envs.reset()
        envs.step([1])
        kill(envs[0].pid)
        *_, truncated, infos = envs.step([1])
        assert truncated[0]
        assert isinstance(infos[0]["failure"], ea.ActorDiedError)


def test_more_steps_than_are_kept_are_not_replayed_until_the_next_seed():
    with Replaying([functools.partial(Walk, None, 10**6)], max_journal=5) as envs:
        envs.reset(seed=0)
        for _ in range(6):
            envs.step([1])
        kill(envs[0].pid)
        assert envs.step([1])[3][0]
        envs.reset(seed=1)
        for _ in range(5):
            last = envs.step([1])
        kill(envs[0].pid)
        assert not envs.step([1])[3][0]
        assert last[4][0]["count"] == 5


def test_large_values_count_as_several_steps_of_the_journal():
    with Replaying([functools.partial(Walk, None, 10**6)], max_journal=50) as envs:
        envs.reset(seed=0)
        envs.set_attr("bulk", bytes(20 << 10))
        kill(envs[0].pid)
        assert not envs.step([1])[3][0]
        envs.set_attr("bulk", bytes(40 << 10))
        kill(envs[0].pid)
        assert envs.step([1])[3][0]


@pytest.mark.parametrize("option", [-1, 2.5, None, True])
def test_the_length_of_the_journal_is_checked(option):
    with pytest.raises(ValueError, match="max_journal"):
        ea.VectorEnv([Walk], max_journal=option)


def test_attributes_are_set_again_if_the_episode_cannot_be_replayed():
    with Replaying([Walk]) as envs:
        envs.set_attr("scale", 4.0)
        envs.set_attr("length", 3)
        envs.reset()
        envs.set_attr("length", 7)
        kill(envs[0].pid)
        envs.step([1])
        assert envs.get_attr("scale") == [4.0]
        assert envs.get_attr("length") == [7]


def test_attributes_are_set_again_if_a_replay_raises_before_them():
    class Raises(Walk):
        def step(self, action):
            if action == 3 and ea.current_actor().incarnation == 1:
                raise ValueError("it does not like this process")
            return super().step(action)

    with Replaying([Raises]) as envs:
        envs.set_attr("scale", 4.0)
        envs.reset(seed=0)
        envs.step([3])
        envs.set_attr("scale", 5.0)
        kill(envs[0].pid)
        assert envs.step([1])[3].tolist() == [True]
        assert envs.get_attr("scale") == [5.0]
        assert envs[0].incarnation == 1


def test_a_session_with_fresh_process_gets_a_new_process():
    with Replaying([Walk]) as envs:
        envs.set_attr("scale", 4.0)
        envs.reset(seed=0)
        envs.step([1])
        assert envs[0].renew().result(SOON) == 1
        assert envs.get_attr("scale") == [4.0]
        assert envs.step([1])[3][0]


def test_a_step_that_was_aborted_is_not_made_again(tmp_path):
    class Waits(Walk):
        def step(self, action):
            if action == 3:
                (tmp_path / "there").touch()
                time.sleep(60)
            return super().step(action)

    with Replaying([Waits]) as envs:
        envs.reset(seed=0)
        envs.step([1])
        (future,) = envs.submit([3])
        wait_until((tmp_path / "there").exists)
        assert future.abort()
        step = future.result(SOON)
        assert step.truncated
        assert step.info["failure"].aborted


# The same inputs twice ----------------------------------------------------------------------------------


class Poisoned(Walk):
    """Ends with the third step of an action of 4, however often it is made."""

    def __init__(self, log, end):
        super().__init__()
        self.log = log
        self.end = end
        self.fours = 0

    def step(self, action):
        self.fours += action == 4
        if self.fours == 3:
            with Path(self.log).open("a") as file:
                file.write("x")
            if self.end == "raise":
                raise ValueError("three fours")
            os._exit(9)
        return super().step(action)


@pytest.mark.parametrize("end", ["exit", "raise"])
def test_inputs_that_crash_two_processes_are_not_replayed_again(tmp_path, end):
    log = tmp_path / "log"
    with Replaying([functools.partial(Poisoned, str(log), end), Walk]) as envs:
        envs.reset(seed=6, options={"offset": 2})
        envs.set_attr("scale", 2.5)
        for action in (4, 1, 4):
            last = envs.step([action] * 2)
        obs, rewards, _, truncated, infos = envs.step([4, 0])
        assert log.read_text() == "xx"
        assert (truncated.tolist(), rewards[0], obs[0].tolist()) == ([True, False], 0.0, last[0][0].tolist())
        failure = infos[0]["failure"]
        # It continues, with a fresh episode and another seed.
        obs, *_ = envs.step([0, 0])
        k = envs[0].incarnation
        seed = int(np.random.SeedSequence(6, spawn_key=(k,)).generate_state(1)[0])
        assert obs[0].tolist() == Walk().reset(seed=seed)[0].tolist()
        # And that one can be restored again.
        before = envs.step([1, 1])
        kill(envs[0].pid)
        after = envs.step([1, 1])
        assert not after[3].any()
        assert after[4][0]["count"] == before[4][0]["count"] + 1
    if end == "raise":
        assert isinstance(failure, ValueError)
        return
    assert isinstance(failure, ea.ActorDiedError)
    assert failure.exitcode == 9
    assert "not tried again" in str(failure)
    assert failure.inputs == [
        ("reset", 6, {"offset": 2}),
        ("set", "scale", 2.5),
        ("step", 4),
        ("step", 1),
        ("step", 4),
        ("step", 4),
    ]
    # What the error holds reproduces it.
    code = (
        "import sys, pickle; sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1])); from test_replay import Poisoned\n"
        "env = Poisoned(sys.argv[2], 'exit')\n"
        "for what, *args in pickle.loads(bytes.fromhex(sys.argv[3])):\n"
        "    if what == 'reset': env.reset(seed=args[0], options=args[1])\n"
        "    elif what == 'step': env.step(args[0])\n"
        "    else: setattr(env, *args)\n"
    )
    args = [pickle.dumps(sys.path).hex(), str(log), pickle.dumps(failure.inputs).hex()]
    assert subprocess.run([sys.executable, "-c", code, *args], check=False).returncode == 9


def test_two_crashes_at_different_points_do_not_count_as_the_same_inputs(tmp_path):
    def run(with_faults):
        with Replaying([functools.partial(Walk, str(tmp_path / "0"))]) as envs:
            seen = [envs.reset(seed=5)[0].tolist()]
            for turn in range(6):
                if with_faults:
                    (tmp_path / "0.step").write_text(("crash", "exit", "segfault")[turn % 3])
                seen.append(flat(envs.step([turn % 5])))
            return seen

    assert run(True) == run(False)


# Which inputs are blamed -------------------------------------------------------------------------------------


class Gates(Walk):
    """Waits in the steps whose gates are closed, and says which process does: it can be killed there from outside."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def reset(self, *, seed=None, options=None):
        self.pass_gate("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.pass_gate(self.count + 1)
        return super().step(action)

    def pass_gate(self, name):
        gate = self.path / f"closed {name}"
        if gate.exists():
            (self.path / f"there {os.getpid()}").touch()
            while gate.exists():
                time.sleep(0.001)


def kill_at_gate(path):
    wait_until(lambda: list(path.glob("there *")))
    (there,) = path.glob("there *")
    there.unlink()
    kill(int(there.name.split()[1]))


def test_two_kills_from_outside_in_the_same_step_count_against_its_inputs(tmp_path):
    with Replaying([functools.partial(Gates, tmp_path)]) as envs:
        envs.reset(seed=5)
        for _ in range(3):
            last = envs.step([1])
        (tmp_path / "closed 4").touch()
        envs.send([2])
        kill_at_gate(tmp_path)
        kill_at_gate(tmp_path)
        batch = envs.recv()
        failure = batch.infos[0]["failure"]
        assert isinstance(failure, ea.ActorDiedError)
        assert failure.signal == signal.SIGKILL
        assert "not tried again" in str(failure)
        assert failure.inputs == [("reset", 5, None), *[("step", 1)] * 3, ("step", 2)]
        assert batch.truncated.tolist() == [True]
        assert batch.obs.tolist() == last[0].tolist()
        wait_until(lambda: envs.stats().actors[0].restarts == 2)


@pytest.mark.parametrize("end", ["kill", "exit", "raise"])
def test_a_reset_that_fails_twice_is_not_tried_a_third_time(tmp_path, end):
    log = tmp_path / "log"

    class Unlucky(Gates):
        def reset(self, *, seed=None, options=None):
            if seed == 11:
                with log.open("a") as file:
                    file.write("x")
                if end == "raise":
                    raise ValueError("eleven")
                if end == "exit":
                    os._exit(9)
                self.pass_gate("at eleven")
            return super().reset(seed=seed, options=options)

    with Replaying([functools.partial(Unlucky, tmp_path)]) as envs:
        if end == "kill":
            (tmp_path / "closed at eleven").touch()
            future = threading.Thread(target=lambda: [kill_at_gate(tmp_path) for _ in range(2)])
            future.start()
        obs, infos = envs.reset(seed=11, options={"offset": 1})
        assert log.read_text() == "xx"
        failure, k = infos[0]["failure"], envs[0].incarnation
        if end == "raise":
            assert isinstance(failure, ValueError)
        else:
            assert failure.inputs == [("reset", 11, {"offset": 1})]
        seed = int(np.random.SeedSequence(11, spawn_key=(k,)).generate_state(1)[0])
        assert obs[0].tolist() == Walk().reset(seed=seed, options={"offset": 1})[0].tolist()
        if end == "kill":
            future.join(SOON)


def test_crashes_between_steps_do_not_count_against_the_inputs():
    with Replaying([Walk]) as envs, ea.VectorEnv([Walk]) as others:
        envs.reset(seed=5)
        others.reset(seed=5)
        for turn in range(4):
            for _ in range(3):
                incarnation = envs[0].incarnation
                kill(envs[0].pid)
                wait_until(
                    lambda: envs[0].incarnation > incarnation and envs[0].state is ea.ActorState.IDLE  # noqa: B023
                )
            assert flat(envs.step([turn])) == flat(others.step([turn]))
        assert envs.stats().actors[0].restarts == 12


def test_a_crash_during_a_replay_does_not_count_against_the_inputs(tmp_path):
    """The steps that are replayed had succeeded before. After the second crash in a row, they are given up."""
    with Replaying([functools.partial(Gates, tmp_path)]) as envs:
        envs.reset(seed=5)
        for _ in range(4):
            envs.step([1])
        (tmp_path / "closed 2").touch()
        kill(envs[0].pid)
        envs.send([1])
        kill_at_gate(tmp_path)
        (tmp_path / "closed 2").unlink()
        batch = envs.recv()
        assert not batch.truncated[0]
        assert "failure" not in batch.infos[0]
        assert envs.stats().actors[0].restarts == 2


def test_one_crash_in_a_step_and_one_during_its_replay_are_not_two_in_the_step(tmp_path):
    with Replaying([functools.partial(Gates, tmp_path)]) as envs, ea.VectorEnv([Walk]) as others:
        envs.reset(seed=5)
        others.reset(seed=5)
        for _ in range(3):
            envs.step([1])
            others.step([1])
        (tmp_path / "closed 4").touch()
        envs.send([2])
        wait_until(lambda: list(tmp_path.glob("there *")))
        (tmp_path / "closed 2").touch()
        kill_at_gate(tmp_path)  # in the step
        kill_at_gate(tmp_path)  # while the steps before it are replayed
        (tmp_path / "closed 4").unlink()
        (tmp_path / "closed 2").unlink()
        batch = envs.recv()
        assert flat(batch[1:6]) == flat(others.step([2]))
        # A crash in the step after it is the first one in that step.
        (tmp_path / "closed 5").touch()
        envs.send([3])
        kill_at_gate(tmp_path)
        (tmp_path / "closed 5").unlink()
        assert flat(envs.recv()[1:6]) == flat(others.step([3]))
        assert envs.stats().actors[0].restarts == 3


# Random histories --------------------------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.lists(st.integers(0, 4), min_size=3, max_size=3)),
        st.tuples(st.just("send"), st.lists(st.integers(0, 4), min_size=3, max_size=3)),
        st.tuples(st.just("part"), st.integers(0, 2)),
        st.tuples(st.just("push"), st.integers(0, 2)),
        st.tuples(st.just("set"), st.integers(0, 2)),
        st.tuples(st.just("reset"), st.sampled_from([None, 3, 8])),
        st.tuples(st.just("kill"), st.integers(0, 2)),
    ),
    max_size=14,
)


def perform(asked, envs_per_actor, kills):
    seen = []
    with Replaying([functools.partial(Walk, None, 5)] * 3, envs_per_actor=envs_per_actor) as envs:
        seen.append(envs.reset(seed=1)[0].tolist())
        for what, argument in asked:
            if what == "step":
                seen.append(flat(envs.step(argument)))
            elif what == "send":
                envs.send(argument)
                seen.append(flat(by_env(envs.recv())))
            elif what == "part":
                seen.append(flat(envs.step([2], env_ids=[argument])))
            elif what == "push":
                seen.append(envs.call("push", 1, env_ids=[argument]))
            elif what == "set":
                envs.set_attr("scale", len(seen) / 7, env_ids=[argument])
            elif what == "reset":
                seen.append(envs.reset(seed=argument)[0].tolist())
            elif kills:
                kill(envs.actors[argument % len(envs.actors)].pid)
    return seen


@given(operations, st.sampled_from([1, 2, 3]))
@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.timeout(180)
def test_kills_change_nothing_in_any_order_of_things(asked, envs_per_actor):
    assert perform(asked, envs_per_actor, kills=True) == perform(asked, envs_per_actor, kills=False)


class OnlyElsewhere:
    """Cannot be unpickled in the process that has made it."""

    def __reduce__(self):
        return unpickle_elsewhere, (os.getpid(),)


def unpickle_elsewhere(pid):
    if os.getpid() == pid:
        raise LookupError("unpickled in the caller")
    return "elsewhere"


def test_the_caller_unpickles_nothing_that_it_sends():
    with Replaying([WithoutSpec] * 2) as envs:
        envs.set_attr("first", OnlyElsewhere())
        for seed in (7, 8):
            envs.reset(seed=seed, timeout=SOON)
            envs.set_attr("second", OnlyElsewhere())
        envs.step([0, 0], timeout=SOON)
        for actor in envs.actors:
            os.kill(actor.pid, signal.SIGKILL)
        obs, *_, infos = envs.step([1, 1], timeout=SOON)
        assert infos == [{}, {}]
        assert obs[0][2] == 1
        assert envs.get_attr("first") == envs.get_attr("second") == ["elsewhere"] * 2
        *_, infos = envs.step([-1, 2], timeout=SOON)
        failure = infos[0]["failure"]
        with pytest.raises(LookupError, match="in the caller"):
            print(failure.inputs)
