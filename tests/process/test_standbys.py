"""`VectorEnv(..., standbys=k)`: crashed processes are replaced by ones that were started before; `max_starting`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from helpers import FORK_SERVER, SOON, UP, Counter, Placed, is_gone, promised, wait_for_path, wait_until, wait_while

import envactors as ea
from envactors.backends.base import Traits
from envactors.system.cpus import cores

FAST = ea.RestartPolicy(max_restarts=50, backoff=0.0)
# Longer than a test takes, so that nothing waits for it.
SLOW = ea.RestartPolicy(max_restarts=50, backoff=30.0)
DEADLINES = ea.Deadlines(step=0.5, reset=5.0)


def make(count=3, *, factory=Placed, **options):
    options = {"standbys": 1, "on_failure": "renew", "restart": FAST, "deadlines": DEADLINES, **options}
    return ea.VectorEnv([factory] * count, **options)


def standbys(envs):
    """The standbys' handles, once all are ready."""
    wait_until(lambda: all(standby.state is ea.ActorState.IDLE for standby in envs._standbys))
    return envs._standbys


def derived(root, incarnation):
    return int(np.random.SeedSequence(root, spawn_key=(incarnation,)).generate_state(1)[0])


# Taking ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["crash", "segfault", "exit", "hang_in_c", "raise"])
def test_a_lost_process_is_replaced_by_the_standby(fault):
    with make(restart=SLOW) as envs:
        (standby,) = standbys(envs)
        pid = standby.pid
        assert standby not in envs.actors
        assert len(envs.stats().actors) == envs.num_envs == 3
        envs.reset(seed=10)
        envs.step([1, 2, 3])
        envs[1].arm(fault).result(SOON)
        *_, infos = envs.step([4, 5, 6])
        assert ["failure" in info for info in infos] == [False, True, False]
        begun = time.monotonic()
        *_, infos = envs.step([7, 8, 9])
        assert time.monotonic() - begun < promised(5.0), "the standby does not wait for the backoff"
        assert infos[1] == {"seed": derived(11, 1), "options": None, "who": ("env-1", 1, 1)}
        assert envs.step([1, 2, 3])[4][1] == {"who": ("env-1", 1, 1)}
        assert (envs[1].pid, envs[1].incarnation) == (pid, 1)
        assert envs[1].get("made_as").result(SOON) == ("standby-0", -1, 0)
        assert envs.stats().actors[1].restarts == 1
        # Its own replacement waits instead, and processes that crash meanwhile are replaced without standbys.
        assert (standby.pid, standby.state) == (None, ea.ActorState.RENEWING)
        envs[2].arm(fault).result(SOON)
        envs.step([1, 2, 3])
        wait_until(lambda: (envs[2].pid, envs[2].state) == (None, ea.ActorState.RENEWING))


def test_with_raise_a_reset_continues_in_the_standby():
    with make(on_failure="raise", restart=SLOW) as envs:
        pid = standbys(envs)[0].pid
        envs.reset(seed=0)
        envs[0].arm("crash").result(SOON)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1, 1, 1])
        assert caught.value.failures.keys() == {0}
        _, infos = envs.reset(env_ids=[0])
        assert (envs[0].pid, infos[0]["who"], infos[0]["seed"]) == (pid, ("env-0", 0, 1), derived(0, 1))
        assert envs.step([2, 2, 2])[0][:, 1].tolist() == [1, 2, 2]


def test_a_crash_while_idle_a_renewal_and_a_kill_use_the_standby_too():
    with make(restart=ea.RestartPolicy(max_restarts=1, backoff=0.0)) as envs:
        envs.reset(seed=0)
        for number, replace in enumerate(
            [
                lambda actor: actor.renew().result(SOON),
                lambda actor: actor.kill(restart=True),
                lambda actor: os.kill(actor.pid, signal.SIGKILL),
            ]
        ):
            pid = standbys(envs)[0].pid
            replace(envs[1])
            wait_until(lambda pid=pid: envs[1].pid == pid and envs[1].state is ea.ActorState.IDLE)
            assert "failure" in envs.step([1, 1, 1])[4][1]
            assert envs.step([1, 1, 1])[4][1]["who"] == ("env-1", 1, number + 1)
        assert envs.stats().actors[1].restarts == 1, "as without standbys: what is asked for is not counted"
        standbys(envs)
        os.kill(envs[1].pid, signal.SIGKILL)
        with pytest.raises(ea.VectorStepError) as caught:
            envs.step([1, 1, 1])
        # Which of the two depends on whether the crash is noticed before the step is asked.
        assert isinstance(caught.value.failures[1], (ea.ActorDiedError, ea.RestartsExhaustedError))
        assert envs[1].state is ea.ActorState.DEAD, "the allowance is that of the slot"
        with pytest.raises(ea.RestartsExhaustedError):
            envs[1].get("made_as").result(SOON)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("envs_per_actor", [1, 4])
def test_the_results_are_those_without_standbys(autoreset, envs_per_actor):
    runs = []
    for count in (0, 1):
        with make(6, standbys=count, autoreset=autoreset, envs_per_actor=envs_per_actor) as envs:
            run = [envs.reset(seed=50)]
            for turn in range(9):
                if turn % 3 == 1:
                    standbys(envs)
                    envs[turn % 6].arm("exit").result(SOON)
                run.append(envs.step([turn] * 6))
            assert [actor.incarnation for actor in envs.actors].count(0) < len(envs.actors) - 1
            runs.append(
                [[obs.tolist(), *(flags.tolist() for flags in more), plain(infos)] for obs, *more, infos in run]
            )
    assert runs[0] == runs[1]


@pytest.mark.parametrize("envs_per_actor", [1, 2])
def test_a_standby_is_brought_to_where_the_env_was_lost(envs_per_actor):
    runs = []
    for faults in (0, 3):
        with make(3, on_failure="replay", envs_per_actor=envs_per_actor, deadlines=SOON) as envs:
            envs.reset(seed=50)
            envs[1].set("weight", 3).result(SOON)
            run = []
            for turn in range(7):
                if turn in (2, 4, 6) and faults:
                    pid = standbys(envs)[0].pid
                    os.kill(envs[1].pid, signal.SIGSTOP)
                    envs.send([turn] * 3)
                    os.kill(envs[1].pid, signal.SIGKILL)
                    batch = envs.recv()
                    order = np.argsort(batch.env_ids)
                    run.append((batch.obs[order].tolist(), batch.rewards[order].tolist()))
                    assert envs[1].pid == pid
                    assert not any("failure" in info for info in batch.infos)
                else:
                    obs, rewards, *_ = envs.step([turn] * 3)
                    run.append((obs.tolist(), rewards.tolist()))
            assert envs[1].get("weight").result(SOON) == 3
            assert envs[1].incarnation == faults
            runs.append(run)
    assert runs[0] == runs[1]


def plain(infos):
    return [
        {
            key: type(value) if key == "failure" else value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in info.items()
            if key != "final_info"
        }
        for info in infos
    ]


def test_a_standby_of_several_envs_serves_fewer(tmp_path):
    closed = tmp_path / "closed"
    with make(6, factory=lambda: Placed(closed), envs_per_actor=4, restart=SLOW) as envs:
        pid = standbys(envs)[0].pid
        envs.reset(seed=0)
        envs.step([1] * 6)
        envs[5].arm("crash").result(SOON)
        envs.step([2] * 6)
        envs.step([3] * 6)
        assert envs.actors[1].pid == pid
        assert [info["who"][1:] for info in envs.step([4] * 6)[4]] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
        assert [made[:2] for made in envs.call("get_made_as", env_ids=[4, 5])] == [("standby-0", -4), ("standby-0", -3)]
    assert closed.read_text() == "x" * 8, "those that were not needed are closed too"


def test_output_appears_under_the_new_name(capfd):
    class Talking(Placed):
        def __init__(self):
            super().__init__()
            print("made", flush=True)

    with make(1, factory=Talking) as envs:
        standbys(envs)
        envs.reset(seed=0)
        envs[0].arm("crash").result(SOON)
        envs.step([1])
        envs.step([2])
        envs[0].arm("print").result(SOON)
        envs.step([3])
        envs[0].arm("crash").result(SOON)
        failure = envs.step([4])[4][0]["failure"]
        assert "complained on command" in failure.stderr_tail
    out, err = capfd.readouterr()
    assert "[env-0] made\n" in out
    assert "[standby-0] made\n" in out
    assert "[env-0] printed on command\n" in out
    assert "[env-0] complained on command\n" in err


def test_threads_of_env_code_learn_whose_they_are_now(tmp_path):
    class Wondering(Placed):
        def __init__(self):
            super().__init__()
            threading.Thread(target=self.wonder, daemon=True).start()

        def wonder(self):
            while ea.current_actor().index < 0:
                time.sleep(0.01)
            (tmp_path / str(ea.current_actor().incarnation)).touch()

    with make(1, factory=Wondering) as envs:
        standbys(envs)
        envs[0].renew().result(SOON)
        wait_for_path(tmp_path / "1")


# Replacing ---------------------------------------------------------------------------------------------------


def test_used_standbys_are_replaced_in_the_background():
    # Without deadlines: on a busy machine, a step that missed one would use one more.
    with make(2, standbys=2, deadlines=ea.Deadlines()) as envs:
        envs.reset(seed=0)
        used = set()
        for turn in range(6):
            ready = {standby.pid for standby in standbys(envs)}
            envs[turn % 2].arm("crash").result(SOON)
            envs.step([1, 1])
            envs.step([2, 2])
            assert envs[turn % 2].pid in ready - used
            used.add(envs[turn % 2].pid)
        assert len(used) == 6
        assert [actor.incarnation for actor in envs.actors] == [3, 3]


def test_more_losses_than_standbys_at_once():
    with make(4) as envs:
        pid = standbys(envs)[0].pid
        envs.reset(seed=0)
        for turn in range(5):
            envs.step([1] * 4)
            for i in range(4):
                envs[i].arm("crash").result(SOON)
            assert all("failure" in info for info in envs.step([2] * 4)[4])
            *_, infos = envs.step([3] * 4)
            assert [info["seed"] for info in infos] == [derived(i, turn + 1) for i in range(4)]
            assert [info["who"] for info in infos] == [(f"env-{i}", i, turn + 1) for i in range(4)]
            assert turn or [actor.pid for actor in envs.actors].count(pid) == 1
        assert [stats.restarts for stats in envs.stats().actors] == [5] * 4


def test_a_standby_that_is_killed_while_idle_is_replaced():
    with make(2) as envs:
        (standby,) = standbys(envs)
        first = standby.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: standby.pid not in (first, None))
        second = standbys(envs)[0].pid
        envs.reset(seed=0)
        envs[1].arm("crash").result(SOON)
        assert "failure" in envs.step([1, 1])[4][1]
        assert envs.step([1, 1])[4][1]["who"] == ("env-1", 1, 1)
        assert envs[1].pid == second


def test_a_failed_start_keeps_its_backoff(tmp_path):
    bad, blocked = tmp_path / "bad", tmp_path / "blocked"

    def picky():
        if ea.current_actor().index < 0:
            wait_while(blocked)
        elif bad.exists():
            wait_while(bad)
            raise LookupError("not now")
        return Placed()

    with make(1, factory=picky, restart=ea.RestartPolicy(max_restarts=9, backoff=0.1)) as envs:
        standbys(envs)
        envs.reset(seed=0)
        bad.touch()
        blocked.touch()
        os.kill(envs[0].pid, signal.SIGKILL)
        wait_until(lambda: envs[0].state is ea.ActorState.IDLE and envs[0].incarnation == 1)
        os.kill(envs[0].pid, signal.SIGKILL)
        wait_for_path(bad.with_suffix(".seen"))  # no standby is ready, so a new process starts, which will fail
        blocked.unlink()
        standbys(envs)
        begun = time.monotonic()
        bad.unlink()
        wait_until(lambda: envs[0].state is ea.ActorState.IDLE and envs[0].incarnation == 3)
        assert time.monotonic() - begun >= 0.4
        assert envs[0].get("made_as").result(SOON)[0] == "standby-0"
        assert isinstance(envs.stats().actors[0].last_failure, ea.ActorStartError)


# Standbys that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [True, False], ids=["dies", "hangs"])
def test_a_standby_that_crashes_while_it_is_taken_is_skipped(ends):
    with make(2, restart=ea.RestartPolicy(max_restarts=1, backoff=0.0)) as envs:
        pid = standbys(envs)[0].pid
        envs.reset(seed=0)
        envs.step([1, 1])
        os.kill(pid, signal.SIGSTOP)  # it looks ready, but never answers
        envs[1].arm("crash").result(SOON)
        assert "failure" in envs.step([2, 2])[4][1]
        wait_until(lambda: envs[1].pid == pid)
        if ends:
            os.kill(pid, signal.SIGKILL)
        assert envs.step([3, 3])[4][1] == {"seed": derived(1, 1), "options": None, "who": ("env-1", 1, 1)}
        assert envs[1].pid != pid
        assert is_gone(pid)
        assert envs[1].get("made_as").result(SOON) == ("env-1", 1, 1)
        assert (envs[1].incarnation, envs.stats().actors[1].restarts) == (1, 1)


def test_kills_at_any_moment_of_the_taking():
    dice = random.Random(5)
    with make(2, deadlines=ea.Deadlines(step=5.0, reset=5.0)) as envs:
        envs.reset(seed=0)
        for turn in range(12):
            pid = standbys(envs)[0].pid
            envs[1].arm("crash").result(SOON)
            pause = dice.random() * 0.004

            def end(pid=pid, pause=pause):
                time.sleep(pause)
                os.kill(pid, signal.SIGKILL)

            thread = threading.Thread(target=end)
            thread.start()
            seen = [envs.step([turn, turn]) for _ in range(4)]
            thread.join()
            # One loss or two, as the standby may have been the env's own already; each told once, each with its reset.
            failures = [at for at, (*_, infos) in enumerate(seen) if "failure" in infos[1]]
            assert failures
            assert failures[0] == 0
            for at in failures:
                if at < 3 and at + 1 not in failures:
                    info = seen[at + 1][4][1]
                    assert info["seed"] == derived(1, info["who"][2])
            assert not any("failure" in infos[0] for *_, infos in seen)
            wait_until(lambda pid=pid: is_gone(pid))
            while "failure" in envs.step([turn, turn])[4][1]:
                pass
        assert envs.stats().actors[1].restarts <= envs[1].incarnation


def test_a_standby_that_cannot_be_made_is_given_up_and_the_vector_continues(caplog):
    def picky():
        if ea.current_actor().index < 0:
            raise LookupError("no place for me")
        return Placed()

    with caplog.at_level(logging.WARNING, "envactors"), make(2, factory=picky, restart=FAST_TWO) as envs:
        (standby,) = envs._standbys
        wait_until(lambda: standby.state is ea.ActorState.DEAD and "cannot be restarted" in caplog.text)
        envs.reset(seed=0)
        envs[0].arm("crash").result(SOON)
        assert "failure" in envs.step([1, 1])[4][0]
        assert envs.step([1, 1])[4][0]["who"] == ("env-0", 0, 1)
    assert len([record for record in caplog.records if record.name == "envactors"]) == 1
    assert "actor 'standby-0' cannot be restarted" in caplog.text
    assert "no place for me" in caplog.text


FAST_TWO = ea.RestartPolicy(max_restarts=2, backoff=0.0)


# Ending ------------------------------------------------------------------------------------------------------


def test_close_closes_standbys_that_are_ready_and_does_not_wait_for_others(tmp_path):
    closed, blocked = tmp_path / "closed", tmp_path / "blocked"

    def slow_standby():
        if ea.current_actor().name == "standby-1":
            wait_while(blocked)
        return Placed(closed)

    blocked.touch()
    envs = make(2, factory=slow_standby, standbys=2)
    wait_until(lambda: envs._standbys[0].state is ea.ActorState.IDLE)
    wait_for_path(blocked.with_suffix(".seen"))
    pids = [standby.pid for standby in envs._standbys]
    begun = time.monotonic()
    envs.close()
    assert time.monotonic() - begun < promised(2.0)
    assert all(map(is_gone, pids))
    assert closed.read_text() == "xxx"


def test_standbys_end_with_a_vector_that_is_dropped():
    envs = make(2, standbys=2)
    pids = [standby.pid for standby in standbys(envs)]
    actor = envs.actors[0]
    del envs
    gc.collect()
    wait_until(lambda: all(map(is_gone, pids)))
    assert actor.get("made_as").result(SOON) == ("env-0", 0, 0), "who is still held lives on"
    actor.kill(restart=True)
    assert actor.get("made_as").result(SOON) == ("env-0", 0, 1)
    del actor


# Refusing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"standbys": -1}, "standbys is -1: expected an int >= 0"),
        ({"standbys": True}, "standbys is True: expected an int >= 0"),
        ({"standbys": 1.0}, "standbys is 1.0: expected an int >= 0"),
        ({"standbys": 1, "backend": "thread"}, "no process can be lost"),
        ({"standbys": 1, "backend": "inline"}, "no process can be lost"),
        ({"standbys": 1, "env_vars": [{"A": "1"}, {"A": "2"}]}, "env_vars of actor 1"),
        ({"standbys": 1, "factories": [Placed, Counter]}, "one and the same object"),
    ],
)
def test_invalid_standby_options_raise_before_anything_starts(options, what):
    with pytest.raises(ValueError, match=what):
        ea.VectorEnv(**{"factories": [Placed] * 2, **options})


@pytest.mark.fresh_processes
def test_the_same_env_vars_for_all_are_a_standbys_too():
    with make(2, env_vars=[{"A": "1"}, {"A": "1"}]) as envs:
        standbys(envs)
        envs.actors[0].renew().result(SOON)
        assert envs.call("get_made_as", env_ids=[0]) == [("standby-0", -1, 0)]
        assert envs.call("environ", "A") == ["1", "1"]


# How many start at once --------------------------------------------------------------------------------------


@pytest.fixture
def at_most(monkeypatch):
    """Sets how many processes may be starting at a time."""
    return lambda limit: monkeypatch.setattr(FORK_SERVER, "traits", Traits(can_kill=True, max_starting=limit))


def test_only_so_many_processes_start_at_a_time(at_most, tmp_path):
    log = tmp_path / "log"

    def slow():
        note("+")
        wait_until(lambda: "++" in log.read_text())  # another one has started meanwhile
        time.sleep(0.05)
        note("-")
        return Counter()

    def note(what):
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, what.encode())
        os.close(file)

    at_most(2)
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(ea.spawn(slow, restart=FAST)) for _ in range(6)]
        assert actors[-1].state is ea.ActorState.STARTING
        assert [actor.add().result(SOON) for actor in actors] == [1] * 6
        for renewal in [actor.renew() for actor in actors]:
            assert renewal.result(SOON) == 1
    running = np.cumsum([1 if letter == "+" else -1 for letter in log.read_text()])
    assert (len(running), running[-1]) == (24, 0)
    assert running.max() == 2, "never more, and not only one after the other"


def test_a_start_deadline_does_not_count_while_waiting(at_most, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.touch()
    at_most(1)
    with ea.spawn(lambda: wait_while(blocked) or Counter()) as first:
        wait_for_path(blocked.with_suffix(".seen"))
        with ea.spawn(Counter, deadlines=ea.Deadlines(start=UP + 0.5)) as second:
            begun = time.monotonic()
            future = second.add()
            wait_until(lambda: time.monotonic() - begun > UP + 0.6)
            assert (second.state, second.pid) == (ea.ActorState.STARTING, None)
            blocked.unlink()
            assert future.result(SOON) == 1
            assert second.incarnation == 0
        assert first.add().result(SOON) == 1


def test_a_start_that_hangs_blocks_others_up_to_its_deadline(at_most, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.touch()
    at_most(1)
    with ea.spawn(lambda: wait_while(blocked), deadlines=ea.Deadlines(start=0.3)) as hung, ea.spawn(Counter) as other:
        assert other.add().result(SOON) == 1
        with pytest.raises(ea.ActorStartError, match=r"start deadline of 0\.3 s"):
            hung.add().result(SOON)


def test_what_waits_for_its_start_is_closed_killed_and_replaced_at_once(at_most, tmp_path):
    blocked, made = tmp_path / "blocked", tmp_path / "made"
    blocked.touch()
    at_most(1)

    def never():
        made.touch()

    with ea.spawn(lambda: wait_while(blocked) or Counter()) as first:
        wait_for_path(blocked.with_suffix(".seen"))
        begun = time.monotonic()
        ea.spawn(never).close()
        ea.spawn(never).kill()
        owing = ea.spawn(never)
        future = owing.add()
        owing.close(0.1)  # what is queued may still run until then
        with pytest.raises(ea.ActorDiedError) as caught:
            future.result(0)
        assert caught.value.aborted
        dropped = ea.spawn(never)
        del dropped
        gc.collect()
        other = ea.spawn(Counter)
        other.kill(restart=True)
        assert time.monotonic() - begun < promised(1.0)
        closing = ea.spawn(Counter)
        pending = closing.add()
        thread = threading.Thread(target=closing.close, args=(SOON,))
        thread.start()
        wait_until(lambda: closing._actor.is_closing)
        blocked.unlink()
        assert pending.result(SOON) == 1, "what is queued runs first"
        thread.join()
        assert other.add().result(SOON) == 1
        assert other.incarnation == 1
        other.close()
        assert first.add().result(SOON) == 1
    assert not made.exists()


def test_the_limit_follows_the_cores_and_is_checked():
    assert ea.ProcessBackend().traits.max_starting == max(8, 4 * cores())
    assert ea.ProcessBackend(max_starting=3).traits.max_starting == 3
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"max_starting is {wrong}: expected an int >= 1"):
            ea.ProcessBackend(max_starting=wrong)
